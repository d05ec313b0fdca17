"""``fit``, ``validate``, ``test`` and ``predict``: a LightningCLI for federated methods and data."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import fl_lightning.methods
import fl_lightning.optim  # noqa: F401
from fl_lightning import persistence
from fl_lightning.callbacks import RunRecord
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.module import FederatedModule


class FederatedCLI(LightningCLI):
    """LightningCLI with federated methods as models and federations as data.

    One seed decides everything: ``--seed_everything`` (0 unless given) is that of the initial weights, the partition,
    the cohorts and the clients' streams.
    """

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
            **kwargs,
        )

    def _parse_ckpt_path(self) -> None:
        """LightningCLI reads the method's settings from the checkpoint: a damaged one is refused here first."""
        name = self.config.get("subcommand")
        with persistence.readable(self.config[name].get("ckpt_path") if name else None):
            super()._parse_ckpt_path()

    def _dump_config(self) -> None:
        """LightningCLI wants a place for the linked number of classes, also in nets that have no other argument."""
        super()._dump_config()
        net = ((self.config_dump.get("model") or {}).get("init_args") or {}).get("net")
        if isinstance(net, dict):
            net.setdefault("init_args", {})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The net's number of classes is that of the data."""
        parser.link_arguments("data.num_classes", "model.init_args.net.init_args.num_classes", apply_on="instantiate")


def main(argv: list[str]) -> None:
    """Run ``fl-lightning`` with a Lightning subcommand as its first argument."""
    # LightningCLI warns about arguments that it is given while the process has some of its own.
    FederatedCLI(args=None if argv == sys.argv[1:] else argv)
