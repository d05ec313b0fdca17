"""Figures of partitions: clients by classes, coloured by mode."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.summary import Summary
from fl_lightning.pictures import COLOURS, canvas, letters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_CLIENTS = 1000
_MOST_NUMBERS = 30


def draw_partition(summary: Summary, path: str | Path, title: str) -> None:
    """Save a figure of the partition; the file extension decides the format. See :func:`partition_figure`."""
    partition_figure(summary, title).savefig(path)


def partition_figure(summary: Summary, title: str) -> Figure:
    """Draw the clients' sizes and class shares.

    Sizes are above, class shares below (darker is greater), followed by the permuted labels, if any. More than a
    thousand clients are thinned out evenly.

    Args:
        summary: the partition's statistics.
        title: the title of the figure.
    """
    clients, classes = summary.train.shape
    shown = np.unique(np.linspace(0, clients - 1, min(clients, _MOST_CLIENTS)).astype(np.int64))
    maps = summary.label_maps
    heights = [1.0, 0.3 * classes] + ([0.3 * classes] if maps is not None else [])
    enlarged = letters() / 10
    figure = canvas(9 if enlarged == 1 else 6.5, 1.4 * enlarged + sum(heights))
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    thinned = "" if len(shown) == clients else f" ({len(shown)} of {clients:,} clients shown)"
    across = 120 if enlarged == 1 else 50
    axes[0].set_title(fill(title + thinned, across), fontsize=0.9 * letters(), loc="left")
    _draw_sizes(axes[0], summary, shown)
    _draw_shares(axes[1], summary, shown)
    if maps is not None:
        _draw_labels(axes[2], maps[shown])
    axes[-1].set_xlabel("client")
    _client_ticks(axes[-1], shown)
    return figure


def _draw_sizes(axes: Axes, summary: Summary, shown: NDArray[np.int64]) -> None:
    """Draw each client's training and test samples as stacked bars."""
    colours = _mode_colours(summary.modes[shown])
    place = np.arange(len(shown))
    train, test = summary.train.sum(axis=1)[shown], summary.test.sum(axis=1)[shown]
    edge = 0.8 if len(shown) <= 200 else 1.0
    axes.bar(place, train, width=edge, color=colours)
    axes.bar(place, test, width=edge, bottom=train, color=colours, alpha=0.4)
    axes.set_ylabel("samples\n(pale: test)", fontsize=0.8 * letters())
    axes.tick_params(labelsize=0.8 * letters())
    axes.spines[["top", "right"]].set_visible(False)


def _draw_shares(axes: Axes, summary: Summary, shown: NDArray[np.int64]) -> None:
    """Draw each client's class shares, from white (none) to the mode's colour (the greatest)."""
    from matplotlib.patches import Patch

    shares = summary.shares[shown]
    colours = _mode_colours(summary.modes[shown])
    depth = (shares / shares.max())[..., None]
    picture = 1 - depth * (1 - colours[:, None, :])
    axes.imshow(picture.transpose(1, 0, 2), aspect="auto", interpolation="nearest", origin="lower")
    if len(shown) <= 200:
        axes.vlines(np.arange(len(shown) - 1) + 0.5, -0.5, shares.shape[1] - 0.5, color="white", linewidth=0.8)
    axes.set_ylabel("class")
    axes.set_yticks(range(shares.shape[1]) if shares.shape[1] <= 30 else [0, shares.shape[1] - 1])
    axes.tick_params(labelsize=0.8 * letters())
    modes = np.unique(summary.modes)
    patches = []
    for mode in modes:
        who = f"mode {mode}, " if len(modes) > 1 else ""
        clients = int((summary.modes == mode).sum())
        patches.append(Patch(color=COLOURS[mode % len(COLOURS)], label=f"{who}{clients:,} clients"))
    scale = f"share of the client's training samples: white 0, full colour {shares.max():.2g}"
    if letters() > 10:
        scale = f"share of samples: 0 to {shares.max():.2g}"
    patches.append(Patch(facecolor="white", edgecolor="grey", label=scale))
    axes.legend(
        handles=patches,
        fontsize=0.8 * letters(),
        ncols=len(patches) if letters() == 10 else 2,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )


def _draw_labels(axes: Axes, maps: NDArray[np.int64]) -> None:
    """Draw the label that each client gives to every class; unchanged labels are on white."""
    moved = maps != np.arange(maps.shape[1])
    shade = np.where(moved.T[..., None], np.array([0.95, 0.85, 0.6]), 1.0)
    axes.imshow(shade, aspect="auto", interpolation="nearest", origin="lower")
    if len(maps) <= _MOST_NUMBERS and maps.shape[1] <= _MOST_NUMBERS:
        for (client, label), own in np.ndenumerate(maps):
            weight = "normal" if moved[client, label] else "bold"
            axes.text(client, label, str(own), ha="center", va="center", fontsize=8, fontweight=weight)
    axes.set_ylabel("class, and what\nthe client calls it", fontsize=0.8 * letters())
    axes.set_yticks(range(maps.shape[1]))
    axes.tick_params(labelsize=0.8 * letters())


def _client_ticks(axes: Axes, shown: NDArray[np.int64]) -> None:
    """Label about ten clients by their own numbers, in round steps."""
    step = next(k * 10**power for power in range(9) for k in (1, 2, 5) if k * 10**power * 12 >= len(shown))
    places = np.arange(0, len(shown), step)
    axes.set_xticks(places, [str(client) for client in shown[places]])
    axes.set_xlim(-0.5, len(shown) - 0.5)


def _mode_colours(modes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each client's colour, shape (clients, 3)."""
    from matplotlib.colors import to_rgb

    return np.array([to_rgb(colour) for colour in COLOURS])[modes % len(COLOURS)]
