"""Published tables as data: their cells, and the run that each cell asks for.

A cell is a dict with the keys of ``papers/published.yaml`` (paper, table, dataset, partition, method, metric, value and
what else tells it from its neighbours). A recipe, one file per family of papers, turns a cell into the configuration of
``fl-lightning fit``. Several cells may ask for one and the same run.
"""

from __future__ import annotations

import copy
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
#: Keys of a cell that do not tell its run from others.
_NOT_OF_THE_RUN = ("paper", "table", "metric", "value", "std", "unit", "note", "measured")


@cache
def _read(name: str) -> Any:
    return yaml.safe_load((resources.files("fl_lightning.papers") / name).read_text())


def recipes() -> list[dict[str, Any]]:
    """All recipes."""
    files = resources.files("fl_lightning.papers").iterdir()
    names = sorted(file.name for file in files if file.name.endswith(".yaml") and file.name != "published.yaml")
    return [_read(name) for name in names]


def table_name(cell: Cell) -> str:
    """Name of a cell's table on the command line, such as ``waffle_factor_journal/table2``."""
    return f"{cell['paper']}/{cell['table'].lower().replace(' ', '').replace('.', '')}"


def tables() -> dict[str, list[Cell]]:
    """Every table that a recipe covers, with its cells and those that the recipe adds."""
    found: dict[str, list[Cell]] = {}
    for recipe in recipes():
        published = (cell for cell in _read("published.yaml")["results"] if cell["paper"] in recipe["papers"])
        for cell in [*published, *_own(recipe)]:
            if _covered(recipe, cell):
                found.setdefault(table_name(cell), []).extend([cell, *_more(recipe, cell)])
    return found


def table(name: str) -> list[Cell]:
    """The cells of a table."""
    known = tables()
    if name not in known:
        raise FederationError(f"There is no table {name!r}: choose one of {', '.join(known)}.")
    return known[name]


def config_of(cell: Cell) -> Config:
    """The run that a cell asks for."""
    recipe = next(r for r in recipes() if cell["paper"] in r["papers"])
    config: Config = {}
    for rule in recipe["rules"]:
        if _fits(cell, rule.get("when", {})):
            _merge(config, copy.deepcopy(rule.get("set", {})))
            for key, place in rule.get("take", {}).items():
                if key in cell:
                    _merge(config, _nested(place.split("."), cell[key]))
    return config


def beside(cell: Cell) -> Cell | None:
    """The cell whose run a metric compares with: FedAvg on the same data, for a gain over it."""
    return {**cell, "method": "fedavg", "metric": "local_test_acc"} if cell["metric"] == "gain_over_fedavg" else None


def config_hash(config: Config) -> str:
    """Short hash of a configuration, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def select(cells: Iterable[Cell], only: Mapping[str, str]) -> list[Cell]:
    """The cells whose keys have the given values, such as ``{"dataset": "mnist"}``; commas separate alternatives."""
    chosen = [cell for cell in cells if all(str(cell.get(k)) in v.split(",") for k, v in only.items())]
    if not chosen:
        asked = " ".join(f"{k}={v}" for k, v in only.items())
        raise FederationError(f"No cell of the table has {asked}: leave a condition out to see more.")
    return chosen


def label(cell: Cell) -> str:
    """A cell in a few words."""
    return " ".join(str(v) for k, v in cell.items() if k not in _NOT_OF_THE_RUN)


def _covered(recipe: dict[str, Any], cell: Cell) -> bool:
    return _fits(cell, {"metric": METRICS}) and cell["table"] not in recipe.get("leave_out", [])


def _more(recipe: dict[str, Any], cell: Cell) -> list[Cell]:
    """Cells that the recipe adds beside a published one; they have no published value."""
    return [
        {**cell, **keys, "value": None, "std": None}
        for extra in recipe.get("also", [])
        if _fits(cell, extra["when"]) and not any(key in cell for key in extra.get("without", []))
        for keys in _combinations(extra["set"])
    ]


def _own(recipe: dict[str, Any]) -> list[Cell]:
    """Cells of tables that no paper has."""
    return [{**keys, "value": None, "std": None} for cell in recipe.get("cells", []) for keys in _combinations(cell)]


def _combinations(keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values of keys that are given as lists."""
    lists = [value if isinstance(value, list) else [value] for value in keys.values()]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*lists)]


def _fits(cell: Cell, when: Mapping[str, Any]) -> bool:
    return all(cell.get(k) in (v if isinstance(v, list | tuple) else [v]) for k, v in when.items())


def _merge(into: Config, other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _nested(path: list[str], value: Any) -> Config:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


#: Metrics that a finished run answers.
METRICS = (
    "local_test_acc",
    "majority",
    "minority",
    "gap",
    "variance",
    "parameters",
    "gain_over_fedavg",
    "mia_accuracy",
    "mia_f1",
    "mia_auroc",
    "mia_tpr_at_1",
    "inversion_psnr",
    "inversion_ssim",
    "inversion_attack_acc",
    "inversion_judge_acc",
    "up_bytes_per_round",
    "down_bytes_per_round",
)


def metric_key(cell: Cell) -> str:
    """Under which name a finished run has a cell's metric: attacks have one figure for every view."""
    return f"{cell['metric']}/{cell['view']}" if "view" in cell else str(cell["metric"])
