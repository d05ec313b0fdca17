"""Figures of a table's recorded runs, one set per data set, partition, net and number of agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fl_lightning.callbacks.inferred import PICTURE as INFERRED
from fl_lightning.papers import figures, marked, tables
from fl_lightning.papers.measure import results
from fl_lightning.papers.records import Records, Result
from fl_lightning.papers.tables import Cell
from fl_lightning.papers.words import name_of

About = tuple[str, ...]
#: FedDAF's weights in a round: the largest one and the effective number of clients.
FUSION = ("fusion/largest", "fusion/effective")
#: Keys of cells that are drawn in studies only.
VARIED = ("E", "F", "l1_weight")
#: Folder of figures kept with the records, because a record is not enough to draw them.
OWN = "pictures"


def draw(records: Records, name: str, folder: Path) -> list[Path]:
    """Draw a table's figures; returns their paths in display order."""
    groups = _groups(records, name)
    best = {_about(cell, name) for cell in tables.table(name) if tables.run_metric(cell) == "best_acc"}
    drawn = [path for study in tables.studies(name) for path in _study(records, name, study, folder)]
    for about, runs in groups.items():
        drawn += _group(runs, about, folder / _stem(name, about), accuracy_of(name), best=about in best)
    return [*drawn, *_own(records, name, folder)]


def accuracy_of(name: str) -> str:
    """Return the accuracy metric of a table."""
    shared = any(cell["metric"] == "global_test_acc" for cell in tables.table(name))
    return "global_test_acc" if shared else "local_test_acc"


def keep_own(folder: Path, cell: Cell, run: Path) -> None:
    """Copy data of a run that is not part of its record to the records' folder.

    Args:
        folder: folder of the records.
        cell: the cell of the run.
        run: folder of the run.
    """
    stem = folder / OWN / _stem(tables.table_name(cell), (cell["dataset"], cell["partition"], tables.line_name(cell)))
    stem.parent.mkdir(parents=True, exist_ok=True)
    if (run / "inversion.pt").exists():
        found = torch.load(run / "inversion.pt", weights_only=True)
        title = _title((cell["dataset"], cell["partition"]))
        figures.inversions({_line(tables.line_name(cell)): found}, stem.with_name(f"{stem.name}-inversion.png"), title)
    if (run / INFERRED).exists():
        marked.adopt(run / INFERRED, stem.with_name(f"{stem.name}-inferred.png"))


def _groups(records: Records, name: str) -> dict[About, dict[str, list[Result]]]:
    """Group recorded runs by figure and line."""
    varied = [*VARIED, *(study["x"] for study in tables.studies(name))]
    groups: dict[About, dict[str, list[Result]]] = {}
    for cell in tables.table(name):
        plain = cell["metric"] != "parameters" and not any(key in cell for key in varied)
        found = [one for one in results(records, cell) if accuracy_of(name) in one["curves"]] if plain else []
        if found:
            groups.setdefault(_about(cell, name), {})[tables.line_name(cell)] = found
    return groups


def _group(runs: Mapping[str, list[Result]], about: About, stem: Path, accuracy: str, best: bool) -> list[Path]:
    """Draw all figures of a group of runs for which there is data."""
    runs = {_line(line): found for line, found in runs.items()}
    every, title, drawn = [result for found in runs.values() for result in found], _title(about), []

    def path(kind: str) -> Path:
        drawn.append(stem.with_name(f"{stem.name}{kind}.png"))
        return drawn[-1]

    if all(result["rounds"] > 1 for result in every):
        figures.curves(runs, path(""), title, accuracy, best=best)
    if any("mia_auroc/insider" in result["metrics"] for result in every):
        figures.trade_off(runs, path("-privacy"), title)
    if accuracy == "global_test_acc":
        figures.losses(runs, path("-loss"), title)
        figures.by_time(runs, path("-time"), title, accuracy)
        figures.spent(runs, path("-seconds"), title)
    fused = {line: found for line, found in runs.items() if FUSION[0] in found[0]["curves"]}
    if fused:
        figures.logged(fused, path("-fusion"), title, FUSION)
    weighing = {line: found for line, found in runs.items() if "weights" in found[0]}
    if weighing:
        figures.agents(weighing, path("-weights"), title)
    if all("minority" in result["curves"] for result in every):
        figures.sub_populations(runs, path("-groups"), title)
        figures.distribution(runs, path("-clients"), title)
    return drawn


def _study(records: Records, name: str, study: Mapping[str, str], folder: Path) -> list[Path]:
    """Draw the final accuracy over the key varied by a study, one line per value of another key."""
    lines: dict[str, dict[Any, Sequence[Result]]] = {}
    for cell in tables.table(name):
        plain = cell.get(study["x"]) is not None and not any(key in cell for key in tables.SCALES)
        found = results(records, cell) if plain else []
        if found:
            lines.setdefault(name_of(str(cell[study["line"]])), {})[cell[study["x"]]] = found
    if not lines:
        return []
    path = folder / f"{name.replace('/', '-')}-by-{study['x']}.png"
    titles = {of: title for plan in tables.pages()["pages"] for of, title in plan["curves"].items()}
    figures.study(lines, path, titles.get(name, name), study["x"], accuracy_of(name))
    return [path]


def _own(records: Records, name: str, folder: Path) -> list[Path]:
    """Draw figures of a table from data kept with the records."""
    if records.folder is None:
        return []
    kept = sorted((records.folder / OWN).glob(f"{name.replace('/', '-')}-*.png"))
    return [marked.copy(path, folder / path.name) for path in kept]


def _line(name: str) -> str:
    """Return a line's display name."""
    method, _, rest = name.partition(" ")
    return ", ".join(filter(None, (name_of(method), rest)))


def _title(about: About) -> str:
    """Return a figure's title."""
    return ", ".join(filter(None, map(name_of, about))).replace("\\", "")


def _stem(name: str, about: About) -> str:
    """Return the stem of a figure's file name."""
    return "-".join([name.replace("/", "-"), *about]).replace("*", "-star").replace(" ", "-")


def _about(cell: Cell, name: str) -> About:
    """Return data, partition, net (if several were used with these) and scale of a cell."""
    same = (other for other in tables.table(name) if all(other[k] == cell[k] for k in ("dataset", "partition")))
    about = (cell["dataset"], cell["partition"])
    about += (cell["model"],) if len({other.get("model") for other in same}) > 1 else ()
    return (*about, *(f"{cell[key]} {key}" for key in tables.SCALES if key in cell))
