"""How much of the papers was measured, what was not, and what that would cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from fl_lightning.papers import tables
from fl_lightning.papers.layout import Layout
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import COVERAGE, Cell, Config

#: Coverage of a cell that was not measured.
NONE = "not measured"
KINDS = (*COVERAGE, NONE)


def coverage(layouts: Iterable[Layout], papers: Iterable[str]) -> dict[str, list[Cell]]:
    """The published cells of papers by how they were measured; where several rows stand beside one, by the best."""
    best: dict[str, str] = {}
    for layout in layouts:
        for shown in layout.shown:
            kind = NONE if shown.measured is None else shown.measured.coverage
            for cell in shown.published:
                name = _name(cell)
                best[name] = min(kind, best.get(name, NONE), key=KINDS.index)
    found: dict[str, list[Cell]] = {kind: [] for kind in KINDS}
    for cell in tables.published():
        if cell["paper"] in papers:
            found[best.get(_name(cell), NONE)].append(cell)
    return found


def uncovered(layouts: Iterable[Layout]) -> list[Cell]:
    """Published cells that no table of any page has a place for."""
    placed = {_name(cell) for layout in layouts for shown in layout.shown for cell in shown.published}
    return [cell for cell in tables.published() if _name(cell) not in placed]


def hours(records: Records, config: Config) -> float | None:
    """What a run would take, in hours of one core, by recorded runs of its net on its data; None if there is none.

    Of these the ones of its method count, else those of all methods; time is taken to grow with rounds and epochs.
    """
    like = [line for line in records.lines() if _kind(line["config"]) == _kind(config)]
    own = [line for line in like if _method(line["config"]) == _method(config)]
    costs = [line["result"]["seconds"] / _passes(line["config"]) for line in own or like]
    return statistics.median(costs) * _passes(config) / 3600 if costs else None


def _name(cell: Cell) -> str:
    return json.dumps(tables.identity(cell), sort_keys=True)


def _kind(config: Config) -> str:
    """Data and net of a run."""
    data, net = config["data"], config["model"]["init_args"]["net"]
    limits = {key: data["init_args"].get(key) for key in ("limit", "fraction")}
    return json.dumps([data["class_path"], limits, net], sort_keys=True)


def _method(config: Config) -> Any:
    return config["model"]["class_path"]


def _passes(config: Mapping[str, Any]) -> float:
    return float(config["trainer"]["max_epochs"] * config["model"]["init_args"]["epochs"])
