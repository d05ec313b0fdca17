"""Pictures of finished runs: accuracy by round, by sub-population, and over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Okabe and Ito's colours, told apart by everyone, and line styles for print.
STYLES = (
    *(("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":")),
    *(("#E69F00", "-"), ("#56B4E9", "--"), ("#000000", "-."), ("#888888", ":")),
)
#: Results of the seeds of one method.
Runs = Sequence[Mapping[str, Any]]


def curves(runs: Mapping[str, Runs], path: Path, title: str, best: bool = False) -> None:
    """Mean local test accuracy by round, one line per method, averaged over seeds (the papers' figures 4 and 7).

    Args:
        runs: results by method.
        path: where the picture goes.
        title: its title.
        best: whether each seed's best accuracy up to a round is drawn in the place of that round's own.
    """

    def draw(axes: Any) -> None:
        for (colour, line), (method, results) in zip(STYLES, runs.items(), strict=False):
            each = [result["curves"]["local_test_acc"] for result in results]
            mean = np.mean(np.maximum.accumulate(each, axis=1) if best else each, axis=0)
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linestyle=line, label=method)
        what = "best accuracy so far (%)" if best else "mean local test accuracy (%)"
        axes.set(xlabel="round", ylabel=what, title=title)

    _picture(draw, path)


def sub_populations(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Accuracy of majority (thin) and minority (thick) by round (the papers' figure 5)."""

    def draw(axes: Any) -> None:
        for (colour, _), (method, results) in zip(STYLES, runs.items(), strict=False):
            for group, width, line in (("majority", 1.0, "--"), ("minority", 2.2, "-")):
                mean = _mean(results, group)
                name = f"{method}, {group}"
                axes.plot(range(1, len(mean) + 1), mean, color=colour, linestyle=line, linewidth=width, label=name)
        axes.set(xlabel="round", ylabel="mean local test accuracy (%)", title=title)

    _picture(draw, path)


def distribution(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """How many clients end with which accuracy, minority on top of majority (the papers' figure 3)."""
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
    figure.savefig(path, dpi=110)


def _mean(results: Runs, name: str) -> Any:
    return np.mean([result["curves"][name] for result in results], axis=0)


def _picture(draw: Callable[[Any], None], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
