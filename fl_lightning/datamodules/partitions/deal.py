"""The arithmetic that all schemes share: shuffled classes, dealing by counts, local splits. No loop over samples."""

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
        order: the rows, class after class, shape (n,).
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
        """Cut one piece of every class for every client.

        Args:
            begin: where in the class's list the client's piece begins, shape (clients, classes).
            size: how long it is, shape (clients, classes).

        Returns:
            All clients' rows one after the other, and how many each client has, shape (clients,).
        """
        flat = ranges((begin + self.starts[:-1]).ravel(), size.ravel())
        return self.order[flat], size.sum(axis=1)

    def deal(self, size: Counts) -> tuple[Rows, Counts]:
        """Segments in which every client takes up where the one before it stopped: no row is dealt twice."""
        return self.segments(np.cumsum(size, axis=0) - size, size)


def ranges(begin: Counts, size: Counts) -> Rows:
    """Concatenate ``arange(begin[i], begin[i] + size[i])`` over all i without a loop."""
    ends = np.cumsum(size)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begin - (ends - size), size) + np.arange(total)


def client_index(flat: Rows, sizes: Counts) -> ClientIndex:
    """Wrap rows that lie client after client."""
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    return ClientIndex(torch.from_numpy(np.ascontiguousarray(flat)), torch.from_numpy(offsets))


def local_split(
    flat: Rows, sizes: Counts, fraction: float, rng: np.random.Generator
) -> tuple[ClientIndex, ClientIndex]:
    """Shuffle each client's rows and hold a part of them out, not stratified (docs/partitions.md).

    Args:
        flat: all clients' rows one after the other, shape (total,).
        sizes: how many each client has, shape (clients,).
        fraction: the part held out, rounded to the nearest sample, at least one and never all.
        rng: where the shuffle comes from.

    Returns:
        What is kept (training) and what is held out (test).
    """
    if len(sizes) and sizes.min() < 2:
        poor = int(np.argmin(sizes))
        raise FederationError(
            f"Client {poor} has {sizes[poor]} samples, too few to be split in training and test: use fewer clients or "
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
    """Hold a part of each client's rows out, of every class about the same part.

    A client's first sample of every class stays where there are others to take, and a client with one sample keeps it.
    Rows stay in their order.

    Args:
        flat: all clients' rows one after the other, shape (total,).
        sizes: how many each client has, shape (clients,).
        labels: the class of every row of the data, shape (n,).
        fraction: the part held out, rounded to the nearest sample, at least one of two.
        rng: where the choice comes from.

    Returns:
        The rows kept (training) and those held out, of which a client may have none.
    """
    clients = len(sizes)
    owner = np.repeat(np.arange(clients), sizes)
    order = np.lexsort((rng.random(len(flat)), labels[flat], owner))
    cell = np.stack((owner, labels[flat]))[:, order]
    first = np.append(True, (cell[:, 1:] != cell[:, :-1]).any(axis=0))[: len(flat)]  # of a client's class
    spare = sizes - np.bincount(owner[first], minlength=clients)
    held = np.minimum(np.maximum(np.floor(sizes * fraction + 0.5).astype(np.int64), 1), np.maximum(sizes - 1, 0))
    held = np.where(spare > 0, np.minimum(held, spare), held)
    free = order[~first | (spare == 0)[owner]]  # places in ``flat`` from which to take, class after class
    owner_free = owner[free]
    count = np.bincount(owner_free, minlength=clients)
    # Every (count / held)-th of them, from a random one on.
    place = np.arange(len(free)) - (np.cumsum(count) - count)[owner_free]
    steps = place * held[owner_free] + rng.integers(np.maximum(count, 1))[owner_free]
    out = np.zeros(len(flat), dtype=bool)
    out[free[(steps + held[owner_free]) // count[owner_free] > steps // count[owner_free]]] = True
    return client_index(flat[~out], sizes - held), client_index(flat[out], held)


def holdout(labels: Rows, rows: Rows, fraction: float, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Hold a stratified part of ``rows`` out: of every class the same fraction, rounded to the nearest sample.

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
