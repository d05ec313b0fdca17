"""Statistics of a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.datamodules.partitions.base import Partition
from fl_lightning.datamodules.partitions.deal import Counts
from fl_lightning.federation import ClientIndex


@dataclass(frozen=True)
class Summary:
    """Statistics of a partition.

    Args:
        train: number of training samples of every client and class, shape (clients, classes).
        test: number of test samples of every client and class, shape (clients, classes).
        modes: every client's mode, shape (clients,); 0 if the partition has none.
        label_maps: every client's label permutation, shape (clients, classes), if any.
        global_test: size of the global test set.
    """

    train: Counts
    test: Counts
    modes: Counts
    label_maps: Counts | None = None
    global_test: int = 0

    @classmethod
    def of(
        cls,
        partition: Partition,
        labels: Tensor,
        classes: int,
        meta: Mapping[str, Sequence[Any]] | None = None,
    ) -> Summary:
        """Count the samples of a partition."""
        known = partition.meta if meta is None else meta
        rest, maps = partition.global_test, partition.label_maps
        return cls(
            class_counts(partition.train, labels, classes),
            class_counts(partition.test, labels, classes),
            _numbered(known.get("mode", [0] * len(partition))),
            None if maps is None else maps.numpy(),
            0 if rest is None else len(rest),
        )

    @property
    def shares(self) -> NDArray[np.float64]:
        """Each client's share of every class in training, shape (clients, classes); rows sum to 1."""
        shares: NDArray[np.float64] = self.train / self.train.sum(axis=1, keepdims=True)
        return shares

    @property
    def sizes(self) -> Counts:
        """Number of training samples of every client, shape (clients,)."""
        sizes: Counts = self.train.sum(axis=1)
        return sizes

    @property
    def classes_per_client(self) -> Counts:
        """Number of classes that each client trains on, shape (clients,)."""
        held: Counts = np.count_nonzero(self.train, axis=1)
        return held

    @property
    def entropy(self) -> NDArray[np.float64]:
        """Entropy of each client's training labels in bits, shape (clients,); log2(C) for C equal classes."""
        shares = self.shares
        bits: NDArray[np.float64] = -(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(axis=1)
        return np.abs(bits)  # avoids -0


def class_counts(index: ClientIndex, labels: Tensor, classes: int) -> Counts:
    """Count the samples of every client and class, shape (clients, classes).

    Example:
        >>> import torch
        >>> class_counts(ClientIndex.of([[0, 1], [2]]), torch.tensor([1, 1, 0]), 2).tolist()
        [[0, 2], [1, 0]]
    """
    owner = np.repeat(np.arange(len(index)), index.sizes.numpy())
    cell = owner * classes + labels[index.flat].numpy()
    return np.bincount(cell, minlength=len(index) * classes).reshape(len(index), classes)


def _numbered(modes: Sequence[Any]) -> NDArray[np.int64]:
    """Convert modes to numbers; words by their sorted order."""
    values = np.asarray(modes)
    return (values if values.dtype.kind in "biu" else np.unique(values, return_inverse=True)[1]).astype(np.int64)
