"""Samples of an attack: members, non-members and the adversary's own, all disjoint.

Non-members have the same class counts as the members. Otherwise, an attack on a client with two classes would only have
to classify samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex, Federation

Rows = NDArray[np.int64]
#: The adversary's share of unused rows; the rest are non-members.
ADVERSARY = 2 / 3
#: Minimum number of members and non-members.
FEWEST = 8
#: Minimum number of rows of a shadow's client; with fewer rows, shadows have fewer clients.
FEW = 32


@dataclass(frozen=True)
class AttackData:
    """The rows of one attack.

    Args:
        members: training rows of each attacked client.
        nonmembers: the same number of rows of the same classes for each of them, on which no client trains.
        pool: the adversary's own rows, for shadows.
        reference: the adversary's rows to guess unseen entries with.
        source: ``unowned`` if non-members and the adversary's rows belong to no client, ``held out`` if clients' test
            rows, on which no client trains either, are used too because there are too few.
    """

    members: dict[int, Tensor]
    nonmembers: dict[int, Tensor]
    pool: Tensor
    reference: Tensor
    source: str


class _Pool:
    """Rows by class, shuffled; ``take`` removes rows, ``draw`` does not."""

    def __init__(self, rows: Rows, labels: Rows, classes: int, rng: np.random.Generator) -> None:
        shuffled = rng.permutation(rows)
        self.lists = [shuffled[labels[shuffled] == c] for c in range(classes)]

    @property
    def counts(self) -> Rows:
        return np.array([len(rows) for rows in self.lists])

    def take(self, wanted: Rows) -> Rows:
        """Remove and return up to the wanted number of each class."""
        cut = np.minimum(wanted, self.counts)
        taken = [rows[:n] for rows, n in zip(self.lists, cut, strict=True)]
        self.lists = [rows[n:] for rows, n in zip(self.lists, cut, strict=True)]
        return np.concatenate(taken)

    def draw(self, wanted: Rows, rng: np.random.Generator) -> Rows:
        """Return the wanted number of each class, which must exist, without removing them."""
        return np.concatenate([rng.choice(rows, n, replace=False) for rows, n in zip(self.lists, wanted, strict=True)])


def attack_data(
    federation: Federation, clients: Sequence[int], seed: int, samples: int = 1000, shadow_clients: int = 0
) -> AttackData:
    """Divide rows that no client trains on into non-members and the adversary's own.

    A pure function of its arguments.

    Args:
        federation: the clients' data.
        clients: the attacked clients.
        seed: the run's seed.
        samples: maximum number of members and non-members of each client.
        shadow_clients: number of clients of a shadow federation, which determines the rows needed.
    """
    labels, classes = federation.targets.cpu().numpy(), federation.num_classes
    size = min(samples, int(federation.train.sizes.median()))
    rows, source = _untrained(federation, (2 * shadow_clients + 2) * size)
    rng = seeding.stream(seed, "attack.data")
    pool = _Pool(rows, labels, classes, rng)
    own = _Pool(pool.take(np.ceil(pool.counts * ADVERSARY).astype(np.int64)), labels, classes, rng)
    size = min(size, int(own.counts.sum()) // 5)
    reference = own.take(_in_proportion(own.counts, size))
    rest = own.take(own.counts)
    members, nonmembers = {}, {}
    for client in clients:
        draws = seeding.stream(seed, "attack.members", client=client)
        train = _Pool(federation.train[client].cpu().numpy(), labels, classes, draws)
        counts = np.minimum(train.counts, pool.counts)
        counts = _in_proportion(counts, min(samples, int(counts.sum())))
        if counts.sum() < FEWEST:
            raise FederationError(
                f"Client {client} can be attacked with {counts.sum()} members and non-members of the same classes "
                f"only, and {FEWEST} are needed: give the partition fewer samples, so that some rows are nobody's."
            )
        members[client], nonmembers[client] = _tensor(train.take(counts)), _tensor(pool.draw(counts, draws))
    return AttackData(members, nonmembers, _tensor(rest), _tensor(reference), source)


def deal_shadows(
    rows: Tensor, runs: int, clients: int, size: int, seed: int, wanted: Tensor | None = None
) -> list[list[Tensor]]:
    """Deal training rows to clients of shadow federations; each row is in one of every two federations.

    Rows are dealt at random, because the adversary does not know the classes of the target's clients. With few rows,
    clients have fewer rows, and below ``FEW`` there are fewer clients.

    Args:
        rows: the adversary's own rows.
        runs: number of federations.
        clients: number of clients of each.
        size: maximum number of rows of a client.
        seed: the run's seed.
        wanted: rows to deal first.
    """
    rng = seeding.stream(seed, "attack.shadows")
    rows = rows[seeding.permutation(rng, len(rows))]
    if wanted is not None:
        rows = torch.cat((torch.unique(wanted).cpu(), rows))
    clients = max(1, min(clients, len(rows) // 2 // min(size, FEW)))
    rows = rows[: 2 * clients * size]
    if len(rows) // 2 < FEWEST:
        raise FederationError(
            f"{len(rows)} rows that nobody trains on are too few for shadows: give the partition fewer samples."
        )
    dealt: list[list[Tensor]] = []
    for number in range(runs):
        if number % 2 == 0:
            order = rows[seeding.permutation(rng, len(rows))]
        half = order[: len(order) // 2] if number % 2 == 0 else order[len(order) // 2 :]
        half = half[seeding.permutation(rng, len(half))]
        dealt.append([part.sort().values for part in torch.tensor_split(half, clients)])
    return dealt


def as_clients(federation: Federation, train: Sequence[Tensor], test: Sequence[Tensor] | None = None) -> Federation:
    """Return a federation whose clients own only these rows."""
    index = ClientIndex.of([rows.cpu() for rows in train]).to(federation.device)
    held = index if test is None else ClientIndex.of([rows.cpu() for rows in test]).to(federation.device)
    return replace(federation, train=index, test=held, val=None, global_test=None, label_maps=None, meta={})


def _untrained(federation: Federation, needed: int) -> tuple[Rows, str]:
    """Return rows of the trained classes that no client trains on, and their source."""
    targets, classes = federation.targets, federation.num_classes
    trained = torch.bincount(targets[federation.train.flat], minlength=classes)
    free = trained[targets] > 0
    free[federation.train.flat] = False
    if federation.val is not None:
        free[federation.val.flat] = False
    unowned = free.clone()
    unowned[federation.test.flat] = False
    enough = torch.bincount(targets[unowned], minlength=classes) >= needed * trained / trained.sum()
    rows: Rows = torch.nonzero(unowned if bool(enough.all()) else free).flatten().cpu().numpy()
    return rows, "unowned" if bool(enough.all()) else "held out"


def _in_proportion(counts: Rows, total: int) -> Rows:
    """Scale counts to sum to ``total`` or slightly less."""
    share = total / max(int(counts.sum()), 1)
    return np.floor(counts * share + 1e-9).astype(np.int64)  # type: ignore[no-any-return]


def _tensor(rows: Rows) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
