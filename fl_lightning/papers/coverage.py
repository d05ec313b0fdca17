"""Coverage of the papers: measured cells, missing cells and their cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from typing import Any

from fl_lightning.papers import tables
from fl_lightning.papers.layout import POINTS, Layout
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import COVERAGE, REDUCED, Cell, Config

#: Coverage of a cell that was not measured.
NONE = "not measured"
KINDS = (*COVERAGE, NONE)
#: Options of partitions that set the number of samples of a client.
EACH = ("samples_per_agent", "train_samples", "min_samples")
#: Number of samples of each data set.
SIZES = {"MNIST": 70_000, "FashionMNIST": 70_000, "CIFAR10": 60_000}


def coverage(layouts: Iterable[Layout], papers: Iterable[str]) -> dict[str, list[Cell]]:
    """Group the papers' published cells by coverage; by the best one if several rows measure a cell."""
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
    """Return published cells that are in no table of any page."""
    placed = {_name(cell) for layout in layouts for shown in layout.shown for cell in shown.published}
    return [cell for cell in tables.published() if _name(cell) not in placed]


def deviations(layouts: Iterable[Layout]) -> list[tuple[str, float]]:
    """Return method and deviation (measured minus published) of cells run at the paper's scale or an unstated one.

    Cells in several tables count once.
    """
    found: dict[tuple[Any, ...], tuple[str, float]] = {}
    for shown in (shown for layout in layouts for shown in layout.shown):
        measured, deviation = shown.measured, shown.deviation
        if measured is None or deviation is None or measured.coverage == REDUCED:
            continue
        if shown.published[0]["unit"] in POINTS:
            found[measured.run, tables.run_metric(shown.cell), shown.value] = (shown.cell["method"], deviation)
    return list(found.values())


def hours(records: Records, config: Config) -> float | None:
    """Estimate the core hours of a run from recorded runs of its net on its data; None if there are none.

    Uses runs of the same method if there are any, else of all methods, and assumes time proportional to samples, rounds
    and epochs.
    """
    like = [line for line in records.lines() if _kind(line["config"]) == _kind(config)]
    own = [line for line in like if _method(line["config"]) == _method(config)]
    costs = [line["result"]["seconds"] / _work(line["config"]) for line in own or like]
    return statistics.median(costs) * _work(config) / 3600 if costs else None


def _name(cell: Cell) -> str:
    return json.dumps(tables.identity(cell), sort_keys=True)


def _kind(config: Config) -> str:
    """Return data, net and batch size of a run."""
    model = config["model"]["init_args"]
    return json.dumps([config["data"]["class_path"], model["net"], model["batch_size"]], sort_keys=True)


def _method(config: Config) -> Any:
    return config["model"]["class_path"]


def _work(config: Config) -> float:
    """Return the work of a run: training samples times rounds and epochs."""
    data, scheme = config["data"]["init_args"], config["data"]["init_args"]["partition"]["init_args"]
    while "partition" in scheme:
        scheme = scheme["partition"]["init_args"]
    each = next((scheme[key] for key in EACH if scheme.get(key)), None)
    whole = data.get("limit") or SIZES.get(config["data"]["class_path"].rpartition(".")[2], 1)
    samples = whole * (1 - scheme.get("test_fraction", 0.2)) if each is None else each * scheme.get("clients", 10)
    share = 1.0 if _method(config).endswith(".Local") else data.get("fraction", 1.0)
    return float(samples * share * config["trainer"]["max_epochs"] * config["model"]["init_args"]["epochs"])
