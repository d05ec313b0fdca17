"""When does federation pay: page and figure of the map of settings, generated from the records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fl_lightning.papers import tables
from fl_lightning.papers.coverage import hours
from fl_lightning.papers.measure import measure
from fl_lightning.papers.records import Records
from fl_lightning.papers.words import name_of
from fl_lightning.sheet import markdown

#: Name of the map's recipe.
MAP = "map"
LOCAL, MEAN, WORST = "local", "local_test_acc", "worst_tenth"
#: Methods within this many points count as equal.
LEVEL = 1.0


class Setting(NamedTuple):
    """One setting of the map."""

    dataset: str
    partition: str
    classes: int
    samples: int


#: Accuracy in percent by method.
Scores = Mapping[str, float]


def scores(records: Records, metric: str) -> dict[Setting, dict[str, float]]:
    """Return the mean over seeds by setting and method, for settings with runs of all methods."""
    found: dict[Setting, dict[str, float]] = {}
    lacking: set[Setting] = set()
    for name in maps():
        for cell in tables.table(name):
            setting = Setting(*(cell[key] for key in Setting._fields))
            measured = measure(records, cell) if cell["metric"] == metric else None
            if measured is not None:
                found.setdefault(setting, {})[cell["method"]] = measured.mean
            elif cell["metric"] == metric:
                lacking.add(setting)
    return {setting: of for setting, of in found.items() if setting not in lacking}


def maps() -> list[str]:
    """Return the tables of the map, one per data set."""
    return [name for name, cells in tables.tables().items() if cells[0]["paper"] == MAP]


def best(of: Scores) -> tuple[str, float]:
    """Return the best federated method and its gain over Local.

    Example:
        >>> best({"local": 90.0, "fedavg": 80.0, "apfl": 92.5})
        ('apfl', 2.5)
    """
    method = max((method for method in of if method != LOCAL), key=lambda method: of[method])
    return method, of[method] - of[LOCAL]


def page(records: Records, picture: str) -> str:
    """Return the page of the map.

    Args:
        records: the records of all runs.
        picture: path of the figure, as linked on the page.
    """
    said = tables.pages()["texts"]["map"]
    mean, worst = scores(records, MEAN), scores(records, WORST)
    parts = [said["head"], f"![{said['picture']}]({picture})\n"]
    parts += ["## What to try\n", *advice(mean), "", said["level"]] if mean else []
    parts += ["## Accuracy, mean over clients\n", _table(mean)] if mean else []
    parts += ["## Accuracy, the worst tenth of the clients\n", _table(worst)] if worst else []
    return "\n".join([*parts, "## Not measured\n", _missing(records)])


def advice(mean: Mapping[Setting, Scores]) -> list[str]:
    """Return one sentence per kind of client: gains of federation by number of samples, and the leading methods."""
    kinds = dict.fromkeys(setting[:3] for setting in mean)
    return [f"- {_pays({at: of for at, of in mean.items() if at[:3] == kind})}." for kind in kinds]


def _pays(places: Mapping[Setting, Scores]) -> str:
    first = next(iter(places))
    who = f"{name_of(first.dataset)}, {first.classes} classes, {name_of(first.partition)}"
    gains = [f"{best(of)[1]:+.1f} with {at.samples}" for at, of in sorted(places.items())]
    won = Counter(method for of in places.values() for method in _leaders(of))
    names = ", ".join(f"{name_of(method)} ({count})" for method, count in won.most_common())
    return f"{who}: {', '.join(gains)} training samples; best or level with the best: {names}"


def _leaders(of: Scores) -> list[str]:
    """Return the methods that equal the best one, including Local."""
    return [method for method, score in of.items() if score > max(of.values()) - LEVEL]


def _table(found: Mapping[Setting, Scores]) -> str:
    methods = list(next(iter(found.values())))
    head = ["data", "clients", "classes", "samples", *map(name_of, methods), "best federated"]
    rows = []
    for setting, of in sorted(found.items()):
        method, gain = best(of)
        leaders = _leaders(of)
        texts = [f"**{of[one]:.1f}**" if one in leaders else f"{of[one]:.1f}" for one in methods]
        place = [name_of(str(part)) for part in setting]
        rows.append([*place, *texts, f"{name_of(method)} {gain:+.1f}"])
    return markdown(head, rows)


def _missing(records: Records) -> str:
    """Return the missing runs of the map and their cost."""
    rows = []
    for name in maps():
        cells = tables.table(name)
        configs = {tables.config_hash(config): config for config in map(tables.config_of, cells)}
        left = [config for config in configs.values() if not records.seeds(config)]
        known = [cost for config in left if (cost := hours(records, config)) is not None]
        total = f"{sum(known):.1f}" if len(known) == len(left) else "no similar run"
        if left:
            rows.append([name_of(cells[0]["dataset"]), f"`fl-lightning reproduce {name}`", str(len(left)), total])
    if not rows:
        return "Nothing is missing.\n"
    return markdown(["data", "command", "runs", "core hours, one seed"], rows, left=2)


def draw(records: Records, path: Path) -> Path:
    """Draw the figure of the map: gains of the best federated method over Local."""
    from fl_lightning.papers.figures import pays

    titles = {MEAN: "mean over clients", WORST: "worst tenth of the clients"}
    panels = {}
    for metric, title in titles.items():
        found = scores(records, metric)
        for dataset in dict.fromkeys(setting.dataset for setting in found):
            mine = {setting: best(of) for setting, of in found.items() if setting.dataset == dataset}
            rows = sorted({setting[1:3] for setting in mine})
            columns = sorted({setting.samples for setting in mine})
            grid = [[mine.get(Setting(dataset, *row, column)) for column in columns] for row in rows]
            named = [
                [None if one is None else (name_of(one[0]).replace("`", ""), one[1]) for one in line] for line in grid
            ]
            said = [f"{classes} classes, {name_of(partition)}" for partition, classes in rows]
            panels[f"{name_of(dataset)}, {title}"] = (said, [str(column) for column in columns], named)
    return pays(panels, path)
