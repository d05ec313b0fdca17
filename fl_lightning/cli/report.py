"""The report of one or several runs: one HTML file with embedded figures, for screen and print."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning import pictures
from fl_lightning.callbacks.pages import Chart, charts, unit, words
from fl_lightning.cli.compare import Experiment, cost, populations, privacy, summary
from fl_lightning.cli.naming import differing, last_of, shown, unfolded
from fl_lightning.cli.runs import Curve, Run
from fl_lightning.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A chart of several runs with more metrics than this has one figure per run; else one per metric.
FEW = 4
#: More lines than this are drawn without a legend.
LEGIBLE = 12


@dataclass
class Picture:
    """A figure as a ``data:`` URL, with alternative text."""

    address: str
    text: str
    caption: bool = True


@dataclass
class Section:
    """A section of the report: tables first, then figures."""

    name: str
    sheets: list[Sheet | None] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sheets = [sheet for sheet in self.sheets if sheet is not None and len(sheet.columns) > 1]

    @property
    def anchor(self) -> str:
        """Anchor of the section."""
        return self.name.replace(" ", "-")

    def __bool__(self) -> bool:
        return bool(self.sheets or self.pictures)


def write_report(path: Path, experiments: Sequence[Experiment], title: str) -> None:
    """Write the report of some experiments.

    Args:
        path: the HTML file.
        experiments: one or more.
        title: its title.
    """
    from jinja2 import Environment, PackageLoader

    sections = [
        Section("Result", [summary(experiments), populations(experiments)]),
        _curves(experiments, "Learning curves", "Scores"),
        _clients(experiments),
        _curves(experiments, "Fairness", "Fairness"),
        _curves(experiments, "Privacy", "Privacy", [privacy(experiments)]),
        _communication(experiments),
        Section("Speed", [_speed(experiments)]),
        _curves(experiments, "Method", "Method"),
        Section("Pictures", [], _found(experiments)),
        Section("Settings", _settings(experiments)),
    ]
    template = Environment(loader=PackageLoader("fl_lightning.cli", "."), autoescape=True).get_template(
        "report.html.j2"
    )
    text = template.render(title=title, facts=_facts(experiments), sections=[one for one in sections if one])
    path.write_text(text, encoding="utf-8")


def _facts(experiments: Sequence[Experiment]) -> dict[str, str]:
    """Data, clients, rounds and seeds of all runs."""
    runs = [run for one in experiments for run in one.runs]
    settings = [unfolded(run.settings) for run in runs]

    def all_of(*names: str) -> str:
        texts = [" ".join(shown(one[name]) for name in names if one.get(name) is not None) for one in settings]
        return ", ".join(dict.fromkeys(text for text in texts if text))

    given = [", ".join(str(run.settings[n]) for n in ("data", "partition") if run.settings.get(n)) for run in runs]
    seeds = ", ".join(dict.fromkeys(shown(one["seed"]) for one in settings if one.get("seed") is not None))
    single = len(experiments) > 1 and all(len(one.runs) == 1 for one in experiments)
    repeated = "; one for each, so no differences are marked" if single else ""
    if any(len(one.runs) > 1 for one in experiments):
        repeated = "; lines are means over seeds"
    found = {
        "methods": all_of("method"),
        "data": "; ".join(dict.fromkeys(filter(None, given))),
        "clients": all_of("clients"),
        "network": all_of("net"),
        "rounds": all_of("rounds"),
        "seeds": seeds + repeated if seeds else "",
        "runs": str(len(runs)),
    }
    return {name: text for name, text in found.items() if text}


def _picture(figure: Figure, text: str, caption: bool = True) -> Picture:
    return Picture(pictures.embedded(figure), text, caption)


def _curves(experiments: Sequence[Experiment], name: str, page: str, sheets: Iterable[Sheet | None] = ()) -> Section:
    """The charts of a page of the dashboard; numbers that are the same in every round are a table."""
    tags = list(dict.fromkeys(tag for one in experiments for run in one.runs for tag in run.curves))
    measure = experiments[0].runs[0].measure
    found: list[Picture] = []
    flat: list[str] = []
    for chart in charts(tags, measure.name).get(page, []):
        chosen = [tag for tag in tags if any(re.match(pattern, tag) for pattern in chart.tags)]
        if chart.band:
            chosen = [tag for tag in chosen if tag not in chart.tags[1:]]
        moving = [tag for tag in chosen if page == "Scores" or not _flat(experiments, tag)]
        flat += [tag for tag in chosen if tag not in moving]
        found += _pictures(experiments, chart, moving) if moving else []
    return Section(name, [*sheets, _constants(experiments, flat)], found)


def _flat(experiments: Sequence[Experiment], tag: str) -> bool:
    """Whether a number is the same in all of several rounds of each run."""
    curves = [run.curves[tag][1] for one in experiments for run in one.runs if tag in run.curves]
    return all(len(set(values)) == 1 and len(values) > 1 for values in curves)


def _constants(experiments: Sequence[Experiment], tags: Sequence[str]) -> Sheet | None:
    measure = experiments[0].runs[0].measure
    units = {tag: unit(tag, measure) for tag in tags}
    rows = []
    for one in experiments:
        curves = one.runs[0].curves
        rows.append([one.name, *(f"{units[t][1] * curves[t][1][0]:,.4g}" if t in curves else "" for t in tags)])
    columns = [f"{units[tag][0]} {words(tag, measure)}".strip() for tag in tags]
    return Sheet("The same in every round", ["run", *columns], rows) if tags else None


def _pictures(experiments: Sequence[Experiment], chart: Chart, tags: Sequence[str]) -> list[Picture]:
    """The pictures of a chart: a line is a run, or a number where there are many numbers or one run."""
    if len(experiments) > 1 and len(tags) <= FEW:
        return [_by_run(experiments, chart, tag) for tag in tags]
    return [_by_number(one, chart, tags, len(experiments) > 1) for one in experiments]


def _by_run(experiments: Sequence[Experiment], chart: Chart, tag: str) -> Picture:
    """One number, a line for every experiment."""
    measure = experiments[0].runs[0].measure
    edges = chart.tags[1:] if chart.band else ()
    curves: dict[str, tuple[list[int], list[float]]] = {}
    looks: dict[str, tuple[int, int]] = {}
    bands: dict[str, Any] = {}
    for number, one in enumerate(experiments):
        curve = mean_curve(run.curves[tag] for run in one.runs if tag in run.curves)
        if curve is None:
            continue
        curves[one.name], looks[one.name] = curve, (number, number)
        around = [mean_curve(run.curves[edge] for run in one.runs if edge in run.curves) for edge in edges]
        if around and all(edge is not None and edge[0] == curve[0] for edge in around):
            bands[one.name] = tuple(edge[1] for edge in around if edge is not None)
    title = chart.title if chart.band or (len(chart.tags) == 1 and "*" not in chart.tags[0]) else words(tag, measure)
    return _drawn(curves, tag, title, experiments, looks, bands)


def _by_number(one: Experiment, chart: Chart, tags: Sequence[str], named: bool) -> Picture:
    """One experiment, a line for every number of the chart."""
    measure = one.runs[0].measure
    known = {tag: mean_curve(run.curves[tag] for run in one.runs if tag in run.curves) for tag in tags}
    curves = {words(tag, measure): curve for tag, curve in known.items() if curve is not None}
    title = f"{chart.title}: {one.name}" if named else chart.title
    bands: dict[str, Any] = {}
    if chart.band and len(tags) == 1:
        edges = [mean_curve(run.curves[edge] for run in one.runs if edge in run.curves) for edge in chart.tags[1:]]
        bands = {name: tuple(edge[1] for edge in edges if edge is not None) for name in curves}
    return _drawn(curves, tags[0], title, [one], None, bands)


def _drawn(
    curves: dict[str, tuple[list[int], list[float]]],
    tag: str,
    title: str,
    experiments: Sequence[Experiment],
    looks: dict[str, tuple[int, int]] | None,
    bands: dict[str, Any],
) -> Picture:
    """A picture with rounds from 1 and a unit at the axis."""
    measure = experiments[0].runs[0].measure
    label, scale = unit(tag, measure)
    judged = re.match(rf"(val|test)/(global_)?{measure.name}(_|$)", tag)
    label = measure.label if judged else label
    counted = {name: ([place + 1 for place in places], values) for name, (places, values) in curves.items()}
    figure = pictures.lines(counted, "round", label, title, scale, looks, bands, label in ("MB", "s"))
    if len(curves) > LEGIBLE:
        for legend in figure.legends:
            legend.set_visible(False)
    return _picture(figure, title, caption=False)


def mean_curve(curves: Iterable[Curve]) -> tuple[list[int], list[float]] | None:
    """The mean over repetitions, at the rounds that all of them have.

    Example:
        >>> mean_curve([([0, 1, 2], [1.0, 2.0, 3.0]), ([0, 2], [3.0, 5.0])])
        ([0, 2], [2.0, 4.0])
    """
    tables = [dict(zip(*curve, strict=True)) for curve in curves]
    if not tables:
        return None
    rounds = sorted(set.intersection(*(set(table) for table in tables)))
    return rounds, [float(np.mean([table[r] for table in tables])) for r in rounds]


def _clients(experiments: Sequence[Experiment]) -> Section:
    """Distribution over clients at the end, and every client's score by round."""
    scored = [one for one in experiments if all(run.scores.size for run in one.runs)]
    found = []
    for measure in dict.fromkeys(one.runs[0].measure for one in scored):
        alike = [one for one in scored if one.runs[0].measure == measure]
        ends = {
            one.name: (
                np.concatenate([run.scores[-1] for run in one.runs]),
                [label for run in one.runs for label in run.labels],
            )
            for one in alike
        }
        picture = pictures.distribution(ends, measure=measure)
        together = ", all seeds together" if any(len(one.runs) > 1 for one in alike) else ""
        found.append(_picture(picture, f"How many clients end with which {measure.title}{together}"))
        found += [
            _picture(
                pictures.heat_map([r + 1 for r in run.rounds], run.scores, measure=measure),
                f"Clients by round: {one.name}" + (f", seed {run.settings.get('seed')}" if len(one.runs) > 1 else ""),
            )
            for one in alike
            if len((run := one.runs[0]).rounds) > 1
        ]
    return Section("Clients", [], found)


def _communication(experiments: Sequence[Experiment]) -> Section:
    """Costs, score over traffic, and bytes by round."""
    section = _curves(experiments, "Communication", "Communication", [cost(experiments)])
    traffic = _traffic(experiments)
    return replace(section, pictures=[*traffic, *section.pictures])


def _traffic(experiments: Sequence[Experiment]) -> list[Picture]:
    curves: dict[str, tuple[list[float], list[float]]] = {}
    looks: dict[str, tuple[int, int]] = {}
    measure = experiments[0].runs[0].measure
    for number, one in enumerate(experiments):
        run = one.runs[0]
        score = f"{run.validated}/{measure.name}"
        if {"comm/up_bytes", "comm/down_bytes", score} <= run.curves.keys():
            spent = _sent(run)
            rounds, values = run.curves[score]
            known = [(spent[r], v) for r, v in zip(rounds, values, strict=True) if r in spent]
            if any(mb for mb, _ in known):
                curves[one.name] = [mb for mb, _ in known], [v for _, v in known]
                looks[one.name] = (number, number)
    if not curves:
        return []
    figure = pictures.lines(curves, "MB sent so far, up and down", f"mean {measure.label}", "", measure.scale, looks)
    return [_picture(figure, f"{measure.title[0].upper()}{measure.title[1:]} against what was communicated")]


def _sent(run: Run) -> dict[int, float]:
    """Megabytes sent up to each round."""
    (rounds, up), (_, down) = run.curves["comm/up_bytes"], run.curves["comm/down_bytes"]
    total = np.cumsum(np.add(up, down)) / 1e6
    return dict(zip(rounds, total.tolist(), strict=True))


def _speed(experiments: Sequence[Experiment]) -> Sheet | None:
    rows = []
    for one in experiments:
        for run in (run for run in one.runs if run.seconds):
            rounds = max(run.rounds, default=-1) + 1 or 1
            rate = f"{run.steps / run.seconds:,.0f}" if run.steps and run.seconds else ""
            seconds = run.seconds or 0.0
            rows.append([one.name, run.engine or "", f"{seconds:.1f}", f"{seconds / rounds:.3f}", rate])
    columns = ["run", "engine", "seconds", "seconds a round", "local steps a second"]
    return Sheet("Time of the whole fit, validation included", columns, rows) if rows else None


def _found(experiments: Sequence[Experiment]) -> list[Picture]:
    """Pictures that callbacks and commands left in the runs' folders."""
    return [
        Picture(
            f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}",
            f"{one.name}: {path.stem.replace('_', ' ')}",
        )
        for one in experiments
        for run in one.runs
        for path in sorted(run.path.glob("*.png"))
    ]


def _settings(experiments: Sequence[Experiment]) -> list[Sheet | None]:
    """A table of what differs, a column for every experiment, and one of what all have in common."""
    settings = [unfolded(one.runs[0].settings) for one in experiments]
    keys = list(dict.fromkeys(key for one in settings for key in one if key != "seed"))
    apart = differing(settings)
    texts = {key: [shown(one[key]) if key in one else "" for one in settings] for key in keys}
    same = [[last_of(key) if "." not in key else key, texts[key][0]] for key in keys if len(set(texts[key])) == 1]
    sheets: list[Sheet | None] = []
    if apart:
        rows = [[key, *texts[key]] for key in apart]
        title = "What differs; - is a setting that the method does not have"
        sheets.append(Sheet(title, ["setting", *(one.name for one in experiments)], rows, words=True))
    seeds = [[one.name, " ".join(shown(run.settings.get("seed")) for run in one.runs)] for one in experiments]
    sheets.append(Sheet("Seeds", ["run", "seeds"], seeds, words=True))
    if same:
        sheets.append(Sheet("The same in all runs", ["setting", "value"], same, words=True))
    return sheets
