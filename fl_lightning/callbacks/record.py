"""The record of a run in one file next to its logs, for ``fl-lightning compare``."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.arguments import NamedArguments
from fl_lightning.callbacks.defence import DifferentialPrivacyCallback
from fl_lightning.callbacks.journal import Journal
from fl_lightning.errors import FederationError
from fl_lightning.measure import ACCURACY, Measure

#: Name and format version of the file.
FILE, FORMAT = "run.json", 1
#: File of the curves, one line per round.
CURVES = "curves.jsonl"
#: Required keys and their types.
KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("settings", "curves", "clients", "groups"), (dict,)),
    **dict.fromkeys(("rounds", "seconds", "steps", "parameters"), (int, float, NoneType)),
    "engine": (str, NoneType),
    "bytes": (list, NoneType),
}
#: Minimum seconds between writes during a run, also as a multiple of the duration of a write.
EVERY, SHARE = 10.0, 50.0
#: Arguments of a DataModule that are not settings of the experiment or are recorded elsewhere.
ELSEWHERE = ("seed", "root", "download", "partition")
#: Maximum length of a setting that is recorded in full.
LONG = 200


class ClientHistory:
    """Score of every client after validated rounds; in long runs only every second, fourth, ... is kept.

    Args:
        most: maximum number of rounds to keep.

    Example:
        >>> history = ClientHistory(most=2)
        >>> for round in range(5):
        ...     history.add(round, torch.tensor([round / 10]))
        >>> history.rounds
        [0, 4]
    """

    def __init__(self, most: int = 200) -> None:
        self.most = max(most, 2)
        self.rounds: list[int] = []
        self.scores: list[Tensor] = []
        self._last: tuple[int, Tensor] | None = None
        self._seen, self._stride = 0, 1

    def add(self, round: int, scores: Tensor) -> None:
        """Add the scores of a round, shape (clients,)."""
        self._last = round, scores.detach().cpu().float()
        if self._seen % self._stride == 0:
            self.rounds.append(round)
            self.scores.append(self._last[1])
        self._seen += 1
        if len(self.rounds) > self.most:
            self._stride *= 2
            self.rounds, self.scores = self.rounds[::2], self.scores[::2]

    def table(self) -> tuple[list[int], Tensor]:
        """Return the rounds, always including the last one, and the scores, shape (rounds, clients)."""
        rounds, scores = list(self.rounds), list(self.scores)
        if self._last is not None and (not rounds or rounds[-1] != self._last[0]):
            rounds.append(self._last[0])
            scores.append(self._last[1])
        return rounds, torch.stack(scores) if scores else torch.empty(0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        scores = torch.stack(self.scores) if self.scores else torch.empty(0, 0)
        return {
            "rounds": list(self.rounds),
            "scores": scores,
            "last": self._last,
            "seen": self._seen,
            "stride": self._stride,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.rounds, self.scores = list(state["rounds"]), list(state["scores"])
        self._last, self._seen, self._stride = state["last"], state["seen"], state["stride"]


class RunRecord(NamedArguments, Callback):
    """Writes ``run.json`` to the log folder: settings, all logged curves, every client's score, bytes and speed.

    The score is the task's headline metric, named by ``measure``; its rows are called ``accuracy`` for any metric.

    ``fl-lightning fit`` always uses this callback; in Python pass it to the Trainer. The file is written during the
    run, at its end and on exceptions, and is complete for resumed runs. Without a logger, nothing is written.

    ``curves.jsonl`` in the same folder has one line per round. A checkpoint stores only its length: keep the folder of
    a run to be resumed.

    Args:
        folder: folder of the files; None means the Trainer's log folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.curves: dict[str, tuple[list[int], list[float]]] = {}
        self.history = ClientHistory()
        self.seconds = 0.0
        self._validated: set[str] = set()
        self._journal, self._round = Journal(), -1
        self._began = self._wrote = time.perf_counter()
        self._took = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset an earlier run; a resumed one restores its own state."""
        if stage == "fit" and not trainer.current_epoch:
            self.curves, self.history, self.seconds, self._validated = {}, ClientHistory(), 0.0, set()
            self._journal.forget()
            self._round = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the curves' file and start the clock."""
        folder = self._folder(trainer)
        self._journal.open(None if folder is None else folder / CURVES)
        self._began = self._wrote = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record every client's score and the metrics logged so far."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        module: Any = pl_module
        known = getattr(getattr(module, "evaluator", None), "scores", {})
        scores = known.get(module.federation.validated) if known else None
        if scores is not None:
            self.history.add(trainer.current_epoch, scores)
        # Lightning may save a checkpoint now, which must include this round.
        trained, validated = (
            dict(loop._results.metrics(on_step=False)["callback"])
            for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop)
        )
        self._validated = set(validated)
        self._note(trainer.current_epoch, trained | validated)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the round's metrics, without those of an earlier validation."""
        logged = {name: value for name, value in trainer.callback_metrics.items() if name not in self._validated}
        self._note(trainer.current_epoch, logged)
        if time.perf_counter() - self._wrote > max(EVERY, SHARE * self._took):
            self._write(trainer, pl_module)

    def _note(self, round: int, metrics: Mapping[str, Tensor]) -> None:
        """Add or update a round's metrics; those of the previous round become final."""
        if round != self._round:
            if self._round >= 0:
                self._journal.add(json.dumps([self._round, self._numbers()]) + "\n")
            self._round = round
        for name, number in ((name, float(value)) for name, value in metrics.items()):
            rounds, values = self.curves.setdefault(name, ([], []))
            if math.isfinite(number) and rounds and rounds[-1] == round:
                values[-1] = number
            elif math.isfinite(number):
                rounds.append(round)
                values.append(number)

    def _numbers(self) -> dict[str, float]:
        """Return the metrics of the last round."""
        return {name: v[-1] for name, (rounds, v) in self.curves.items() if rounds and rounds[-1] == self._round}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record later metrics, such as those of attacks, and write the file."""
        last = max(trainer.current_epoch - 1, 0)
        for name, value in trainer.callback_metrics.items():
            rounds, values = self.curves.setdefault(name, ([], []))
            if rounds and rounds[-1] == last:
                values[-1] = float(value)
            elif not rounds and math.isfinite(float(value)):
                rounds.append(last)
                values.append(float(value))
        self.curves = {name: curve for name, curve in self.curves.items() if curve[0]}
        self._write(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the record so far."""
        if trainer.state.fn == "fit" and self.curves:
            self._write(trainer, pl_module)

    def elapsed(self) -> float:
        """Return the seconds of training so far, over all resumptions."""
        return self.seconds + time.perf_counter() - self._began

    def record(self, trainer: Trainer, module: Any) -> dict[str, Any]:
        """Return the contents of the file."""
        federated = hasattr(module, "snapshots")
        rounds, scores = self.history.table()
        measure = module.task.measure if federated else ACCURACY
        state = module.server_state() if federated else dict(module.named_parameters())
        shared = module.shared_names if federated else state
        return {
            "format": FORMAT,
            "settings": settings_of(trainer, module),
            "rounds": module.completed_rounds if federated else trainer.current_epoch,
            "seconds": round(self.elapsed(), 2),
            "steps": sum(module.snapshots[client].steps for client in module.snapshots) if federated else None,
            "engine": (getattr(module.engine, "choice", None) or module.engine.name) if federated else None,
            "bytes": [module.bytes_up, module.bytes_down] if federated else None,
            "parameters": sum(state[name].numel() for name in shared),
            "curves": {name: {"rounds": r, "values": v} for name, (r, v) in sorted(self.curves.items())},
            "measure": asdict(measure),
            "clients": {"rounds": rounds, "accuracy": [[_figure(v, measure) for v in row] for row in scores.tolist()]},
            "groups": groups_of(module) if federated else {},
        }

    def _folder(self, trainer: Trainer) -> Path | None:
        """Return the output folder; None if nothing is written."""
        folder = self.folder or (trainer.log_dir if trainer.loggers else None)
        if folder is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return None
        return Path(folder)

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        folder, began = self._folder(trainer), time.perf_counter()
        if folder is None:
            return
        path = folder / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(self.record(trainer, module)) + "\n", encoding="utf-8")
        os.replace(partial, path)
        self._wrote = time.perf_counter()
        self._took = self._wrote - began

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the curves' file, the last round's metrics, clients' scores and clock."""
        last = {"journal": self._journal.state_dict(), "round": self._round, "numbers": self._numbers()}
        return {**last, "clients": self.history.state_dict(), "seconds": self.elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self._journal.load_state_dict(state_dict["journal"])
        self._round = int(state_dict["round"])
        rows = [json.loads(line) for line in self._journal.text().splitlines()]
        self.curves = {}
        for round, numbers in [*rows, (self._round, state_dict["numbers"])]:
            for name, number in numbers.items():
                rounds, values = self.curves.setdefault(name, ([], []))
                rounds.append(round)
                values.append(number)
        self.history.load_state_dict(state_dict["clients"])
        self.seconds = float(state_dict["seconds"])


def settings_of(trainer: Trainer, module: Any) -> dict[str, Any]:
    """Return a run's settings as a flat dict: method, net, data, defences and all their arguments."""
    data = getattr(trainer, "datamodule", None)
    found: dict[str, Any] = {"method": type(module).__name__}
    if data is not None:
        found |= {"data": type(data).__name__, "partition": str(getattr(data, "partition", None) or "own indices")}
        _flatten(found, "data", _data_arguments(data))
        federation = getattr(data, "federation", None)
        if federation is not None:
            found["clients"] = federation.num_clients
    found["rounds"] = trainer.max_epochs
    arguments = {name: value for name, value in module.hparams.items() if not name.startswith("_")}  # LightningCLI's
    if "clients" in arguments:  # Local's option; the name is used for the number of clients
        arguments["chosen_clients"] = arguments.pop("clients")
    net = arguments.pop("net", None) or {"class_path": type(getattr(module, "net", module)).__name__}
    found["net"] = str(net["class_path"]).rpartition(".")[2]
    _flatten(found, "net", net.get("init_args") or {})
    _flatten(found, "", arguments)
    optimizer = getattr(module, "server_optimizer", None)
    if optimizer is not None:
        found["server_optimizer"] = _maker(optimizer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, DifferentialPrivacyCallback):
            name = f"defence.{type(callback).__name__}"
            found[name] = True
            _flatten(found, name, _arguments(callback))
    return {**found, "precision": str(trainer.precision)}


def _data_arguments(data: Any) -> dict[str, Any]:
    """Return plain arguments of a DataModule that identify an experiment, without the seed and paths."""
    arguments = dict(data.hparams) or _arguments(data)
    manifest = getattr(data, "manifest", None)
    if manifest is not None:
        arguments["manifest"] = manifest.index_hash
    return {name: value for name, value in arguments.items() if name not in ELSEWHERE and _plain(value)}


def _arguments(made: Any) -> dict[str, Any]:
    """Return an object's constructor arguments, including inherited ones, if stored under their names."""
    makers = [vars(kind)["__init__"] for kind in type(made).__mro__ if "__init__" in vars(kind)]
    names = dict.fromkeys(name for maker in makers for name in inspect.signature(maker).parameters)
    return {name: getattr(made, name) for name in names if hasattr(made, name)}


def _plain(value: Any) -> bool:
    several = isinstance(value, list | tuple) and all(map(_plain, value))
    return several or value is None or isinstance(value, bool | int | float | str)


def _maker(maker: Any) -> str:
    """Describe the server's optimizer; the command line hides the class in a ``partial`` of its own function.

    Example:
        >>> _maker(functools.partial(torch.optim.SGD, lr=0.1))
        'SGD(lr=0.1)'
    """
    if isinstance(maker, functools.partial):
        kind = next((value for value in maker.args if isinstance(value, type)), maker.func)
        return f"{_maker(kind)}({', '.join(f'{name}={value}' for name, value in maker.keywords.items())})"
    return str(getattr(maker, "__qualname__", type(maker).__qualname__)).partition(".<")[0]


def groups_of(module: Any) -> dict[str, list[Any]]:
    """Return properties of the clients by name, one plain value per client."""
    meta = module.federation.meta
    return {key: [v if isinstance(v, int | float | str) else str(v) for v in values] for key, values in meta.items()}


def _figure(value: float, measure: Measure) -> float | None:
    """Round a number for JSON: four digits for shares, else six; None for NaN."""
    if math.isnan(value):
        return None
    return round(value, 4) if measure.share else float(f"{value:.6g}")


def _flatten(into: dict[str, Any], prefix: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            _flatten(into, name, value)
        else:
            into[name] = value if value is None or isinstance(value, bool | int | float | str) else _text(value)


def _text(value: Any) -> str:
    """Format a value identically in every process; long texts are shortened, with a hash."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    return text if len(text) <= LONG else f"{text[:LONG]}... {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def read_record(path: Path) -> dict[str, Any]:
    """Read a ``run.json``; raise an error if it is damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FederationError(f"{path} cannot be read: run the fit again.") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FederationError(f"{path} is not a record of a run in format {FORMAT}: run the fit again.")
    missing = [key for key, kind in KEYS.items() if key not in found or not isinstance(found[key], kind)]
    missing += [
        f"clients.{key}" for key in ("rounds", "accuracy") if "clients" not in missing and key not in found["clients"]
    ]
    if missing:
        raise FederationError(f"{path} has no {missing[0]}, which a record of a run requires: run the fit again.")
    return found
