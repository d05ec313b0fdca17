"""Major classes per client on top of a uniform share of all classes (FedBPS)."""

from __future__ import annotations

from math import gcd

import numpy as np
import torch

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.deal import (
    ClassTable,
    Counts,
    client_index,
    holdout,
    nearest_multiple,
)
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, Part, Share


class MajorMinor(PartitionScheme):
    """Deal a share ``similarity`` of samples uniformly, the rest from major classes (docs/partitions.md).

    Majors are assigned round-robin over a shuffled list of classes, so that each class is a major equally often. All
    clients have the same size, ``floor(classes * min_c n_c / clients)``. Their test sets have the same class shares and
    are disjoint parts of the official test rows; without such rows, a stratified fraction is held out first. Each
    client's majors are stored as ``major_classes``.

    Args:
        clients: number of clients.
        similarity: the uniform share (s), 0 to 1; with two majors of ten classes, 0.2 gives 42% for each major and 2%
            for every other class.
        majors: number of major classes of a client.
        test_fraction: fraction held out for testing if there are no official test rows.
    """

    def __init__(
        self, clients: Count = 20, similarity: Share = 0.2, majors: Count = 2, test_fraction: Part = 0.2
    ) -> None:
        self.clients = clients
        self.similarity = similarity
        self.majors = majors
        self.test_fraction = test_fraction

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows."""
        rows, held = pool.train_rows, pool.test_rows
        if not len(held):
            rows, held = holdout(pool.labels, rows, self.test_fraction, rng)
        majors = self._assign(pool.classes, rng)
        train, test = (self._deal(pool, part, majors, rng) for part in (rows, held))
        meta = {"major_classes": np.sort(majors, axis=1).tolist()}
        return Partition(client_index(*train), client_index(*test), meta, global_test=torch.from_numpy(np.sort(held)))

    def _assign(self, classes: int, rng: np.random.Generator) -> Counts:
        """Draw each client's major classes, shape (clients, majors)."""
        if not 1 <= self.majors <= classes:
            raise FederationError(f"majors must lie between 1 and the {classes} classes, not {self.majors}.")
        step = classes // gcd(classes, self.majors)
        if self.clients % step:
            raise FederationError(
                f"{classes} classes cannot be major equally often among {self.clients} clients with {self.majors} "
                f"each: use {nearest_multiple(self.clients, step)} clients (a multiple of {step})."
            )
        slots = np.arange(self.clients * self.majors) % classes
        return rng.permutation(classes)[slots].reshape(self.clients, self.majors)

    def _deal(self, pool: Pool, rows: Counts, majors: Counts, rng: np.random.Generator) -> tuple[Counts, Counts]:
        """Deal one split's rows, with the same size and shares for all clients."""
        table = ClassTable.of(pool.labels, rows, pool.classes, rng)
        size = int(pool.classes * table.counts.min() // self.clients)
        while size and ((counts := self._counts(size, majors, pool.classes)).sum(axis=0) > table.counts).any():
            size -= 1  # rounding may exceed the available samples by one
        if not size:
            raise FederationError(
                f"Class {table.counts.argmin()} has {table.counts.min()} samples in a split, too few for "
                f"{self.clients} clients: use at most {max(1, int(pool.classes * table.counts.min()))} clients."
            )
        return table.deal(counts)

    def _counts(self, size: int, majors: Counts, classes: int) -> Counts:
        """Return the number of samples of every client and class, shape (clients, classes); rows sum to ``size``."""
        minors = classes - self.majors
        minor = min(int(self.similarity * size / classes + 0.5), size // max(1, minors))
        counts = np.full((len(majors), classes), minor, dtype=np.int64)
        rest = size - minor * minors
        each, odd = divmod(rest, self.majors)
        # Remainders go to different slots in each round over the classes, so that no class runs out.
        rounds = np.arange(len(majors))[:, None] * self.majors // classes
        turn = (rounds + np.arange(self.majors)) % self.majors
        np.put_along_axis(counts, majors, each + (turn < odd), axis=1)
        return counts
