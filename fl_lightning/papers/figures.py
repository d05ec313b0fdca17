"""Figures of finished runs: accuracy by round, by sub-population and over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.papers.marked import save
from fl_lightning.pictures import STYLES

#: Axis labels.
WORDS = {"global_test_acc": "global test accuracy (%)", "local_test_acc": "mean local test accuracy (%)"}
#: Deviation, in points, at which the colour scale saturates.
LIMIT = 15.0
MARKERS = "osD^vPX*<>hp"
#: Results of the seeds of one method.
Runs = Sequence[Mapping[str, Any]]


def curves(runs: Mapping[str, Runs], path: Path, title: str, name: str, best: bool = False) -> None:
    """Draw the test accuracy by round, one line per method, averaged over seeds.

    Args:
        runs: results by method.
        path: output file.
        title: title of the figure.
        name: the accuracy metric.
        best: whether to draw each seed's best accuracy up to a round instead of the round's.
    """
    _by_round(runs, name, path, title, f"best {WORDS[name]} so far" if best else WORDS[name], best)


def losses(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Draw the training loss by round, one line per method, averaged over seeds (FedDAF's figure 2)."""
    _by_round(runs, "train_loss", path, title, "mean training loss")


def _by_round(runs: Mapping[str, Runs], name: str, path: Path, title: str, words: str, best: bool = False) -> None:
    def draw(axes: Any) -> None:
        for (colour, line), (method, results) in zip(cycle(STYLES), runs.items(), strict=False):
            each = [result["curves"][name] for result in results]
            mean = np.mean(np.maximum.accumulate(each, axis=1) if best else each, axis=0)
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linestyle=line, label=method)
        axes.set(xlabel="round", ylabel=words, title=title)

    _picture(draw, path)


def by_time(runs: Mapping[str, Runs], path: Path, title: str, name: str) -> None:
    """Draw the test accuracy over seconds, including validation, averaged over seeds (FedDAF's figure 3)."""

    def draw(axes: Any) -> None:
        for (colour, line), (method, results) in zip(cycle(STYLES), runs.items(), strict=False):
            seconds = np.mean([result["times"]["elapsed"] for result in results], axis=0)
            axes.plot(seconds, _mean(results, name), color=colour, linestyle=line, label=method)
        axes.set(xlabel="seconds", ylabel=WORDS[name], title=title)

    _picture(draw, path)


def spent(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Draw the mean seconds per round of clients and server, one bar per method."""

    def draw(axes: Any) -> None:
        left = np.zeros(len(runs))
        for part, (colour, _) in zip(("clients", "server"), STYLES, strict=False):
            mean = np.array([np.mean([result["times"][part] for result in results]) for results in runs.values()])
            axes.barh(list(runs), mean, left=left, color=colour, label=part)
            left += mean
        axes.invert_yaxis()
        axes.set(xlabel="seconds per round", title=title)

    _picture(draw, path)


def logged(runs: Mapping[str, Runs], path: Path, title: str, names: Sequence[str]) -> None:
    """Draw logged metrics by round, one panel per name, averaged over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(names), 3), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        for (colour, line), (method, results) in zip(cycle(STYLES), runs.items(), strict=False):
            mean = _mean(results, name)
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linestyle=line, label=method)
        axes.set(xlabel="round", ylabel=name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    save(figure, path)


def agents(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Draw every agent's weight for agent 0 by round, for each method's first seed (figure 3 of the WAFFLE paper)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(runs), 3.2), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(runs), sharey=True))
    for axes, (method, results) in zip(panels, runs.items(), strict=True):
        weights = np.array(results[0]["weights"])
        for client, line in enumerate(weights.T):
            own = {"color": "black", "linewidth": 2.5} if client == 0 else {"linewidth": 1.0}
            axes.plot(range(1, len(line) + 1), line, label=str(client), **own)
        axes.set(xlabel="round", title=method)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("weight")
    panels[-1].legend(fontsize="x-small", title="agent", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title)
    save(figure, path)


def sub_populations(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Draw the accuracy of majority (thin) and minority (thick) by round (the papers' figure 5)."""

    def draw(axes: Any) -> None:
        for (colour, _), (method, results) in zip(cycle(STYLES), runs.items(), strict=False):
            for group, width, line in (("majority", 1.0, "--"), ("minority", 2.2, "-")):
                mean = _mean(results, group)
                name = f"{method}, {group}"
                axes.plot(range(1, len(mean) + 1), mean, color=colour, linestyle=line, linewidth=width, label=name)
        axes.set(xlabel="round", ylabel="mean local test accuracy (%)", title=title)

    _picture(draw, path)


def distribution(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Draw histograms of the clients' final accuracies, minority stacked on majority (the papers' figure 3)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2 * len(runs)), layout="constrained")
    rows = np.atleast_1d(figure.subplots(len(runs), 1, sharex=True, sharey=True))
    bins = np.linspace(0, 100, 41)
    for axes, (method, results) in zip(rows, runs.items(), strict=True):
        scores = np.concatenate([result["clients"] for result in results])
        modes = np.concatenate([result["modes"] for result in results])
        parts = [scores[modes == mode] for mode in (0, 1)]
        axes.hist(parts, bins=bins, stacked=True, color=[STYLES[0][0], STYLES[1][0]], label=["majority", "minority"])
        axes.set(ylabel="clients", title=method)
        axes.legend()
    rows[-1].set_xlabel(f"{title}: local test accuracy (%)")
    save(figure, path)


def study(lines: Mapping[str, Mapping[Any, Runs]], path: Path, title: str, key: str, about: str) -> None:
    """Draw the final accuracy over a setting, mean and std over seeds; non-numeric settings are horizontal lines."""

    def draw(axes: Any) -> None:
        for (colour, style), (name, runs) in zip(cycle(STYLES), lines.items(), strict=False):
            final = {x: [result["metrics"][about] for result in results] for x, results in runs.items()}
            points = sorted(x for x in final if isinstance(x, int | float))
            means, spread = [np.mean(final[x]) for x in points], [np.std(final[x]) for x in points]
            look = {"color": colour, "linestyle": style, "marker": "o", "markersize": 4, "capsize": 3}
            axes.errorbar(points, means, spread, **look, label=name)
            for x in final.keys() - set(points):
                level = float(np.mean(final[x]))
                axes.axhline(level, color=colour, linestyle=":", linewidth=1, label=f"{name}, {key} = {x}")
        axes.set(xlabel=key, ylabel=WORDS[about], title=title)

    _picture(draw, path)


def trade_off(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Draw privacy, accuracy and fairness of all methods against each other; lower left is best in each panel.

    Privacy is the highest AUROC of any adversary but the insider; chance level if no message is sent.
    """
    from matplotlib.figure import Figure

    def attack(result: Mapping[str, Any]) -> float:
        return float(result["metrics"].get("mia_auroc/strongest", 50.0))

    measures: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "error, mean over clients (%)": lambda result: 100 - float(result["metrics"]["local_test_acc"]),
        "membership AUROC, strongest attack (%)": attack,
        "variance of accuracy over clients (%²)": lambda result: float(result["metrics"]["variance"]),
    }
    names = list(measures)
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    for axes, (x, y) in zip(figure.subplots(1, 3), ((0, 1), (0, 2), (2, 1)), strict=True):
        for i, (method, results) in enumerate(runs.items()):
            place = [float(np.mean([measures[names[k]](result) for result in results])) for k in (x, y)]
            style = {"color": STYLES[i % len(STYLES)][0], "marker": MARKERS[i % len(MARKERS)]}
            axes.plot(*([value] for value in place), linestyle="", markersize=9, label=method, **style)
        if y == 1:
            axes.axhline(50, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel=names[x], ylabel=names[y])
        axes.grid(alpha=0.3)
    figure.suptitle(f"{title}: privacy, accuracy and fairness")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small", handlelength=4)
    save(figure, path)


def inversions(images: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str) -> None:
    """Draw the outsider's reconstructions of one client by method, after the class means (the papers' figure 6)."""
    from matplotlib.figure import Figure

    shown = {method: [one for one in found if one["view"] == "outsider"] for method, found in images.items()}
    rows = [(method, one) for method, found in shown.items() for one in _of_one_client(found)]
    if not rows:
        return
    columns = max(len(one["classes"]) * 4 for _, one in rows)
    figure = Figure(figsize=(1.0 * columns + 2, 1.25 * len(rows)), layout="constrained")
    grid = np.atleast_2d(figure.subplots(len(rows), columns))
    for line, (method, one) in zip(grid, rows, strict=True):
        for axes in line:
            axes.set_axis_off()
        pictures = [
            picture for mean, found in zip(one["means"], one["images"], strict=True) for picture in (mean, *found[:3])
        ]
        for axes, picture in zip(line, pictures, strict=False):
            pixels = np.moveaxis(np.asarray(picture), 0, -1)
            axes.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=1)
        line[0].set_title(f"{method}, {one['assumption']}", fontsize="small", loc="left")
    figure.suptitle(f"{title}: mean of each class that a client holds, and three reconstructions of it")
    save(figure, path)


def _of_one_client(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the reconstructions of the first client, under every assumption."""
    return [one for one in found if one["client"] == found[0]["client"]]


def _mean(results: Runs, name: str) -> Any:
    return np.mean([result["curves"][name] for result in results], axis=0)


def _picture(draw: Callable[[Any], None], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", handlelength=4, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def deviations(tables: Mapping[str, tuple[list[str], list[str], list[list[Any]]]], path: Path) -> Path:
    """Draw measured minus published values of several tables; hatched for smaller runs, white for missing ones.

    Args:
        tables: rows, columns and places by title; a place has ``deviation`` and ``measured``, or is None.
        path: output file.
    """
    from matplotlib.figure import Figure

    heights = [len(rows) + 4.5 for rows, _, _ in tables.values()]
    halves = _halves(heights)
    figure = Figure(figsize=(15, 0.27 * max(sum(heights[i] for i in half) for half in halves)), layout="constrained")
    parts: Any = figure.subfigures(1, len(halves), squeeze=False)
    for part, half in zip(parts[0], halves, strict=True):
        grid = part.subplots(len(half), 1, height_ratios=[heights[i] for i in half], squeeze=False)
        for axes, i in zip(grid[:, 0], half, strict=True):
            title = list(tables)[i]
            _deviations(axes, title, *tables[title])
    return save(figure, path)


def _halves(heights: Sequence[float]) -> list[list[int]]:
    """Split panels into a left and a right column of about the same height; returns indices."""
    cut = next(i for i in range(1, len(heights) + 1) if sum(heights[:i]) >= sum(heights) / 2)
    return [half for half in (list(range(cut)), list(range(cut, len(heights)))) if half]


def _deviations(axes: Any, title: str, rows: list[str], columns: list[str], places: list[list[Any]]) -> None:
    values = np.array([[np.nan if p is None or p.deviation is None else p.deviation for p in row] for row in places])
    axes.imshow(values, cmap="RdBu", vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    for i, row in enumerate(places):
        for j, place in enumerate(row):
            if place is not None and place.deviation is not None:
                strong = abs(place.deviation) > 0.7 * LIMIT
                axes.text(
                    j, i, f"{place.deviation:+.1f}", ha="center", va="center", fontsize=7, color="w" if strong else "k"
                )
                if place.measured.coverage == "reduced":
                    look = {"fill": False, "hatch": "////", "edgecolor": "grey", "linewidth": 0}
                    axes.add_patch(_rectangle((j - 0.5, i - 0.5), **look))
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=12, ha="right")
    axes.set_title(title, fontsize=8)


def _rectangle(corner: tuple[float, float], **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, **look)


def pays(panels: Mapping[str, tuple[list[str], list[str], list[list[tuple[str, float] | None]]]], path: Path) -> Path:
    """Draw the gain of the best federated method over Local, one panel per data set (columns) and measure (rows).

    Args:
        panels: rows, columns and (method, gain) by title; the same number of panels for both measures.
        path: output file.
    """
    from matplotlib.figure import Figure

    across = max(len(panels) // 2, 1)
    figure = Figure(figsize=(6.5 * across, 7), layout="constrained")
    grid = np.ravel(figure.subplots(2, across))
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, (rows, columns, places)) in zip(grid, panels.items(), strict=False):
        gains = np.array([[np.nan if place is None else place[1] for place in row] for row in places])
        axes.imshow(gains, cmap="RdBu", vmin=-LIMIT, vmax=LIMIT, aspect="auto")
        for i, row in enumerate(places):
            for j, place in enumerate(row):
                if place is not None:
                    colour = "w" if abs(place[1]) > 0.7 * LIMIT else "k"
                    text = f"{place[0]}\n{place[1]:+.1f}"
                    axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_xticks(range(len(columns)), columns)
        axes.set(xlabel="training samples per client", title=title)
    figure.suptitle("Best federated method and its gain over Local, in points")
    return save(figure, path)
