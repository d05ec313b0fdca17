"""Plots shared by the dashboard, the report and the documentation, legible in print and for colour-blind readers.

Every function returns a matplotlib ``Figure`` for the caller to show or save. matplotlib is imported only when a
plot is drawn.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.measure import ACCURACY, Measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which colour-blind readers can distinguish; black last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Colours with line styles, so that lines can also be distinguished in black-and-white print.
STYLES = tuple(
    (colour, ("-", "--", "-.", ":")[(i + turn) % 4]) for turn in range(4) for i, colour in enumerate(COLOURS)
)
Values = NDArray[np.float64]


def canvas(width: float = 7.0, height: float = 3.6) -> Figure:
    """Create an empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    return figure


def for_tiles() -> contextlib.AbstractContextManager[None]:
    """Return a context that draws plots with larger letters, for TensorBoard's small tiles."""
    from matplotlib import rc_context

    return rc_context({"font.size": 14.0, "figure.dpi": 130})


def letters() -> float:
    """Return the font size in points: 10, and more within :func:`for_tiles`."""
    from matplotlib import rcParams

    return float(rcParams["font.size"])


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    title: str = "",
    scale: float = 1.0,
    looks: Mapping[str, tuple[int, int]] | None = None,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    from_zero: bool = False,
) -> Figure:
    """Plot one line per name.

    Args:
        curves: x and y values by name, such as rounds and accuracies by method.
        x: label of the x axis.
        y: label of the y axis.
        title: title of the plot.
        scale: factor of the y values, 100 for percent.
        looks: indices of a line's colour and style by name; by default each line has its own.
        bands: lower and upper edge of a band around a line, by name.
        from_zero: whether the y axis starts at zero.
    """
    figure = canvas(6.0, 3.4 + 0.12 * len(curves))
    axes = figure.subplots()
    for number, (name, (places, values)) in enumerate(curves.items()):
        colour_number, style_number = looks[name] if looks else (number, number)
        colour, style = COLOURS[colour_number % len(COLOURS)], STYLES[style_number % len(STYLES)][1]
        marker = "o" if len(places) == 1 else None
        height = scale * np.asarray(values, dtype=np.float64)
        width = 2.2 if style == ":" else 1.5  # dots are faint
        axes.plot(places, height, color=colour, linestyle=style, linewidth=width, marker=marker, label=name)
        if bands and name in bands:
            low, high = (scale * np.asarray(edge, dtype=np.float64) for edge in bands[name])
            axes.fill_between(np.asarray(places, dtype=np.float64), low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel=x, ylabel=y, title=title)
    if from_zero:
        axes.set_ylim(bottom=0)
    if x == "round":
        axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        figure.legend(loc="outside lower center", ncols=2 if len(curves) > 3 else len(curves), frameon=False)
    return figure


def heat_map(rounds: Sequence[int], scores: Values, title: str = "", measure: Measure = ACCURACY) -> Figure:
    """Plot the score of every client by round; clients with low scores are dark rows.

    Args:
        rounds: the rounds, in order.
        scores: accuracies as fractions, or another measure, shape (rounds, clients); NaN is left white.
        title: title of the plot.
        measure: the measure of the scores.
    """
    figure = canvas(6.0, 4.0)
    axes = figure.subplots()
    clients = scores.shape[1]
    low, high = _limits(scores, measure)
    width = rounds[-1] - rounds[-2] if rounds[1:] else 1
    edges = np.append(np.asarray(rounds, dtype=np.float64), rounds[-1] + width) - 0.5
    colours = "cividis" if measure.higher_is_better else "cividis_r"
    heights = measure.scale * scores.T
    mesh = axes.pcolormesh(
        edges, np.arange(clients + 1) - 0.5, heights, cmap=colours, vmin=low, vmax=high, rasterized=True
    )
    axes.set(xlabel="round", ylabel="client", title=title)
    axes.locator_params(integer=True)
    figure.colorbar(mesh, ax=axes, label=_on_own_samples(measure))
    return figure


def distribution(
    runs: Mapping[str, tuple[Values, Sequence[Any]]], title: str = "", measure: Measure = ACCURACY
) -> Figure:
    """Plot a histogram of the clients' final scores, one panel per run, with groups stacked.

    Args:
        runs: by name, the clients' scores (accuracies as fractions), shape (clients,), and their groups, or an empty
            list.
        title: text below the last panel.
        measure: the measure of the scores.
    """
    figure = canvas(7.0, 0.7 + 1.7 * len(runs))
    panels = np.atleast_1d(figure.subplots(len(runs), 1, sharex=True, sharey=True))
    low, high = _limits(np.concatenate([scores for scores, _ in runs.values()]), measure)
    for axes, (name, (scores, groups)) in zip(panels, runs.items(), strict=True):
        labels = list(groups) if len(groups) == len(scores) else ["clients"] * len(scores)
        kinds = sorted(set(labels), key=lambda kind: (-labels.count(kind), str(kind)))[: len(COLOURS)]
        parts = [measure.scale * scores[[label == kind for label in labels]] for kind in kinds]
        names = [f"{kind} ({len(part)})" for kind, part in zip(kinds, parts, strict=True)]
        # White edges separate stacked bars in print.
        bars = {"stacked": True, "edgecolor": "white", "linewidth": 0.5}
        axes.hist(parts, bins=np.linspace(low, high, 41).tolist(), color=COLOURS[: len(kinds)], label=names, **bars)
        mean = measure.scale * float(np.nanmean(scores))
        text = f"mean {mean:{'.1f' if measure.share else '.4g'}}"
        axes.axvline(mean, color="black", linestyle="--", linewidth=1, label=text)
        axes.set_title(shorten(name, 80), fontsize="medium", loc="left")
        axes.set(ylabel="clients", xlim=(low, high))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize="small", loc="upper left")
    panels[-1].set_xlabel(f"{_on_own_samples(measure)}{': ' if title else ''}{title}")
    return figure


def _on_own_samples(measure: Measure) -> str:
    return f"{measure.title} on own samples{' (%)' if measure.share else ''}"


def _limits(scores: Values, measure: Measure) -> tuple[float, float]:
    """Return 0 to 100 percent, or the range of the scores, extended to 0, for a measure that is not a share."""
    known = scores[np.isfinite(scores)]
    if measure.share or not known.size:
        return 0.0, measure.scale
    low, high = min(float(known.min()), 0.0), float(known.max())
    return low, high if high > low else low + 1.0


def scatter(points: Values, labels: Sequence[Any], title: str, names: Sequence[str] = ()) -> Figure:
    """Plot points in the plane, coloured and marked by label.

    Args:
        points: shape (n, 2).
        labels: one per point.
        title: title of the plot.
        names: text next to every point, if any.
    """
    figure = canvas(5.6, 4.4)
    axes = figure.subplots()
    kinds = sorted(set(labels), key=lambda kind: (isinstance(kind, str), kind))
    for number, kind in enumerate(kinds):
        chosen = np.array([label == kind for label in labels])
        colour, marker = COLOURS[number % len(COLOURS)], "osD^vP*"[number % 7]
        axes.scatter(points[chosen, 0], points[chosen, 1], label=str(kind), color=colour, marker=marker)
    for place, name in zip(points, names, strict=False):
        axes.annotate(name, tuple(place), xytext=(3, 3), textcoords="offset points", fontsize="small")
    axes.margins(0.1)
    axes.set(title=title, xticks=[], yticks=[])
    if 1 < len(kinds) <= 20:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def pixels(figure: Figure) -> NDArray[np.uint8]:
    """Render a figure as an image, shape (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas_of: Any = FigureCanvasAgg(figure)
    canvas_of.draw()
    return np.asarray(canvas_of.buffer_rgba())[..., :3].copy()


def embedded(figure: Figure) -> str:
    """Encode a figure as a ``data:`` URL of an SVG, for self-contained pages."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "fl_lightning"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
