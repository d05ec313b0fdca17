"""Concept shift: clients disagree on the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool, check_scheme
from fl_lightning.datamodules.partitions.skew import LabelSkew
from fl_lightning.errors import FederationError
from fl_lightning.ranges import CountOrZero
from fl_lightning.seeding import stream


class ConceptShift(PartitionScheme):
    """Permute the labels of every agent but the agent of interest (docs/partitions.md).

    Permutations are uniform, independent between agents and never the identity. The wrapped partition, with the same
    seed, assigns the samples. An agent's test labels are permuted like its training labels; the global test set keeps
    its labels.

    Args:
        partition: the wrapped partition. Default: ten agents with uniform classes (distribution A).
        agent: the agent of interest, whose labels are not permuted.
    """

    def __init__(self, partition: PartitionScheme | None = None, agent: CountOrZero = 0) -> None:
        check_scheme(partition)
        self.partition = LabelSkew("A") if partition is None else partition
        self.agent = agent

    def __call__(
        self,
        labels: Tensor | ArrayLike,
        seed: int,
        *,
        train_size: int | None = None,
        users: Sequence[Any] | Tensor | None = None,
    ) -> Partition:
        """Deal the samples by the wrapped partition, then draw the permutations."""
        part = self.partition(labels, seed, train_size=train_size, users=users)
        clients, classes = len(part), int(torch.as_tensor(labels).max()) + 1
        if not 0 <= self.agent < clients:
            raise FederationError(f"The agent of interest must be one of 0 to {clients - 1}, not {self.agent}.")
        if classes < 2:
            raise FederationError("Concept shift needs at least two classes: with one there is nothing to permute.")
        maps = torch.from_numpy(permutations(clients, classes, stream(seed, "concept shift")))
        maps[self.agent] = torch.arange(classes)
        if part.label_maps is not None:
            maps = maps.gather(1, part.label_maps)
        return replace(part, label_maps=maps)

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Not used: the wrapped partition deals the samples."""
        return self.partition.split(pool, rng)


def permutations(rows: int, classes: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw uniform permutations other than the identity, shape (rows, classes)."""
    maps = rng.random((rows, classes)).argsort(axis=1)
    while (same := (maps == np.arange(classes)).all(axis=1)).any():
        maps[same] = rng.random((int(same.sum()), classes)).argsort(axis=1)
    return maps
