"""The report of one run or several: one HTML file with its pictures in it, for the screen and for print."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning import pictures
from fl_lightning.callbacks.pages import Chart, charts
from fl_lightning.cli.compare import Experiment, cost, populations, privacy, summary
from fl_lightning.cli.runs import Curve, Run
from fl_lightning.cli.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
       max-width: 62rem; padding: 1.5rem; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 2px solid #0072B2; }
nav a { margin-right: 1rem; } a { color: #005A8E; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .8rem 0; font-size: .92rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #bbb; text-align: right; vertical-align: top; }
thead th { border-bottom: 2px solid #1a1a1a; } th:first-child { text-align: left; } tbody th { font-weight: normal; }
figure { margin: 1rem 0; break-inside: avoid; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #444; font-size: .92rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 0 1.5rem; }
@media print { body { max-width: none; padding: 0; font-size: 10.5pt; } nav { display: none; }
  h2 { break-after: avoid; }
  table { font-size: 8.5pt; } tr { break-inside: avoid; } .pair { display: block; } @page { margin: 16mm; } }
"""


def write_report(path: Path, experiments: Sequence[Experiment], title: str) -> None:
    """Write the report of some experiments.

    Args:
        path: the HTML file.
        experiments: one or more.
        title: its title.
    """
    sections = {
        "Result": _table(summary(experiments)) + _table(populations(experiments)),
        "Learning curves": _curves(experiments, "Scores"),
        "Clients": _clients(experiments),
        "Fairness": _curves(experiments, "Fairness"),
        "Privacy": _table(privacy(experiments)) + _curves(experiments, "Privacy"),
        "Communication": _table(cost(experiments)) + _traffic(experiments) + _curves(experiments, "Communication"),
        "Speed": _table(_speed(experiments)),
        "Method": _curves(experiments, "Method"),
        "Pictures": _found(experiments),
        "Settings": _settings(experiments),
    }
    shown = {name: body for name, body in sections.items() if body}
    links = " ".join(f'<a href="#{name.replace(" ", "-")}">{name}</a>' for name in shown)
    body = "\n".join(
        f'<section id="{name.replace(" ", "-")}">\n<h2>{name}</h2>\n{part}\n</section>' for name, part in shown.items()
    )
    count = sum(len(one.runs) for one in experiments)
    note = f"{count} run{'s' * (count > 1)}, written by <code>fl-lightning compare</code>."
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        f'<p class="note">{note}</p>\n<nav>{links}</nav>\n{body}\n</body>\n</html>\n',
        encoding="utf-8",
    )


def _table(sheet: Sheet | None) -> str:
    if sheet is None or len(sheet.columns) < 2:
        return ""
    return f'<p class="note">{html.escape(sheet.title)}.</p>\n<div class="wide">{sheet.html()}</div>\n'


def _picture(figure: Figure, text: str, caption: bool = True) -> str:
    text = html.escape(text)
    below = f"<figcaption>{text}</figcaption>" if caption else ""
    return f'<figure><img alt="{text}" src="{pictures.embedded(figure)}">{below}</figure>\n'


def _curves(experiments: Sequence[Experiment], page: str) -> str:
    """The charts of a page of the dashboard, one line per experiment and number."""
    tags = list(dict.fromkeys(tag for one in experiments for run in one.runs for tag in run.curves))
    headline = experiments[0].runs[0].measure.name
    figures = [_chart(experiments, chart, tags) for chart in charts(tags, headline).get(page, [])]
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def _chart(experiments: Sequence[Experiment], chart: Chart, tags: Sequence[str]) -> str:
    chosen = [tag for tag in tags if any(re.match(pattern, tag) for pattern in chart.tags)]
    edges = chart.tags[1:] if chart.band else ()
    chosen = [tag for tag in chosen if tag not in edges]
    curves: dict[str, tuple[list[int], list[float]]] = {}
    looks: dict[str, tuple[int, int]] = {}
    bands: dict[str, Any] = {}
    for colour, one in enumerate(experiments):
        for style, tag in enumerate(chosen):
            curve = mean_curve(run.curves[tag] for run in one.runs if tag in run.curves)
            if curve is not None:
                line = one.name if len(chosen) == 1 else f"{one.name}: {tag}"
                curves[line] = curve
                around = [mean_curve(run.curves[e] for run in one.runs if e in run.curves) for e in edges]
                if around and all(edge is not None and edge[0] == curve[0] for edge in around):
                    bands[line] = tuple(edge[1] for edge in around if edge is not None)
                looks[line] = (colour, style if len(chosen) > 1 else colour) if len(experiments) > 1 else (style, style)
    measure = experiments[0].runs[0].measure
    judged = bool(chosen) and all(re.match(rf"(val|test)/(global_)?{measure.name}", tag) for tag in chosen)
    label, scale = (measure.label, measure.scale) if judged else ("", 1.0)
    figure = pictures.lines(curves, "round", label, chart.title, scale, looks, bands)
    return _picture(figure, chart.title, caption=False)


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


def _clients(experiments: Sequence[Experiment]) -> str:
    """Distribution over clients at the end, and every client's score by round."""
    scored = [one for one in experiments if all(run.scores.size for run in one.runs)]
    text = ""
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
        text += _picture(picture, f"How many clients end with which {measure.title}")
        maps = [
            _picture(pictures.heat_map(run.rounds, run.scores, measure=measure), f"Clients by round: {one.name}")
            for one in alike
            if len((run := one.runs[0]).rounds) > 1
        ]
        text += f"<div class='pair'>{''.join(maps)}</div>"
    return text


def _traffic(experiments: Sequence[Experiment]) -> str:
    """What counts against what was sent."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    measure = experiments[0].runs[0].measure
    for one in experiments:
        run = one.runs[0]
        score = f"{run.validated}/{measure.name}"
        if {"comm/up_bytes", "comm/down_bytes", score} <= run.curves.keys():
            spent = _sent(run)
            rounds, values = run.curves[score]
            known = [(spent[r], v) for r, v in zip(rounds, values, strict=True) if r in spent]
            curves[one.name] = [mb for mb, _ in known], [v for _, v in known]
    if not curves:
        return ""
    figure = pictures.lines(curves, "MB sent, up and down", f"mean {measure.label}", scale=measure.scale)
    return _picture(figure, f"{measure.title.capitalize()} against what crossed the wire")


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


def _found(experiments: Sequence[Experiment]) -> str:
    """Pictures that callbacks and commands left in the runs' folders."""
    parts = []
    for one in experiments:
        for run in one.runs:
            for path in sorted(run.path.glob("*.png")):
                data = base64.b64encode(path.read_bytes()).decode()
                text = html.escape(f"{one.name}: {path.stem.replace('_', ' ')}")
                image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
                parts.append(f"<figure>{image}<figcaption>{text}</figcaption></figure>\n")
    return "".join(parts)


def _settings(experiments: Sequence[Experiment]) -> str:
    """What all runs have in common, and a table of what differs."""
    runs = [one.runs[0] for one in experiments]
    keys = list(dict.fromkeys(key for run in runs for key in run.settings if key != "seed"))
    texts = {key: [_text(run.settings.get(key, "")) for run in runs] for key in keys}
    apart = [key for key in keys if len(set(texts[key])) > 1]
    rows = [[key, texts[key][0]] for key in keys if key not in apart]
    seeds = [[one.name, " ".join(_text(run.settings.get("seed", "")) for run in one.runs)] for one in experiments]
    parts = []
    if apart:
        differing = [[one.name, *(texts[key][i] for key in apart)] for i, one in enumerate(experiments)]
        parts.append(_table(Sheet("What differs", ["run", *apart], differing)))
    parts.append(_table(Sheet("Seeds", ["run", "seeds"], seeds)))
    if rows:
        parts.append(_table(Sheet("The same in all runs", ["setting", "value"], rows)))
    return "".join(parts)


def _text(value: object) -> str:
    return "" if value is None else str(value)
