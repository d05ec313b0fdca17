"""The natural partition: one client per user."""

from __future__ import annotations

import numpy as np

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.deal import local_split, ranges
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, Part, TwoOrMore


class ByUser(PartitionScheme):
    """Make every client one user of the data (docs/partitions.md).

    ``clients`` users are drawn among those with at least ``min_samples`` official training samples. Official test rows,
    if any, become the global test set. Each client's user is stored as ``user``.

    Args:
        clients: number of users to draw; None takes all eligible users.
        min_samples: minimum number of samples of a user.
        test_fraction: fraction of each client's samples held out for testing.
    """

    def __init__(self, clients: Count | None = 100, min_samples: TwoOrMore = 20, test_fraction: Part = 0.2) -> None:
        self.clients = clients
        self.min_samples = min_samples
        self.test_fraction = test_fraction

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows."""
        if pool.users is None:
            raise FederationError("This data has no users: use Sent140 or another partition.")
        users, owner, counts = np.unique(pool.users[: pool.train_size], return_inverse=True, return_counts=True)
        eligible = np.flatnonzero(counts >= self.min_samples)
        wanted = len(eligible) if self.clients is None else self.clients
        if not 0 < wanted <= len(eligible):
            raise FederationError(self._too_few(counts, len(eligible)))
        chosen = np.sort(rng.choice(eligible, wanted, replace=False))
        order = np.argsort(owner, kind="stable")
        begins = np.cumsum(counts) - counts
        rows = order[ranges(begins[chosen], counts[chosen])]
        train, test = local_split(rows, counts[chosen], self.test_fraction, rng)
        return Partition(train, test, {"user": users[chosen].tolist()}, global_test=pool.global_test)

    def _too_few(self, counts: np.ndarray[tuple[int], np.dtype[np.int64]], eligible: int) -> str:
        """Return an error message with the number of users and settings that work."""
        ranked = np.sort(counts)[::-1]
        wanted = min(self.clients or 1, len(ranked))
        enough = max(2, int(ranked[wanted - 1]))
        users = int((counts >= enough).sum())
        have = f"Only {eligible} users have" if eligible else f"No user (the busiest has {ranked[0]}) has"
        return (
            f"{have} the {self.min_samples} samples that min_samples requires: use min_samples={enough} and at most "
            f"{users} clients" + (f", or {eligible} clients." if eligible else ".")
        )
