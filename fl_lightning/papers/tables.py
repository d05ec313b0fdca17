"""Published tables as data: their cells, and the run that each cell asks for.

A cell is a dict with the keys of ``papers/published.yaml`` (paper, table, dataset, partition, method, metric, value and
what else tells it from its neighbours). A recipe, one file per family of papers, turns a cell into the configuration of
``fl-lightning fit``. Several cells may ask for one and the same run.
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
#: Keys of a cell that do not tell its run from others.
_NOT_OF_THE_RUN = ("paper", "table", "metric", "value", "std", "unit", "note", "measured")

#: Files that are no recipes: the published cells, and the pages on which they are shown.
NO_RECIPES = "published.yaml", "pages.yaml"
#: How a cell is run: as in the paper, on a part of the data, at a scale that the paper does not state, or smaller.
COVERAGE = FULL, PART, UNSTATED, REDUCED = "full", "part of the data", "scale not stated", "reduced"
#: Keys that recipes add for runs at another scale; no published cell has them.
SCALES = ("agents", "images")
#: Keys that tell every cell's run, and do not tell lines of one picture from each other.
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
    """Titles of the papers by their short names."""
    titles: dict[str, str] = _read("published.yaml")["papers"]
    return titles


def published() -> list[Cell]:
    """Every published cell."""
    cells: list[Cell] = _read("published.yaml")["results"]
    return cells


def pages() -> dict[str, Any]:
    """How the pages of results are laid out."""
    found: dict[str, Any] = _read("pages.yaml")
    return found


def identity(cell: Cell) -> Cell:
    """A cell without its values: what it is of."""
    return {k: v for k, v in cell.items() if k not in ("value", "std", "unit", "note")}


def table_name(cell: Cell) -> str:
    """Name of a cell's table on the command line, such as ``waffle_factor_journal/table2``."""
    return f"{cell['paper']}/{cell['table'].lower().replace(' ', '').replace('.', '')}"


@cache
def tables() -> dict[str, list[Cell]]:
    """Every table that a recipe covers, with its cells and those that the recipe adds."""
    found: dict[str, list[Cell]] = {}
    for recipe in recipes():
        printed = (cell for cell in published() if cell["paper"] in recipe["papers"])
        for cell in [*printed, *_own(recipe)]:
            if _covered(recipe, cell):
                for one in (cell, *_more(recipe, cell)):
                    found.setdefault(table_name(one), []).append(one)
    return found


def table(name: str) -> list[Cell]:
    """The cells of a table."""
    known = tables()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? fl-lightning tables lists all" if near else f"choose one of {', '.join(known)}"
        raise FederationError(f"There is no table {name!r}: {hint}.")
    return known[name]


def config_of(cell: Cell, rounds: int | None = None) -> Config:
    """The run that a cell asks for, or one of so many rounds."""
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
    """Note of the recipe on a cell that it runs smaller than the paper does, None where it does not."""
    rule = _scaled(cell)
    return rule["scale"] if rule else None


def coverage_of(cell: Cell) -> str:
    """How a cell is run beside the paper: one of ``COVERAGE``."""
    rule = _scaled(cell)
    return rule.get("coverage", REDUCED) if rule else FULL


def _scaled(cell: Cell) -> dict[str, Any]:
    """The last rule that says how a cell is run smaller; empty where none does."""
    rules = (rule for recipe in recipes() if cell.get("paper") in recipe["papers"] for rule in recipe["rules"])
    said = [rule for rule in rules if "scale" in rule and fits(cell, rule.get("when", {}))]
    return said[-1] if said else {}


def run_metric(cell: Cell) -> str:
    """Name of a cell's metric in a run's result; attacks have one figure for every view."""
    metric = OF_THE_AGENT.get(cell["metric"], str(cell["metric"]))
    return f"{metric}/{cell['view']}" if "view" in cell else metric


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


def studies(name: str) -> list[dict[str, str]]:
    """The studies of a table: which key of its cells is varied (``x``), and by which other key (``line``)."""
    return [
        study
        for recipe in recipes()
        for study in recipe.get("studies", [])
        if name in {table_name({"paper": paper, **study}) for paper in recipe["papers"]}
    ]


def line_name(cell: Cell) -> str:
    """A cell's method, with what tells its run from others of the same method on the same data."""
    more = [f"{k} = {v}" for k, v in cell.items() if v is not None and k not in (*_NOT_OF_THE_RUN, *_PLAIN, "view")]
    return " ".join([cell["method"], *more])


def label(cell: Cell) -> str:
    """A cell in a few words."""
    words = [str(cell[k]) for k in _PLAIN if k in cell]
    return " ".join([*words, *(f"{k}={v}" for k, v in cell.items() if k not in (*_PLAIN, *_NOT_OF_THE_RUN))])


def _covered(recipe: dict[str, Any], cell: Cell) -> bool:
    return fits(cell, {"metric": METRICS}) and cell["table"] not in recipe.get("leave_out", [])


def _more(recipe: dict[str, Any], cell: Cell) -> list[Cell]:
    """Cells that the recipe adds beside a published one, or as a table of its own; they have no published value."""
    return [
        {**cell, **keys, "value": None, "std": None}
        for extra in recipe.get("also", [])
        if fits(cell, extra["when"]) and not any(key in cell for key in extra.get("without", []))
        for keys in _combinations(extra["set"])
    ]


def _own(recipe: dict[str, Any]) -> list[Cell]:
    """Cells of tables that no paper has."""
    return [{**keys, "value": None, "std": None} for cell in recipe.get("cells", []) for keys in _combinations(cell)]


def _combinations(keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values of keys that are given as lists."""
    lists = [value if isinstance(value, list) else [value] for value in keys.values()]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*lists)]


def fits(cell: Cell, when: Mapping[str, Any]) -> bool:
    """Whether a cell has the given values; of a list of values, one of them."""
    return all(cell.get(k) in (v if isinstance(v, list | tuple) else [v]) for k, v in when.items())


def _merge(into: Config, other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _nested(path: list[str], value: Any) -> Config:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


#: What metrics of one agent are called in a run that evaluates that agent alone.
OF_THE_AGENT = {"best_alice_test_acc_over_rounds": "best_acc", "final_alice_test_acc": "local_test_acc"}
#: Metrics that a finished run answers.
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
