"""``fit``, ``validate``, ``test`` and ``predict``: a LightningCLI for federated methods and data."""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import sys
import warnings
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

import fl_lightning.methods
import fl_lightning.optim  # noqa: F401
from fl_lightning.callbacks import FederatedCheckpoint, PredictionWriter, RoundProgress, RunRecord
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.names import resolve
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.cli.resume import newest
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import FederationError
from fl_lightning.lightning_checks import check_precision
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.process import wanted
from fl_lightning.tasks import made

#: Commands that are methods of the Trainer.
TRAINER = ("fit", "validate", "test", "predict")
#: The largest seed.
SEEDS = 2**32 - 1
#: Maximum number of processes per core; more are taken for a mistake.
MOST_PER_CORE = 4


class FederatedCLI(LightningCLI):
    """LightningCLI with federated methods as models and federations as data.

    One seed controls everything: ``--seed_everything`` (default 0) sets initial weights, partition, cohorts and the
    clients' streams.
    """

    _data: FederatedDataModule | None = None
    _outputs = 0

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        super().__init__(
            model_class=FederatedModule,
            datamodule_class=FederatedDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"log_every_n_steps": 1, "num_sanity_val_steps": 0, "callbacks": [RunRecord()]},
            parser_class=FederatedArgumentParser,
            args=args,
            **{"parser_kwargs": {"prog": "fl-lightning", **{name: about(name) for name in TRAINER}}} | kwargs,
        )

    def _parse_ckpt_path(self) -> None:
        """Keep the command line's settings: LightningCLI would silently replace them by the checkpoint's.

        A method or a net that is not the checkpoint's is refused when it is read.
        """

    def _set_seed(self) -> None:
        """Refuse what NumPy would not take."""
        seed = self._get(self.config, "seed_everything")
        if not 0 <= seed <= SEEDS:
            raise FederationError(f"seed_everything must be between 0 and {SEEDS}, not {seed}.")
        super()._set_seed()

    def _dump_config(self) -> None:
        """Add the init_args that LightningCLI needs for the linked number of classes."""
        super()._dump_config()
        net = ((self.config_dump.get("model") or {}).get("init_args") or {}).get("net")
        if isinstance(net, dict):
            net.setdefault("init_args", {})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add options, and link the net's number of classes to the data."""
        parser.add_argument("--quiet", action="store_true", help="hide progress")
        parser.add_argument(
            "--dry_run", action="store_true", help="print clients, steps, bytes and estimated time, and exit"
        )
        parser.add_argument(
            "--use", metavar="FILE.py", help="make classes in your own file or module available by name"
        )
        target = "model.init_args.net.init_args.num_classes"
        parser.link_arguments("data", target, compute_fn=self._note_data, apply_on="instantiate")

    def _note_data(self, data: FederatedDataModule) -> int:
        """Return the number of outputs, and keep the data for other settings of the net."""
        self._data = data
        given = self._get(self.config, "model.init_args.task")
        task = made(given.as_dict() if isinstance(given, Namespace) else given)
        known = data.num_classes if task.of_classes else 0
        self._outputs = known or task.outputs(data.samples.targets)
        return self._outputs

    def _add_instantiators(self) -> None:
        """Create nets that fit the data."""
        super()._add_instantiators()
        self.parser.add_instantiator(self._make_net, FedNet)

    def _make_net(self, kind: type[FedNet], *args: Any, **given: Any) -> FedNet:
        """A net whose default arguments are replaced by those of the data."""
        usual = inspect.signature(kind).parameters
        data = {} if self._data is None else {**self._data.net_arguments, "num_classes": self._outputs}
        fitting = {name: value for name, value in data.items() if name in usual and name in given}
        unset = {name: value for name, value in fitting.items() if given[name] == usual[name].default}
        return kind(*args, **{**given, **unset})

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        """Add the progress view and the checkpoint of the last round, unless others are configured."""
        check_precision(config.get("precision"))  # on a CPU Lightning would take another one
        if config.get("logger") in (None, True) and not config.get("default_root_dir"):
            config |= {"logger": TensorBoardLogger("runs", type(self.model).__name__)}
        given = config.get("callbacks") or []
        if config.get("enable_checkpointing") is not False and not _has(given, Checkpoint):
            callbacks = [*callbacks, FederatedCheckpoint()]
        chosen = _has(given, ProgressBar)
        if self._get(self.config, "quiet") or self._get(self.config, "dry_run"):
            config |= {"enable_progress_bar": False, "enable_model_summary": False}
            warnings.simplefilter("ignore", PossibleUserWarning)
            for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities.core.rank_zero"):
                logging.getLogger(name).setLevel(logging.WARNING)
        elif config.get("enable_progress_bar") is not False and not chosen:
            callbacks = [*callbacks, RoundProgress()]
        if self.subcommand == "predict" and not _has(given, PredictionWriter):
            callbacks = [*callbacks, PredictionWriter()]
        trainer = super()._instantiate_trainer(config, callbacks)
        cores = os.cpu_count() or 1
        if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > MOST_PER_CORE * cores:
            raise FederationError(
                f"--trainer.devices={trainer.num_devices} starts that many processes on {cores} cores: set it to "
                f"{cores} or less, or leave it out."
            )
        return trainer

    def fit(self, model: FederatedModule, datamodule: Any = None, **kwargs: Any) -> None:
        """Train, or print the plan of a dry run."""
        if not self._get(self.config, "dry_run"):
            self.trainer.fit(model, datamodule=datamodule, **kwargs)
            self._say_where()
            return
        from fl_lightning.cli.plan import plan

        options = {name: self._get(self.config, f"trainer.{name}") for name in ("accelerator", "devices", "precision")}
        rounds = self._get(self.config, "trainer.max_epochs")
        print("\n".join(plan(model, datamodule, rounds, **options).lines()))

    def _say_where(self) -> None:
        """Print the folder of the run and its checkpoint."""
        folder = self.trainer.log_dir
        if folder is None or self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        saver: Any = self.trainer.checkpoint_callback
        path = saver and (saver.last_model_path or saver.best_model_path)
        if not self._get(self.config, "quiet"):
            print(f"The run is in {folder}" + (f"; test it with --ckpt_path {os.path.relpath(path)}" if path else ""))

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Hide options that the subcommand refuses."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand != "fit":
            hide_dry_run(parser)
        return parser

    def _run_subcommand(self, subcommand: str) -> None:
        """Refuse a dry run of other commands."""
        if subcommand != "fit" and self._get(self.config, "dry_run"):
            raise FederationError(f"--dry_run is an option of fit, not of {subcommand}.")
        checkpoint = self._get(self.config, "ckpt_path")
        check_named(checkpoint, goes_on=subcommand == "fit")
        if subcommand != "fit" and checkpoint is None:
            print("fl-lightning: without --ckpt_path the model is untrained.", file=sys.stderr)
        if subcommand == "fit" and checkpoint == "last":
            self._go_on()
        super()._run_subcommand(subcommand)

    def _go_on(self) -> None:
        """Let ``last`` be the newest checkpoint of this configuration; without one Lightning looks, and says so."""
        path = newest(self.trainer)
        if path is not None:
            print(f"fl-lightning: resuming from {path}.", file=sys.stderr)
            self.config_init["fit"]["ckpt_path"] = str(path)


def hide_dry_run(parser: LightningArgumentParser) -> None:
    """Leave ``--dry_run`` out of the help of a command that refuses it."""
    for action in parser._actions:
        if action.dest == "dry_run":
            action.help = argparse.SUPPRESS


def _has(given: Any, kind: type[Callback]) -> bool:
    """Whether the callbacks include one of a kind."""
    return any(isinstance(callback, kind) for callback in (given if isinstance(given, list) else [given]))


def about(command: str) -> dict[str, str]:
    """The description of a command's parser."""
    text = COMMANDS[command].help
    return {"description": f"{text[0].upper()}{text[1:]}."}


def check_named(checkpoint: str | None, goes_on: bool = False) -> None:
    """Refuse ``best`` and ``last``, of which a command knows nothing: Lightning means those of the same process.

    Args:
        checkpoint: what was given as a checkpoint.
        goes_on: whether a fit goes on from it: ``last`` is then the newest run of the configuration, if there is one.
    """
    if checkpoint == "best" or (checkpoint == "last" and not goes_on):
        raise FederationError(f"--ckpt_path {checkpoint} is not known here: give a file, such as runs/.../last.ckpt.")


def main(argv: list[str]) -> None:
    """Run ``fl-lightning`` with a Lightning subcommand as its first argument."""
    FederatedCLI(args=given(argv, argv))


def given(argv: list[str], arguments: list[str]) -> list[str] | None:
    """Arguments for LightningCLI, with names resolved; None where they are the process's own, which it then reads.

    It would warn about arguments that it is given while the process has some.

    Args:
        argv: the command with all of its arguments.
        arguments: those of them that LightningCLI is to see.
    """
    own, arguments = argv == sys.argv[1:] and wanted("argv"), resolve(arguments)
    if own:
        sys.argv[1:] = arguments
    return None if own else arguments
