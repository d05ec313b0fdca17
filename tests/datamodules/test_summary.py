"""A partition in numbers and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fl_lightning.datamodules import IID, ConceptShift, Multimodal, Partition, PartitionScheme
from fl_lightning.datamodules.picture import COLOURS, draw_partition
from fl_lightning.datamodules.summary import Summary
from fl_lightning.federation import ClientIndex

LABELS = torch.arange(2400) % 4


def test_figures_by_hand() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1])
    part = Partition(ClientIndex.of([[0, 1], [2, 4]]), ClientIndex.of([[6], [3, 5]]), {"mode": [0, 1]})
    summary = Summary.of(part, labels, 3)
    assert summary.train.tolist() == [[2, 0, 0], [0, 1, 1]]
    assert summary.test.tolist() == [[1, 0, 0], [0, 1, 1]]
    assert summary.sizes.tolist() == [2, 2]
    assert summary.shares.tolist() == [[1, 0, 0], [0, 0.5, 0.5]]
    assert summary.classes_per_client.tolist() == [1, 2]
    assert summary.entropy.tolist() == [0, 1]
    assert not np.signbit(summary.entropy).any()
    assert summary.modes.tolist() == [0, 1]
    assert summary.global_test == 0


@pytest.mark.parametrize(
    "scheme",
    [IID(3), IID(1200), Multimodal([[0, 1], [2, 3]], [4, 2]), ConceptShift(IID(5)), ConceptShift(IID(50))],
    ids=repr,
)
def test_a_picture_is_drawn(tmp_path: Path, scheme: PartitionScheme) -> None:
    from matplotlib.image import imread

    draw_partition(Summary.of(scheme(LABELS, 0), LABELS, 4), tmp_path / "p.png", "a title")
    pixels = imread(tmp_path / "p.png")
    assert min(pixels.shape[:2]) > 200


def test_the_picture_has_each_modes_colour(tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    scheme = Multimodal([[0, 1], [2, 3]], [4, 2], distinct=True)
    draw_partition(Summary.of(scheme(LABELS, 0), LABELS, 4), tmp_path / "p.png", "two modes")
    pixels = imread(tmp_path / "p.png")[..., :3].reshape(-1, 3)
    for colour, there in zip(COLOURS[:3], (True, True, False), strict=True):
        close = (np.abs(pixels - to_rgb(colour)).max(axis=1) < 0.01).sum()
        assert (close > 1000) == there
