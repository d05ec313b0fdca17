"""Pathological shards (McMahan et al.): few classes per client, in one mode or several (WAFFLe)."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.deal import (
    ClassTable,
    Counts,
    local_split,
    nearest_multiple,
)
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, CountOrZero, Part

#: Classes and clients of each mode, as published (docs/partitions.md). ``fashion_mnist_tops`` is another reading of
#: "footwear and shirts", which includes the T-shirt.
MODES: dict[str, tuple[list[list[int]], list[int]]] = {
    "mnist": ([[1, 3, 5, 7, 9], [0, 2, 4, 6, 8]], [100, 20]),
    "fashion_mnist": ([[0, 1, 2, 3, 4, 8], [5, 6, 7, 9]], [90, 20]),
    "fashion_mnist_tops": ([[1, 2, 3, 4, 8], [0, 5, 6, 7, 9]], [90, 20]),
    "cifar10": ([[2, 3, 4, 5, 6, 7], [0, 1, 8, 9]], [90, 20]),
}
Preset = Literal["mnist", "fashion_mnist", "fashion_mnist_tops", "cifar10"]
_TRADES = 24


class Unimodal(PartitionScheme):
    """Cut every class into equal shards and give each client ``classes_per_client`` of them (docs/partitions.md).

    Each class is shuffled and cut into ``clients * classes_per_client / classes`` shards of equal size; remaining rows
    are dropped. Only official training rows are dealt; official test rows become the global test set.

    Args:
        clients: number of clients.
        classes_per_client: number of shards of a client (Z).
        distinct: give every client shards of different classes; otherwise it may get several shards of one class.
        test_fraction: fraction of each client's samples held out for testing.
    """

    def __init__(
        self, clients: Count = 100, classes_per_client: Count = 2, distinct: bool = False, test_fraction: Part = 0.2
    ) -> None:
        self.clients = clients
        self.classes_per_client = classes_per_client
        self.distinct = distinct
        self.test_fraction = test_fraction

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows."""
        table = ClassTable.of(pool.labels, pool.train_rows, pool.classes, rng)
        size = table.counts // shards_per_class(self.clients, self.classes_per_client, table.counts)
        shards = deal_shards(self.clients, self.classes_per_client, pool.classes, self.distinct, rng)
        train, test = local_split(*table.deal(shards * size), self.test_fraction, rng)
        return Partition(train, test, global_test=pool.global_test)


class Multimodal(PartitionScheme):
    """Several groups of clients, each with its own classes: a majority and minorities (docs/partitions.md).

    Within a mode, shards are dealt as in :class:`Unimodal`. All modes use the same shard size, the largest that every
    class allows, so all clients have the same size. Each client's mode is stored as ``mode``, 0 for the first one (the
    majority in the presets).

    Args:
        modes: the classes of every mode, or the name of a data set with published modes.
        clients: number of clients of every mode; not needed with a name.
        classes_per_client: number of shards of a client (Z).
        distinct: give every client shards of different classes.
        test_fraction: fraction of each client's samples held out for testing.
    """

    def __init__(
        self,
        modes: Preset | list[list[CountOrZero]] = "mnist",
        clients: list[Count] | None = None,
        classes_per_client: Count = 2,
        distinct: bool = False,
        test_fraction: Part = 0.2,
    ) -> None:
        self.modes = modes
        self.clients = clients
        self.classes_per_client = classes_per_client
        self.distinct = distinct
        self.test_fraction = test_fraction
        self._groups, self._sizes = _resolve(modes, clients)

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows."""
        beyond = [c for group in self._groups for c in group if not 0 <= c < pool.classes]
        if beyond:
            raise FederationError(f"Class {beyond[0]} of a mode is not among the data's 0 to {pool.classes - 1}.")
        table = ClassTable.of(pool.labels, pool.train_rows, pool.classes, rng)
        size = min(self._shard_size(table.counts, mode) for mode in range(len(self._groups)))
        mode_of = np.repeat(np.arange(len(self._sizes)), self._sizes)
        shards = np.zeros((len(mode_of), pool.classes), dtype=np.int64)
        for mode, (group, clients) in enumerate(zip(self._groups, self._sizes, strict=True)):
            dealt = deal_shards(clients, self.classes_per_client, len(group), self.distinct, rng)
            shards[np.ix_(mode_of == mode, group)] = dealt
        train, test = local_split(*table.deal(shards * size), self.test_fraction, rng)
        return Partition(train, test, {"mode": mode_of.tolist()}, global_test=pool.global_test)

    def _shard_size(self, counts: Counts, mode: int) -> int:
        """Return the largest shard size that every class of a mode allows."""
        group, clients = self._groups[mode], self._sizes[mode]
        shards = shards_per_class(clients, self.classes_per_client, counts[group], group, f"mode {mode}")
        return int(counts[group].min()) // shards


def shards_per_class(
    clients: int, per_client: int, counts: Counts, names: Sequence[int] | None = None, where: str = "the data"
) -> int:
    """Return the number of shards per class; refuse uneven divisions and classes that are too small.

    Args:
        clients: number of clients.
        per_client: number of shards of each client.
        counts: samples of each class, shape (classes,).
        names: the class numbers. Default: 0, 1, 2...
        where: owner of the classes, for error messages.
    """
    classes, poor = len(counts), int(np.argmin(counts))
    if not 1 <= per_client <= classes:
        raise FederationError(
            f"classes_per_client must lie between 1 and the {classes} classes of {where}, not {per_client}."
        )
    step = classes // gcd(classes, per_client)
    if clients % step:
        raise FederationError(
            f"{clients} clients with {per_client} shards each cannot share the {classes} classes of {where} evenly: "
            f"use {nearest_multiple(clients, step)} clients (a multiple of {step})."
        )
    shards, most = clients * per_client // classes, counts[poor] * classes // per_client // step * step
    if shards > counts[poor]:
        raise FederationError(
            f"Class {names[poor] if names else poor} has {counts[poor]} samples but must be cut into {shards} shards: "
            + (f"use at most {most} clients." if most else "use more data or leave the class out.")
        )
    return shards


def deal_shards(clients: int, per_client: int, classes: int, distinct: bool, rng: np.random.Generator) -> Counts:
    """Draw the number of shards of every client and class, shape (clients, classes); columns sum to the same."""
    if distinct:
        return _distinct(clients, per_client, classes, rng).astype(np.int64)
    shards = rng.permutation(np.repeat(np.arange(classes), clients * per_client // classes))
    cell = np.repeat(np.arange(clients), per_client) * classes + shards
    return np.bincount(cell, minlength=clients * classes).reshape(clients, classes)


def _distinct(clients: int, per_client: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw a 0/1 matrix with ``per_client`` ones per row and equal column sums, shape (clients, classes).

    Rejection sampling would take forever (10^-5 of the shuffles of 100 clients pass). Instead, start from a staircase,
    which always exists, and let random pairs of clients trade classes that only one of them has; row and column sums do
    not change, and a few trades forget the start.
    """
    slots = np.arange(clients * per_client)
    held = np.zeros((clients, classes), dtype=bool)
    held[slots // per_client, rng.permutation(classes)[slots % classes]] = True
    for _ in range(_TRADES if clients > 1 else 0):
        order = rng.permutation(clients)[: clients // 2 * 2].reshape(2, -1)
        left, right = held[order[0]], held[order[1]]
        keys = np.where(left ^ right, rng.random(left.shape), 2.0)
        rank = keys.argsort(axis=1).argsort(axis=1)
        only_left = (left & ~right).sum(axis=1, keepdims=True)
        to_left = rank < only_left
        held[order[0]] = (left & right) | to_left
        held[order[1]] = (left & right) | ((left ^ right) & ~to_left)
    return held


def _resolve(modes: str | list[list[int]], clients: list[int] | None) -> tuple[list[list[int]], list[int]]:
    """Return checked classes and client counts of the modes."""
    if isinstance(modes, str):
        if modes not in MODES:
            raise FederationError(f"There is no preset {modes!r} of modes: use one of {', '.join(MODES)}.")
        groups, sizes = MODES[modes][0], clients or MODES[modes][1]
    elif clients is None:
        raise FederationError("Own modes need a number of clients each, such as clients=[100, 20].")
    else:
        groups, sizes = modes, clients
    flat = [c for group in groups for c in group]
    if len(groups) != len(sizes) or not all(groups):
        raise FederationError(f"{len(groups)} modes (none of them empty) need as many client counts, not {len(sizes)}.")
    if len(set(flat)) != len(flat):
        raise FederationError("A class may belong to one mode only.")
    return groups, sizes
