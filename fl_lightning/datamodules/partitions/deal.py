"""Shared helpers of the schemes, vectorised: shuffled classes, dealing by counts, local splits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.base import Rows
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class ClassTable:
    """Rows sorted by class and shuffled within each class.

    Args:
        order: the rows, class by class, shape (n,).
        starts: class c is ``order[starts[c]:starts[c + 1]]``, shape (classes + 1,).
    """

    order: Rows
    starts: Rows

    @classmethod
    def of(cls, labels: Rows, rows: Rows, classes: int, rng: np.random.Generator) -> ClassTable:
        """Shuffle ``rows`` and sort them by their label."""
        shuffled = rng.permutation(rows)
        order = shuffled[np.argsort(labels[shuffled], kind="stable")]
        counts = np.bincount(labels[rows], minlength=classes)
        return cls(order, np.concatenate(([0], np.cumsum(counts))))

    @property
    def counts(self) -> Counts:
        """Samples of each class, shape (classes,)."""
        return np.diff(self.starts)

    def segments(self, begin: Counts, size: Counts) -> tuple[Rows, Counts]:
        """Take one segment of every class for every client.

        Args:
            begin: start of the client's segment in the class's rows, shape (clients, classes).
            size: length of the segment, shape (clients, classes).

        Returns:
            All clients' rows, concatenated, and the number of rows of each client, shape (clients,).
        """
        flat = ranges((begin + self.starts[:-1]).ravel(), size.ravel())
        return self.order[flat], size.sum(axis=1)

    def deal(self, size: Counts) -> tuple[Rows, Counts]:
        """Take consecutive segments of every class, client by client, so that no row is dealt twice."""
        return self.segments(np.cumsum(size, axis=0) - size, size)


def ranges(begin: Counts, size: Counts) -> Rows:
    """Concatenate ``arange(begin[i], begin[i] + size[i])`` over all i without a loop."""
    ends = np.cumsum(size)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begin - (ends - size), size) + np.arange(total)


def client_index(flat: Rows, sizes: Counts) -> ClientIndex:
    """Build an index from rows concatenated client by client."""
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    return ClientIndex(torch.from_numpy(np.ascontiguousarray(flat)), torch.from_numpy(offsets))


def local_split(
    flat: Rows, sizes: Counts, fraction: float, rng: np.random.Generator
) -> tuple[ClientIndex, ClientIndex]:
    """Shuffle each client's rows and hold out a fraction, not stratified (docs/partitions.md).

    Args:
        flat: all clients' rows, concatenated, shape (total,).
        sizes: number of rows of each client, shape (clients,).
        fraction: fraction to hold out, rounded to the nearest sample; at least one sample and never all.
        rng: generator for the shuffle.

    Returns:
        The rows kept (training) and the rows held out (test).
    """
    if len(sizes) and sizes.min() < 2:
        poor = int(np.argmin(sizes))
        raise FederationError(
            f"Client {poor} has {sizes[poor]} samples, too few to split into training and test: use fewer clients or "
            "more data."
        )
    owner = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = flat[np.lexsort((rng.random(len(flat)), owner))]
    held = np.clip(np.floor(sizes * fraction + 0.5).astype(np.int64), 1, sizes - 1)
    begins = np.cumsum(sizes) - sizes
    test = np.arange(len(flat)) - np.repeat(begins, sizes) < np.repeat(held, sizes)
    return client_index(shuffled[~test], sizes - held), client_index(shuffled[test], held)


def by_class(
    flat: Rows, sizes: Counts, labels: Rows, fraction: float, rng: np.random.Generator
) -> tuple[ClientIndex, ClientIndex]:
    """Hold out a fraction of each client's rows, about the same fraction of every class.

    The first sample of every class of a client is kept if enough others can be held out, and a client with one sample
    keeps it. The order of rows is preserved.

    Args:
        flat: all clients' rows, concatenated, shape (total,).
        sizes: number of rows of each client, shape (clients,).
        labels: the class of every row of the data set, shape (n,).
        fraction: fraction to hold out, rounded to the nearest sample; at least one if the client has two.
        rng: generator for the choice.

    Returns:
        The rows kept (training) and the rows held out, possibly none for some clients.
    """
    clients = len(sizes)
    owner = np.repeat(np.arange(clients), sizes)
    order = np.lexsort((rng.random(len(flat)), labels[flat], owner))
    cell = np.stack((owner, labels[flat]))[:, order]
    first = np.append(True, (cell[:, 1:] != cell[:, :-1]).any(axis=0))[: len(flat)]  # of a client's class
    spare = sizes - np.bincount(owner[first], minlength=clients)
    held = np.minimum(np.maximum(np.floor(sizes * fraction + 0.5).astype(np.int64), 1), np.maximum(sizes - 1, 0))
    held = np.where(spare > 0, np.minimum(held, spare), held)
    free = order[~first | (spare == 0)[owner]]  # candidates as positions in ``flat``, class by class
    owner_free = owner[free]
    count = np.bincount(owner_free, minlength=clients)
    # Every (count / held)-th candidate, with a random offset.
    place = np.arange(len(free)) - (np.cumsum(count) - count)[owner_free]
    steps = place * held[owner_free] + rng.integers(np.maximum(count, 1))[owner_free]
    out = np.zeros(len(flat), dtype=bool)
    out[free[(steps + held[owner_free]) // count[owner_free] > steps // count[owner_free]]] = True
    return client_index(flat[~out], sizes - held), client_index(flat[out], held)


def holdout(labels: Rows, rows: Rows, fraction: float, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Hold out a stratified fraction of ``rows``, rounded to the nearest sample in every class.

    Returns:
        The rows kept and the rows held out.
    """
    table = ClassTable.of(labels, rows, int(labels.max()) + 1, rng)
    held = np.floor(table.counts * fraction + 0.5).astype(np.int64)
    test = ranges(table.starts[:-1], held)
    keep = np.ones(len(rows), dtype=bool)
    keep[test] = False
    return table.order[keep], table.order[test]


def nearest_multiple(value: int, step: int) -> int:
    """The positive multiple of ``step`` nearest to ``value``."""
    return max(step, round(value / step) * step)
