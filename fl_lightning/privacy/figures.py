"""Figures of attacks: ROC curves, reconstructions with their originals, attack against epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning import loggers
from fl_lightning.metrics import attack_auroc, clopper_pearson, psnr, roc, ssim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Maximum number of images in a figure.
MOST = 12
#: Minimum resolution of the false positive rate for logarithmic axes.
COARSE = 0.01


def roc_figure(
    attacks: Mapping[str, tuple[Tensor, Tensor]], least: float = 1e-4, found: str = "members found"
) -> Figure:
    """Draw ROC curves on logarithmic axes, with exact 95% intervals of the true positive rate.

    Axes are linear with fewer than 100 non-members.

    Args:
        attacks: scores and members by name.
        least: lower limit of the axes, or one over the number of non-members if larger.
        found: label of the vertical axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    start = 1.0
    for name, (scores, members) in attacks.items():
        if bool(scores.isnan().any()):
            continue
        alarms, hits = (rate.cpu() for rate in roc(scores, members))
        total = int(members.sum())
        start = min(start, max(least, 1 / int((~members).sum())))
        some = torch.unique(torch.linspace(0, len(alarms) - 1, 200).round().long())
        ends = [clopper_pearson(round(float(share) * total), total) for share in hits[some]]
        (line,) = axes.plot(alarms, hits, label=f"{name}: AUROC {float(attack_auroc(scores, members)):.3f}")
        low, high = zip(*ends, strict=True)
        axes.fill_between(alarms[some], low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    scale = "log" if start <= COARSE else "linear"
    low_end = start if scale == "log" else 0.0
    axes.plot([low_end, 1], [low_end, 1], color="grey", linestyle=":", label="chance")
    axes.set(xscale=scale, yscale=scale, xlim=(low_end, 1), ylim=(low_end, 1.04))
    axes.set(xlabel="false alarms", ylabel=found)
    axes.legend(fontsize="x-small", loc="lower right")
    return figure


def images_figure(originals: Tensor, found: Tensor, titles: Sequence[str] | None = None) -> Figure:
    """Draw originals above their reconstructions, with PSNR, SSIM and optional titles.

    Args:
        originals: pixels in [0, 1], shape (n, channels, height, width).
        found: likewise.
        titles: title of each original.
    """
    from matplotlib.figure import Figure

    number = min(len(originals), MOST)
    figure = Figure(figsize=(1.1 * number + 0.4, 2.9), layout="constrained")
    axes = figure.subplots(2, number, squeeze=False)
    near, alike = psnr(found, originals), ssim(found, originals)
    for k in range(number):
        for row, image in ((0, originals[k]), (1, found[k])):
            _picture(axes[row][k], image)
        axes[0][k].set_title("" if titles is None else titles[k], fontsize=7)
        told = f"{min(float(near[k]), 150.0):.1f} dB"
        axes[1][k].set_title(told if bool(alike[k].isnan()) else f"{told}\nSSIM {float(alike[k]):.2f}", fontsize=7)
    return figure


def budget_figure(points: Sequence[tuple[float, float, float]], attack: str = "attack") -> Figure:
    """Draw accuracy and strength of an attack over epsilon.

    Args:
        points: epsilon, accuracy and strength.
        attack: label of the strength.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    epsilon, accuracy, strength = zip(*sorted(points), strict=True)
    left.plot(epsilon, accuracy, marker="o", label="accuracy")
    right.plot(epsilon, strength, marker="s", linestyle="--", color="tab:red", label=attack)
    left.set(xscale="log", xlabel="epsilon", ylabel="accuracy")
    right.set_ylabel(attack)
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    return figure


def rules_figure(accuracies: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Draw accuracy under attack as a heat map, with a row per rule and a column per attack.

    Args:
        accuracies: accuracies in percent by rule and attack; NaN for a run that the attack ended.
        title: title of the figure.
    """
    from matplotlib.figure import Figure

    rules, attacks = [*accuracies], [*next(iter(accuracies.values()))]
    figure = Figure(figsize=(0.9 * len(attacks) + 1.8, 0.36 * len(rules) + 1.2), layout="constrained")
    axes = figure.subplots()
    values = [[accuracies[rule][attack] for attack in attacks] for rule in rules]
    axes.imshow(values, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    for row, numbers in enumerate(values):
        for column, value in enumerate(numbers):
            axes.text(
                column, row, "ended" if math.isnan(value) else f"{value:.1f}", ha="center", va="center", fontsize=8
            )
    axes.set_xticks(range(len(attacks)), attacks, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(rules)), rules, fontsize=8)
    axes.set_title(title or "accuracy under attack", fontsize=9)
    return figure


def show_figure(
    trainer: Trainer, name: str, make: Callable[[], Figure], step: int, folder: str | None = None
) -> str | None:
    """Log a figure and save it in the log folder; returns the file's name if one is written.

    Args:
        trainer: the Trainer with the loggers.
        name: name of the figure, such as ``membership/server``.
        make: draws the figure; called only if it is logged or saved.
        step: the number of rounds.
        folder: folder of the file; None means the Trainer's log folder.
    """
    where = folder or trainer.log_dir
    if not trainer.is_global_zero or (not trainer.loggers and where is None):
        return None
    figure = make()
    loggers.show(trainer, name, figure, step, files=False)
    if where is None:
        return None
    path = Path(where) / f"{name.replace('/', '_')}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path.name


def _picture(axes: Any, image: Tensor) -> None:
    axes.axis("off")
    pixels = image.detach().float().clamp(0, 1).cpu()
    if pixels.dim() == 3:
        axes.imshow(pixels.permute(1, 2, 0) if len(pixels) == 3 else pixels[0], cmap="gray", vmin=0, vmax=1)
    else:
        axes.imshow(pixels.reshape(1, -1), cmap="gray", vmin=0, vmax=1, aspect="auto")
