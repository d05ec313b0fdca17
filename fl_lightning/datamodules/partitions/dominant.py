"""One dominant class per client, the other classes at random (FedDAF's eta partition)."""

from __future__ import annotations

from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.deal import ClassTable, Counts, client_index, holdout
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, Part, Share


class DominantClass(PartitionScheme):
    """FedDAF's partition: a share ``eta`` of client k's shards is of class k mod classes (docs/partitions.md).

    Official training and test rows are pooled and 20% of every class is held out as the global test set. The other 80%
    of a class is cut into ``shards_per_class`` shards of nearly equal size, and every shard goes to exactly one client.
    First, all clients' dominant shards are reserved. Then clients, in random order, draw the rest from the other
    classes in proportion to ``max(g_c, 0)`` with ``g_c ~ N(0.5, 1)``; an exhausted class is dropped. If no class with
    positive weight has shards left, they take any other class, and last their dominant one.

    The held-out 20% is cut into shards too, and a client is tested on the test shards that match its training shards.
    So training and test have the same class distribution up to rounding, and the clients' test sets partition the
    global one.

    Args:
        clients: number of clients (K); it must divide the number of shards.
        eta: share of a client's shards that come from its dominant class, 0 to 1.
        shards_per_class: number of shards of each class.
        test_fraction: fraction of every class held out for testing.
    """

    def __init__(
        self, clients: Count = 50, eta: Share = 0.5, shards_per_class: Count = 200, test_fraction: Part = 0.2
    ) -> None:
        self.clients = clients
        self.eta = eta
        self.shards_per_class = shards_per_class
        self.test_fraction = test_fraction

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows."""
        rows, held = holdout(pool.labels, np.arange(len(pool.labels)), self.test_fraction, rng)
        table = ClassTable.of(pool.labels, rows, pool.classes, rng)
        tests = ClassTable.of(pool.labels, held, pool.classes, rng)
        self._check_shards(table.counts)
        shards = self.assign(pool.classes, rng)
        train, test = (client_index(*self._cut(t, shards)) for t in (table, tests))
        dominant = (np.arange(self.clients) % pool.classes).tolist()
        return Partition(train, test, {"dominant_class": dominant}, global_test=torch.from_numpy(np.sort(held)))

    def assign(self, classes: int, rng: np.random.Generator) -> Counts:
        """Draw the number of shards of every client and class, shape (clients, classes)."""
        each, reserved = self._quota(classes)
        dominant = np.arange(self.clients) % classes
        shards = np.zeros((self.clients, classes), dtype=np.int64)
        shards[np.arange(self.clients), dominant] = reserved
        left = self.shards_per_class - shards.sum(axis=0)
        weights = _weights(dominant, classes, rng)
        for client in rng.permutation(self.clients):
            taken = _draw(each - reserved, weights[client], int(dominant[client]), left, rng)
            shards[client] += taken
            left -= taken
        return shards

    def _check_shards(self, counts: Counts) -> None:
        """Refuse shards without a training sample."""
        few, step = int(counts.min()), self.clients // gcd(self.clients, len(counts))
        if few < self.shards_per_class:
            fits = f"shards_per_class={few // step * step}" if few >= step else "fewer clients and shards_per_class"
            raise FederationError(
                f"Class {counts.argmin()} has {few} training samples, too few for {self.shards_per_class} shards: use "
                f"{fits}."
            )

    def _quota(self, classes: int) -> tuple[int, int]:
        """Return the number of shards of a client, and how many of them are of its dominant class."""
        total = classes * self.shards_per_class
        if total % self.clients:
            divisors = [k for k in range(1, total + 1) if total % k == 0]
            nearest = min(divisors, key=lambda k: abs(k - self.clients))
            raise FederationError(
                f"{total} shards ({self.shards_per_class} of each class) cannot be dealt evenly to {self.clients} "
                f"clients: use {nearest} clients."
            )
        each = total // self.clients
        reserved = int(self.eta * each + 0.5)
        crowd = -(-self.clients // classes)
        if crowd * reserved > self.shards_per_class:
            raise FederationError(
                f"With eta={self.eta}, {crowd} clients would reserve {crowd * reserved} shards of a class that has "
                f"{self.shards_per_class}: use eta={self.shards_per_class // crowd / each:g} or a multiple of "
                f"{classes} clients."
            )
        return each, reserved

    def _cut(self, table: ClassTable, shards: Counts) -> tuple[NDArray[np.int64], Counts]:
        """Return the rows of all clients' shards, which are consecutive in the shuffled rows of a class."""
        edges = np.arange(self.shards_per_class + 1)[:, None] * table.counts // self.shards_per_class
        last = np.cumsum(shards, axis=0)
        columns = np.arange(shards.shape[1])
        begin = edges[last - shards, columns]
        return table.segments(begin, edges[last, columns] - begin)


def _weights(dominant: Counts, classes: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw each client's weights of the non-dominant classes, ``max(N(0.5, 1), 0)``, not all 0."""
    others = np.arange(classes) != dominant[:, None]
    weights = np.zeros(others.shape)
    while classes > 1 and (none := ~weights.any(axis=1)).any():
        weights[none] = np.maximum(rng.normal(0.5, 1.0, (int(none.sum()), classes)), 0.0) * others[none]
    return weights


def _draw(wanted: int, weights: NDArray[np.float64], dominant: int, left: Counts, rng: np.random.Generator) -> Counts:
    """Draw the shards that one client takes besides its reserved ones, shape (classes,).

    Drawing one shard at a time, and again if a class is exhausted, is equivalent to drawing all at once and again for
    the shards in excess.
    """
    taken, total = np.zeros_like(left), wanted
    others = (np.arange(len(left)) != dominant).astype(np.float64)
    for choice in (weights, others, np.ones(len(left))):
        while wanted > 0 and (chance := choice * (left > taken)).any():
            taken = np.minimum(taken + rng.multinomial(wanted, chance / chance.sum()), left)
            wanted = total - int(taken.sum())
    return taken
