"""Pictures of finished runs: accuracy by round, by sub-population, and over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.pictures import STYLES

#: What the axes of pictures say.
WORDS = {"global_test_acc": "global test accuracy (%)", "local_test_acc": "mean local test accuracy (%)"}
#: Results of the seeds of one method.
Runs = Sequence[Mapping[str, Any]]


def curves(runs: Mapping[str, Runs], path: Path, title: str, name: str, best: bool = False) -> None:
    """Test accuracy by round, one line per method, averaged over seeds.

    Args:
        runs: results by method.
        path: where the picture goes.
        title: its title.
        name: which accuracy.
        best: whether each seed's best accuracy up to a round is drawn in the place of that round's own.
    """
    _by_round(runs, name, path, title, f"best {WORDS[name]} so far" if best else WORDS[name], best)


def losses(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Training loss by round, one line per method, averaged over seeds (FedDAF's figure 2)."""
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
    """Test accuracy over seconds of the run, validation included, averaged over seeds (FedDAF's figure 3)."""

    def draw(axes: Any) -> None:
        for (colour, line), (method, results) in zip(cycle(STYLES), runs.items(), strict=False):
            seconds = np.mean([result["times"]["elapsed"] for result in results], axis=0)
            axes.plot(seconds, _mean(results, name), color=colour, linestyle=line, label=method)
        axes.set(xlabel="seconds", ylabel=WORDS[name], title=title)

    _picture(draw, path)


def sub_populations(runs: Mapping[str, Runs], path: Path, title: str) -> None:
    """Accuracy of majority (thin) and minority (thick) by round (the papers' figure 5)."""

    def draw(axes: Any) -> None:
        for (colour, _), (method, results) in zip(cycle(STYLES), runs.items(), strict=False):
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


def study(lines: Mapping[str, Mapping[Any, Runs]], path: Path, title: str, key: str, about: str) -> None:
    """Final accuracy over a setting, mean and standard deviation over seeds; what is no number is a level line."""

    def draw(axes: Any) -> None:
        for (colour, style), (name, runs) in zip(cycle(STYLES), lines.items(), strict=False):
            final = {x: [result["metrics"][about] for result in results] for x, results in runs.items()}
            points = sorted(x for x in final if isinstance(x, int | float))
            means, spread = [np.mean(final[x]) for x in points], [np.std(final[x]) for x in points]
            axes.errorbar(points, means, spread, color=colour, linestyle=style, marker="o", capsize=3, label=name)
            for x in final.keys() - set(points):
                level = float(np.mean(final[x]))
                axes.axhline(level, color=colour, linestyle=":", linewidth=1, label=f"{name}, {key} = {x}")
        axes.set(xlabel=key, ylabel=WORDS[about], title=title)

    _picture(draw, path)


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
