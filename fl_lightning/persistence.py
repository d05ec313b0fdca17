"""What a checkpoint keeps of a federated run, and how one that does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import nn
from torch.optim import Optimizer

from fl_lightning.errors import FederationError
from fl_lightning.loop import Tally
from fl_lightning.nets import FedNet
from fl_lightning.tasks import Classification

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

KEY = "fl_lightning"
VERSION = 1


def note_hyperparameters(module: FederatedModule, net: nn.Module | dict[str, Any]) -> None:
    """Add to the module's hyperparameters what ``load_from_checkpoint`` needs to make it again.

    The net is noted as class path and arguments, which load with ``weights_only=True``. A plain ``nn.Module`` cannot
    be noted; it has to be passed again.
    """
    module.hparams["seed"] = module.seed
    if isinstance(net, FedNet):
        module.hparams["net"] = net.spec
    if module.task.spec != Classification().spec:
        module.hparams["task"] = module.task.spec
    local = module.local.described()
    for option, setting in (("optimizer", "optimizer"), ("lr_schedule", "schedule")):
        if setting in local:
            module.hparams[option] = local[setting]


def save(module: FederatedModule, checkpoint: dict[str, Any]) -> None:
    """Add the federated part to a checkpoint: plain dicts of tensors and numbers."""
    data = getattr(module._trainer, "datamodule", None)
    checkpoint[KEY] = {
        "version": VERSION,
        "method": type(module).__name__,
        "seed": module.seed,
        "data": getattr(data, "fingerprint", None),
        "optimizer": next((type(one).__name__ for one in getattr(module._trainer, "optimizers", ())), None),
        "engine": module.engine.choice,
        "clients": module.snapshots.state_dict(),
        "rounds": module.completed_rounds,
        "stages": module.completed_stages,
        "tally": asdict(module.tally),
        "server": module.server_extras(),
        "summary": dict(module.summary),
        "bytes": [module.bytes_up, module.bytes_down],
        "scores": module.evaluator.state_dict(),
    }


def load(module: FederatedModule, checkpoint: dict[str, Any]) -> None:
    """Restore the federated part of a checkpoint, or say in a sentence why it does not fit."""
    saved = checkpoint.get(KEY)
    if not isinstance(saved, dict):
        raise FederationError("The checkpoint was not written by fl_lightning: it holds no clients.")
    if saved.get("version") != VERSION:
        raise FederationError(
            f"The checkpoint has format {saved.get('version')}, this version of fl_lightning reads {VERSION}."
        )
    if saved["method"] != type(module).__name__:
        raise FederationError(f"The checkpoint is of {saved['method']}, not of {type(module).__name__}.")
    _check_entries(module, checkpoint["state_dict"])
    if module._trainer is not None:
        _check_run(module, module._trainer, saved)
    if saved["engine"] is not None:
        module.engine.settle(saved["engine"])
    module.snapshots.load_state_dict(saved["clients"])
    module.completed_rounds, module.summary = saved["rounds"], dict(saved["summary"])
    module.completed_stages, module.tally = saved.get("stages", 0), Tally(**saved.get("tally", {}))
    module.load_server_extras(saved.get("server", {}))
    module.bytes_up, module.bytes_down = saved["bytes"]
    module.evaluator.load_state_dict(saved["scores"])


def _check_entries(module: FederatedModule, saved: dict[str, torch.Tensor]) -> None:
    own = module.state_dict()
    if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
        raise FederationError(
            f"The checkpoint's model does not fit {type(module.net).__name__}: make the net with the settings it was "
            "trained with, or use load_from_checkpoint."
        )
    if module._trainer is not None and module._trainer.precision == "64-true":
        module.double()  # the Trainer would do so only after the weights are read, and they would lose digits


def _check_run(module: FederatedModule, trainer: Trainer, saved: dict[str, Any]) -> None:
    """A run is continued only with its own seed, data and server optimizer; a model may be evaluated with others."""
    if not trainer.training and trainer.state.fn != "fit":
        return
    if saved["seed"] != module.seed:
        raise FederationError(
            f"The checkpoint's run had seed {saved['seed']} and cannot go on with seed {module.seed}: "
            f"pass seed={saved['seed']}."
        )
    optimizer = module.configure_optimizers()
    given = type(optimizer).__name__
    if isinstance(optimizer, Optimizer) and saved.get("optimizer") not in (None, given):
        raise FederationError(
            f"The checkpoint's run had the server optimizer {saved['optimizer']} and cannot go on with {given}: pass "
            "the server_optimizer that it was started with."
        )
    fingerprint = getattr(trainer.datamodule, "fingerprint", None)  # type: ignore[attr-defined]
    if saved["data"] is not None and fingerprint is not None and saved["data"] != fingerprint:
        raise FederationError(
            "The checkpoint's run had other data or another partition: continue it with the DataModule settings and "
            "seed it was started with."
        )


class CheckedCheckpointIO(_WrappingCheckpointIO):
    """Reads checkpoints as the wrapped plugin does, and says in a sentence what is wrong with one it cannot read."""

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as the wrapped plugin does."""
        with readable(path):
            return super().load_checkpoint(path, *args, **kwargs)


@contextmanager
def readable(path: Any, method: str = "method") -> Iterator[None]:
    """Turn whatever reading a damaged or missing checkpoint raises into a sentence."""
    try:
        yield
    except FederationError:
        raise
    except FileNotFoundError as error:
        raise FederationError(f"There is no checkpoint {path}.") from error
    except Exception as error:
        if "required positional argument: 'net'" in str(error):
            raise FederationError(
                f"The checkpoint {path} does not say how its net is made, as it is not a FedNet: "
                f"pass the net again: {method}.load_from_checkpoint(path, net=...)."
            ) from error
        raise FederationError(
            f"The checkpoint {path} cannot be read, it is damaged or not a checkpoint ({type(error).__name__}): "
            "use an earlier one."
        ) from error


def watch(trainer: Trainer) -> None:
    """Let the Trainer's strategy read checkpoints through :class:`CheckedCheckpointIO`."""
    strategy = trainer.strategy
    if not isinstance(strategy.checkpoint_io, CheckedCheckpointIO):
        strategy.checkpoint_io = CheckedCheckpointIO(strategy.checkpoint_io)
