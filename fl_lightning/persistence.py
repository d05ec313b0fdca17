"""The federated part of a checkpoint, and checks that reject a checkpoint of another run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from fl_lightning import arguments
from fl_lightning.checkpoints import readable as readable
from fl_lightning.checkpoints import watch as watch
from fl_lightning.errors import FederationError
from fl_lightning.loop import Tally
from fl_lightning.nets import FedNet
from fl_lightning.tasks import Classification

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

KEY = "fl_lightning"
VERSION = 1
#: Types of the saved values, as far as they are plain.
FORM: dict[str, Any] = {
    "seed": int,
    "rounds": int,
    "stages": int,
    "bytes": list[int],
    "engine": str | None,
    "clients": dict,
    "tally": dict,
    "server": dict,
    "summary": dict,
    "scores": dict,
}
#: Settings that may change when a run is resumed: they change how results are computed, not which.
FREE = ("engine", "workers", "clients_per_stack", "store", "seed", "net")


def note_hyperparameters(module: FederatedModule, net: nn.Module | dict[str, Any]) -> None:
    """Add to the module's hyperparameters what ``load_from_checkpoint`` needs to rebuild it.

    The net is saved as class path and arguments, which load with ``weights_only=True``. A plain ``nn.Module`` cannot
    be saved like this and must be passed again.
    """
    module.hparams["seed"] = module.seed
    initial: Any = module._hparams_initial  # what loggers get
    for noted in (module.hparams, initial):
        noted.update({name: _plain(one) for name, one in noted.items() if isinstance(one, arguments.Settings)})
    for name in arguments.fixed_options(type(module)):
        module.hparams.pop(name, None)
    if isinstance(net, FedNet):
        module.hparams["net"] = net.spec
    if module.task.spec != Classification().spec:
        module.hparams["task"] = module.task.spec
    local = module.local.described()
    for option, setting in (("optimizer", "optimizer"), ("lr_schedule", "schedule")):
        if setting in local:
            module.hparams[option] = local[setting]


def _plain(settings: arguments.Settings) -> dict[str, Any]:
    """Settings as a dict of plain values, which loads with ``weights_only=True``."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def save(module: FederatedModule, checkpoint: dict[str, Any]) -> None:
    """Add the federated part to a checkpoint: plain dicts of tensors and numbers."""
    data = getattr(module._trainer, "datamodule", None)
    checkpoint[KEY] = {
        "version": VERSION,
        "method": type(module).__name__,
        "seed": module.seed,
        "data": getattr(data, "fingerprint", None),
        "sampled": getattr(data, "fraction", None),
        "optimizer": next((type(one).__name__ for one in getattr(module._trainer, "optimizers", ())), None),
        "engine": module.engine.choice,
        "clients": module.exchange.state_dict(),
        "rounds": module.completed_rounds,
        "stages": module.completed_stages,
        "tally": asdict(module.tally),
        "server": module.server_extras(),
        "summary": dict(module.summary),
        "bytes": [module.bytes_up, module.bytes_down],
        "scores": module.evaluator.state_dict(),
    }


def load(module: FederatedModule, checkpoint: dict[str, Any]) -> None:
    """Restore the federated part of a checkpoint, or raise an error that says why it does not fit."""
    try:
        _load(module, checkpoint)
    except FederationError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FederationError(
            f"The checkpoint lacks part of the state of a federated run, or has it in another form "
            f"({type(error).__name__}: {error}): use an unmodified one."
        ) from error


def _load(module: FederatedModule, checkpoint: dict[str, Any]) -> None:
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
    module.exchange.load_state_dict(saved["clients"])
    if module._trainer is not None:
        _check_run(module, module._trainer, saved)
        _warn_of_changes(module, module._trainer, checkpoint)
    _check_form(saved, checkpoint["epoch"] if "epoch" in checkpoint else saved["rounds"])
    if module._trainer is not None:
        _check_rounds(module._trainer, saved["rounds"])
    if saved["engine"] is not None:
        module.engine.settle(saved["engine"])
    module.completed_rounds, module.summary = saved["rounds"], dict(saved["summary"])
    module.completed_stages, module.tally = saved.get("stages", 0), Tally(**saved.get("tally", {}))
    module.load_server_extras(saved.get("server", {}))
    module.bytes_up, module.bytes_down = saved["bytes"]
    module.evaluator.load_state_dict(saved["scores"])


def _check_rounds(trainer: Trainer, rounds: int) -> None:
    """Reject a fit that is to end before the round that it resumes from."""
    most = trainer.max_epochs
    if _is_fit(trainer) and most not in (None, -1) and rounds > most:
        raise FederationError(
            f"The checkpoint has {rounds} rounds already: set max_epochs to more than that, not {most}."
        )


def _check_form(saved: dict[str, Any], epoch: int) -> None:
    """Reject values of wrong types, inconsistent clients, and round counts beyond the epoch."""
    for name, kind in FORM.items():
        if name in saved and not arguments.fits(saved[name], kind):
            raise TypeError(f"{name} is not {arguments.in_words(kind)}")
    if not 0 <= saved["rounds"] <= epoch + 1 or saved.get("stages", 0) < 0:
        raise ValueError(f"{saved['rounds']} rounds, {saved.get('stages', 0)} stages, epoch {epoch}")
    if saved["clients"]["private"].keys() != saved["clients"]["counters"].keys():
        raise ValueError("entries and counters are of different clients")


def _check_entries(module: FederatedModule, saved: dict[str, torch.Tensor]) -> None:
    own = module.state_dict()
    if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
        raise FederationError(
            f"The checkpoint's model does not fit {type(module.net).__name__}: build the net with the settings it was "
            "trained with, or use load_from_checkpoint."
        )
    if module._trainer is not None and module._trainer.precision == "64-true":
        module.double()  # before the weights are loaded: the Trainer converts later, which would round them


def _is_fit(trainer: Trainer) -> bool:
    return bool(trainer.training) or trainer.state.fn == "fit"


def _check_run(module: FederatedModule, trainer: Trainer, saved: dict[str, Any]) -> None:
    """Require the same seed, data and server optimizer to resume a fit; evaluation may use others."""
    if not _is_fit(trainer):
        return
    if saved["seed"] != module.seed:
        raise FederationError(
            f"The checkpoint's run had seed {saved['seed']} and cannot continue with seed {module.seed}: "
            f"pass seed={saved['seed']}."
        )
    optimizer = module.configure_optimizers()
    given = type(optimizer).__name__
    if isinstance(optimizer, Optimizer) and saved.get("optimizer") not in (None, given):
        raise FederationError(
            f"The checkpoint's run had the server optimizer {saved['optimizer']} and cannot continue with {given}: "
            "pass the server_optimizer that it was started with."
        )
    fingerprint = getattr(trainer.datamodule, "fingerprint", None)  # type: ignore[attr-defined]
    if saved["data"] is not None and fingerprint is not None and saved["data"] != fingerprint:
        raise FederationError(
            "The checkpoint's run had other data or another partition: resume it with the DataModule settings and "
            "seed it was started with."
        )


def _warn_of_changes(module: FederatedModule, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """List the settings that differ from those of the resumed run, in one warning."""
    if not _is_fit(trainer):
        return
    saved, now = dict(checkpoint.get("hyper_parameters") or {}), dict(module.hparams)
    if checkpoint[KEY].get("sampled") is not None:
        saved["fraction"], now["fraction"] = checkpoint[KEY]["sampled"], getattr(_data(trainer), "fraction", None)
    names = [name for name in now if name in saved and name not in FREE and not name.startswith("_")]
    pairs = {name: (_text(now[name]), _text(saved[name])) for name in names}
    changed = [f"{name} {new} (was {old})" for name, (new, old) in pairs.items() if new != old and " at 0x" not in new]
    changed += _changed_server_options(module, checkpoint)
    if changed:
        rank_zero_warn(f"The run continues with other settings than its checkpoint: {', '.join(changed)}.")


def _changed_server_options(module: FederatedModule, checkpoint: dict[str, Any]) -> list[str]:
    """List changed options of the server's optimizer; the checkpoint's apply, since Lightning restores them."""
    optimizer, states = module.configure_optimizers(), checkpoint.get("optimizer_states")
    if not isinstance(optimizer, Optimizer) or not states:
        return []
    now, saved = optimizer.param_groups[0], states[0]["param_groups"][0]
    pairs = {name: (now[name], saved[name]) for name in saved if name != "params" and name in now}
    differ = {name: pair for name, pair in pairs.items() if _text(pair[0]) != _text(pair[1])}
    return [f"server_optimizer {name} {new}, which is ignored ({old})" for name, (new, old) in differ.items()]


def _data(trainer: Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def _text(value: Any) -> str:
    """Format a setting so that equal lists and tuples give the same text."""
    return str(list(value) if isinstance(value, tuple) else value)
