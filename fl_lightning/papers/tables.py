"""Published tables as data: their cells, and the run of each cell.

A cell is a dict with the keys of ``papers/published.yaml`` (paper, table, dataset, partition, method, metric, value and
other keys that identify it). A recipe, one file per family of papers, turns a cell into a configuration of
``fl-lightning fit``. Several cells may share a run.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from fl_lightning.errors import FederationError

Cell = dict[str, Any]
Config = dict[str, Any]
#: Keys of a cell that do not identify its run.
_NOT_OF_THE_RUN = ("paper", "table", "metric", "value", "std", "unit", "note", "measured")

#: Files that are not recipes: published cells and the layout of pages.
NO_RECIPES = "published.yaml", "pages.yaml"
#: Coverage of a cell: as in the paper, on part of the data, at a scale not stated in the paper, or smaller.
COVERAGE = FULL, PART, UNSTATED, REDUCED = "full", "part of the data", "scale not stated", "reduced"
#: Keys that recipes add for runs at another scale; published cells do not have them.
SCALES = ("agents", "images")
#: Keys that identify runs but are not part of line names.
_PLAIN = ("dataset", "partition", "method", "model")


@cache
def _read(name: str) -> Any:
    return yaml.safe_load((resources.files("fl_lightning.papers") / name).read_text())


@cache
def recipes() -> list[dict[str, Any]]:
    """All recipes."""
    files = resources.files("fl_lightning.papers").iterdir()
    names = sorted(file.name for file in files if file.name.endswith(".yaml") and file.name not in NO_RECIPES)
    return [_read(name) for name in names]


def papers() -> dict[str, str]:
    """Return the papers' titles by short name."""
    titles: dict[str, str] = _read("published.yaml")["papers"]
    return titles


def published() -> list[Cell]:
    """Return all published cells."""
    cells: list[Cell] = _read("published.yaml")["results"]
    return cells


def pages() -> dict[str, Any]:
    """Return the layout of the pages of results."""
    found: dict[str, Any] = _read("pages.yaml")
    return found


def identity(cell: Cell) -> Cell:
    """Return a cell without its values."""
    return {k: v for k, v in cell.items() if k not in ("value", "std", "unit", "note")}


def table_name(cell: Cell) -> str:
    """Return the command-line name of a cell's table, such as ``waffle_factor_journal/table2``."""
    return f"{cell['paper']}/{cell['table'].lower().replace(' ', '').replace('.', '')}"


@cache
def tables() -> dict[str, list[Cell]]:
    """Return all tables covered by recipes, with their cells and those that recipes add."""
    found: dict[str, list[Cell]] = {}
    for recipe in recipes():
        printed = (cell for cell in published() if cell["paper"] in recipe["papers"])
        for cell in [*printed, *_own(recipe)]:
            if _covered(recipe, cell):
                for one in (cell, *_more(recipe, cell)):
                    found.setdefault(table_name(one), []).append(one)
    return found


def table(name: str) -> list[Cell]:
    """Return the cells of a table."""
    known = tables()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? fl-lightning tables lists all" if near else f"choose one of {', '.join(known)}"
        raise FederationError(f"There is no table {name!r}: {hint}.")
    return known[name]


def config_of(cell: Cell, rounds: int | None = None) -> Config:
    """Return the configuration of a cell's run, optionally with another number of rounds."""
    recipe = next(r for r in recipes() if cell["paper"] in r["papers"])
    config: Config = {}
    for rule in recipe["rules"]:
        if fits(cell, rule.get("when", {})):
            _merge(config, copy.deepcopy(rule.get("set", {})))
            for key, place in rule.get("take", {}).items():
                if key in cell:
                    _merge(config, _nested(place.split("."), cell[key]))
    if rounds is not None:
        config["trainer"]["max_epochs"] = rounds
    return config


def scale_of(cell: Cell) -> str | None:
    """Return the recipe's note on how a cell's run is smaller than in the paper; None if it is not."""
    rule = _scaled(cell)
    return rule["scale"] if rule else None


def coverage_of(cell: Cell) -> str:
    """Return the coverage of a cell: one of ``COVERAGE``."""
    rule = _scaled(cell)
    return rule.get("coverage", REDUCED) if rule else FULL


def _scaled(cell: Cell) -> dict[str, Any]:
    """Return the last rule that reduces a cell's run; empty if there is none."""
    rules = (rule for recipe in recipes() if cell.get("paper") in recipe["papers"] for rule in recipe["rules"])
    said = [rule for rule in rules if "scale" in rule and fits(cell, rule.get("when", {}))]
    return said[-1] if said else {}


def run_metric(cell: Cell) -> str:
    """Return the name of a cell's metric in a run's result; attacks have one value per view."""
    metric = OF_THE_AGENT.get(cell["metric"], str(cell["metric"]))
    return f"{metric}/{cell['view']}" if "view" in cell else metric


def beside(cell: Cell) -> Cell | None:
    """Return the cell that a metric is relative to: FedAvg on the same data, for gains over it."""
    return {**cell, "method": "fedavg", "metric": "local_test_acc"} if cell["metric"] == "gain_over_fedavg" else None


def config_hash(config: Config) -> str:
    """Return a short hash of a configuration, independent of the order of keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def select(cells: Iterable[Cell], only: Mapping[str, str]) -> list[Cell]:
    """Select cells by values of keys, such as ``{"dataset": "mnist"}``; commas separate alternatives."""
    cells = list(cells)
    known = sorted({name for cell in cells for name in cell})
    for name in only.keys() - set(known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise FederationError(f"Cells of the table have no {name!r}{hint} They have {', '.join(known)}.")
    chosen = [cell for cell in cells if all(str(cell.get(k)) in v.split(",") for k, v in only.items())]
    if not chosen:
        asked = " ".join(f"{k}={v}" for k, v in only.items())
        raise FederationError(f"No cell of the table has {asked}: leave a condition out to see more.")
    return chosen


def studies(name: str) -> list[dict[str, str]]:
    """Return the studies of a table: the varied key of its cells (``x``) and the key of lines (``line``)."""
    return [
        study
        for recipe in recipes()
        for study in recipe.get("studies", [])
        if name in {table_name({"paper": paper, **study}) for paper in recipe["papers"]}
    ]


def line_name(cell: Cell) -> str:
    """Return a cell's method and the settings that distinguish it from other runs of the method."""
    more = [f"{k} = {v}" for k, v in cell.items() if v is not None and k not in (*_NOT_OF_THE_RUN, *_PLAIN, "view")]
    return " ".join([cell["method"], *more])


def label(cell: Cell) -> str:
    """Return a short description of a cell."""
    words = [str(cell[k]) for k in _PLAIN if k in cell]
    return " ".join([*words, *(f"{k}={v}" for k, v in cell.items() if k not in (*_PLAIN, *_NOT_OF_THE_RUN))])


def _covered(recipe: dict[str, Any], cell: Cell) -> bool:
    return fits(cell, {"metric": METRICS}) and cell["table"] not in recipe.get("leave_out", [])


def _more(recipe: dict[str, Any], cell: Cell) -> list[Cell]:
    """Return cells that the recipe derives from a published one; they have no published value."""
    return [
        {**cell, **keys, "value": None, "std": None}
        for extra in recipe.get("also", [])
        if fits(cell, extra["when"]) and not any(key in cell for key in extra.get("without", []))
        for keys in _combinations(extra["set"])
    ]


def _own(recipe: dict[str, Any]) -> list[Cell]:
    """Return cells of tables that are in no paper."""
    return [{**keys, "value": None, "std": None} for cell in recipe.get("cells", []) for keys in _combinations(cell)]


def _combinations(keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all combinations of the values of keys given as lists."""
    lists = [value if isinstance(value, list) else [value] for value in keys.values()]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*lists)]


def fits(cell: Cell, when: Mapping[str, Any]) -> bool:
    """Whether a cell has the given values, or one of a list of values."""
    return all(cell.get(k) in (v if isinstance(v, list | tuple) else [v]) for k, v in when.items())


def _merge(into: Config, other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _nested(path: list[str], value: Any) -> Config:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


#: Names of one agent's metrics in a run that evaluates that agent alone.
OF_THE_AGENT = {"best_alice_test_acc_over_rounds": "best_acc", "final_alice_test_acc": "local_test_acc"}
#: Metrics available from a finished run.
METRICS = (
    *("local_test_acc", "majority", "minority", "gap", "variance", "parameters", "gain_over_fedavg"),
    *(
        "global_test_acc",
        "worst_tenth",
        "best_acc",
        "rounds_to_98",
        "bytes_per_round",
        "up_bytes_per_round",
        "down_bytes_per_round",
    ),
    *("mia_accuracy", "mia_f1", "mia_auroc", "mia_tpr_at_1"),
    *("inversion_psnr", "inversion_ssim", "inversion_attack_acc", "inversion_judge_acc"),
    *OF_THE_AGENT,
)
