"""Finished runs, read from their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fl_lightning.callbacks.pages import GROUPS
from fl_lightning.callbacks.record import FILE, read_record
from fl_lightning.cli import naming
from fl_lightning.cli.naming import REPEATED
from fl_lightning.errors import FederationError
from fl_lightning.measure import ACCURACY, Measure
from fl_lightning.metrics import fairness_summary
from fl_lightning.papers.cells import RESULT
from fl_lightning.pictures import Values

Curve = tuple[list[int], list[float]]
#: Metrics read from the result of a cell.
NEEDED = {"metrics", "rounds", "seconds", "engine", "bytes", "curves", "clients", "modes"}


class _Plain(yaml.SafeLoader):  # type: ignore[misc]
    """Reads the logger's YAML; tuples and other Python objects become None."""


_Plain.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


@dataclass(frozen=True)
class Run:
    """Settings and results of a run.

    Args:
        name: how it is called in tables.
        path: its folder.
        settings: flat settings by name.
        curves: rounds and values of everything it logged, by name, accuracies as fractions.
        measure: the metric that counts.
        rounds: the validated rounds of ``scores``.
        scores: every client's, accuracies as fractions, shape (rounds, clients); NaN where it was not evaluated.
        groups: what is known of the clients, one value each, by name.
        traffic: bytes up and bytes down.
        seconds: time it took.
        steps: local SGD steps of all clients.
        engine: how clients were trained.
        parameters: number of values that a client shares.
    """

    name: str
    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    measure: Measure = ACCURACY
    rounds: Sequence[int] = ()
    scores: Values = field(default_factory=lambda: np.empty((0, 0)))
    groups: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    traffic: tuple[int, int] | None = None
    seconds: float | None = None
    steps: int | None = None
    engine: str | None = None
    parameters: int | None = None

    @cached_property
    def final(self) -> dict[str, float]:
        """Last values of all metrics, and the last validation's fairness; fractions, variance in percent squared."""
        found = {name: values[-1] for name, (_, values) in self.curves.items() if values}
        if self.scores.size:
            groups = self.members
            summary = fairness_summary(torch.tensor(self.scores[-1]), groups, measure=self.measure)
            split = self.validated
            found = {f"{split}/{name}": float(value) for name, value in summary.items()} | found
            found.setdefault(f"{split}/{self.measure.name}_worst10", found[f"{split}/worst10"])
            found.setdefault(f"{split}/{self.measure.name}", float(np.nanmean(self.scores[-1])))
        return found

    @property
    def metrics(self) -> list[str]:
        """Return logged client metrics other than the headline metric."""
        start, end = f"{self.validated}/", "_worst10"
        names = [tag[len(start) : -len(end)] for tag in self.curves if tag.startswith(start) and tag.endswith(end)]
        return [name for name in names if name != self.measure.name]

    @property
    def validated(self) -> str:
        """Split that clients were scored on after a round: ``test`` if nothing was held out."""
        return "val" if any(name.startswith("val/") for name in self.curves) else "test"

    @property
    def members(self) -> torch.Tensor | None:
        """Every client's group by mode, numbered, or None where there is one group."""
        modes = list(self.groups.get("mode", []))
        kinds = sorted(set(modes), key=str)
        return torch.tensor([kinds.index(mode) for mode in modes]) if len(kinds) > 1 else None

    @cached_property
    def populations(self) -> dict[str, list[int]]:
        """Clients by sub-population, the largest first; empty where there is one group."""
        groups = self.members
        if groups is None:
            return {}
        kinds = sorted(set(groups.tolist()), key=lambda kind: (-int((groups == kind).sum()), kind))
        names = ["majority", "minority"] if len(kinds) == 2 else [f"mode {kind}" for kind in kinds]
        return {name: torch.nonzero(groups == kind).flatten().tolist() for name, kind in zip(names, kinds, strict=True)}

    @property
    def labels(self) -> list[str]:
        """Every client's sub-population by name; empty where there is one group."""
        owner = {client: name for name, clients in self.populations.items() for client in clients}
        return [owner[client] for client in range(len(owner))]

    @property
    def identity(self) -> str:
        """Equal for runs that differ only in their seed."""
        return json.dumps({k: v for k, v in self.settings.items() if k not in REPEATED}, sort_keys=True, default=str)


def find(paths: Iterable[str]) -> list[Run]:
    """The runs in the given folders and below, in order, each once, with unique names."""
    folders: dict[Path, None] = {}
    for text in paths:
        path = Path(text)
        if not path.exists():
            raise FederationError(f"There is no run {text}: give the log folder of a fit.")
        found = _folders(path if path.is_dir() else path.parent)
        if not found:
            raise FederationError(f"There is no run in {text}: give the log folder of a fit.")
        folders |= dict.fromkeys(found)
    return _named([read(folder) for folder in folders])


def read(folder: Path) -> Run:
    """The run that left its files in a folder."""
    if (folder / FILE).exists():
        return _recorded(folder)
    if (folder / RESULT).exists():
        return _reproduced(folder)
    return _logged(folder)


def _folders(root: Path) -> list[Path]:
    """Folders of runs: those with a record, else those with TensorBoard's events."""
    recorded = sorted({path.parent for name in (FILE, RESULT) for path in root.rglob(name)})
    return recorded or sorted({path.parent for path in root.rglob("events.out.tfevents.*")})


def _recorded(folder: Path) -> Run:
    found = read_record(folder / FILE)
    clients = found["clients"]
    return Run(
        name=folder.name,
        path=folder,
        settings=found["settings"],
        curves={name: (curve["rounds"], curve["values"]) for name, curve in found["curves"].items()},
        rounds=clients["rounds"],
        measure=Measure(**found.get("measure") or {}),  # records of older versions have none
        scores=np.array(clients["accuracy"] or np.empty((0, 0)), dtype=np.float64),
        groups=found["groups"],
        traffic=tuple(found["bytes"]) if found["bytes"] else None,
        seconds=found["seconds"],
        steps=found["steps"],
        engine=found["engine"],
        parameters=found["parameters"],
    )


def _reproduced(folder: Path) -> Run:
    """A cell of ``fl-lightning reproduce``, which keeps its figures in percent."""
    found = _result(folder / RESULT)
    run, _, seed = folder.name.rpartition("-seed")
    method = {"method": found["method"]} if "method" in found else {}  # results of older versions have none
    names = {"local_test_acc": "test/acc", "majority": "test/acc_majority", "minority": "test/acc_minority"}
    curves = {names[k]: (list(range(len(v))), [x / 100 for x in v]) for k, v in found["curves"].items() if k in names}
    return Run(
        name=folder.name,
        path=folder,
        settings={**method, "run": run, "seed": seed},
        curves=curves,
        rounds=[found["rounds"] - 1],
        scores=np.array([found["clients"]], dtype=np.float64) / 100,
        groups={"mode": found["modes"]} if found["modes"] else {},
        traffic=tuple(found["bytes"]),
        seconds=found["seconds"],
        engine=found["engine"],
        parameters=found["metrics"].get("parameters"),
    )


def _result(path: Path) -> dict[str, Any]:
    """Read the result of a cell, or raise a one-sentence error."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FederationError(f"{path} cannot be read: remove it and run the cell again.") from error
    if not isinstance(found, dict) or not found.keys() >= NEEDED:
        raise FederationError(f"{path} is not the result of a cell of fl-lightning reproduce.")
    return found


def _logged(folder: Path) -> Run:
    """A run with TensorBoard events only: its curves and total traffic."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    curves: dict[str, Curve] = {}
    for tag in events.Tags()["scalars"]:
        if tag not in ("epoch", "hp_metric") and tag.partition("/")[0] not in GROUPS.values():
            points = events.Scalars(tag)
            curves[tag] = [point.step for point in points], [point.value for point in points]
    sums = [int(sum(curves[f"comm/{way}_bytes"][1])) for way in ("up", "down") if f"comm/{way}_bytes" in curves]
    return Run(folder.name, folder, _hparams(folder), curves, traffic=(sums[0], sums[1]) if len(sums) == 2 else None)


def _hparams(folder: Path) -> dict[str, Any]:
    """A method's arguments as Lightning's logger noted them, plain values only."""
    path = folder / "hparams.yaml"
    try:
        found = yaml.load(path.read_text(), _Plain) if path.exists() else None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise FederationError(f"{path} cannot be read: remove it to compare the run without its settings.") from error
    return {k: v for k, v in (found or {}).items() if v is None or isinstance(v, bool | int | float | str)}


def _named(runs: list[Run]) -> list[Run]:
    """Runs called by method and by what else differs among runs of one method, else by their hashes or folders."""
    found = naming.names([run.settings for run in runs])
    names = [name or run.settings.get("run") or _short(run.path) for name, run in zip(found, runs, strict=True)]
    unique = [
        f"{name} [{_short(run.path)}]" if _clash(i, names, runs) else name
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    return [replace(run, name=name) for run, name in zip(runs, unique, strict=True)]


def _clash(index: int, names: list[str], runs: list[Run]) -> bool:
    """Whether another run has the same name; repetitions with another seed may."""
    own = runs[index]
    alike = [run for i, run in enumerate(runs) if i != index and names[i] == names[index]]
    return any(
        run.identity != own.identity or all(run.settings.get(k) == own.settings.get(k) for k in REPEATED)
        for run in alike
    )


def _short(path: Path) -> str:
    return "/".join(path.parts[-2:])
