"""scikit-learn's 1,797 handwritten digits; no download needed."""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.datamodules.base import FederatedDataModule, Samples


class Digits(FederatedDataModule):
    """1,797 handwritten digits of 8 x 8 pixels with values 0 to 16, from scikit-learn.

    There is no official test split; partitions hold out their own.

    Args:
        **kwargs: as for every DataModule.
    """

    num_classes = 10
    input_shape = (1, 8, 8)
    mean = torch.full((1, 1, 1), 4.8842)
    std = torch.full((1, 1, 1), 6.0168)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def load(self) -> Samples:
        """Return images as uint8, shape (1797, 1, 8, 8), and labels."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        inputs = torch.from_numpy(images).to(torch.uint8).view(-1, 1, 8, 8)
        return Samples(inputs, torch.from_numpy(labels).long())
