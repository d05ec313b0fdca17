"""Label skew by a Dirichlet distribution, the usual model of heterogeneity."""

from __future__ import annotations

import numpy as np

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.deal import ClassTable, Counts, local_split
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, Part, Positive, TwoOrMore

_TRIES = 1000


class Dirichlet(PartitionScheme):
    """Divide every class among the clients in proportions drawn from Dirichlet(alpha).

    Small ``alpha`` gives clients few classes and very different sizes; large ``alpha`` approaches IID. All official
    training rows are used. Proportions are normalised Gamma variables; those of a client with fewer than
    ``min_samples`` are drawn again, which does not change the ratios between other clients. Official test rows become
    the global test set.

    Args:
        clients: number of clients.
        alpha: concentration, greater than 0.
        min_samples: minimum number of samples of a client, training and test together.
        test_fraction: fraction of each client's samples held out for testing.
    """

    def __init__(
        self, clients: Count = 100, alpha: Positive = 0.5, min_samples: TwoOrMore = 10, test_fraction: Part = 0.2
    ) -> None:
        self.clients = clients
        self.alpha = alpha
        self.min_samples = min_samples
        self.test_fraction = test_fraction

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows."""
        if self.clients * self.min_samples > pool.train_size:
            raise FederationError(
                f"{pool.train_size} samples are too few for {self.clients} clients with {self.min_samples} each: use "
                f"at most {max(1, pool.train_size // self.min_samples)} clients."
            )
        table = ClassTable.of(pool.labels, pool.train_rows, pool.classes, rng)
        rows, sizes = table.deal(self._counts(table.counts, rng))
        train, test = local_split(rows, sizes, self.test_fraction, rng)
        return Partition(train, test, global_test=pool.global_test)

    def _counts(self, counts: Counts, rng: np.random.Generator) -> Counts:
        """Draw the number of samples of every client and class, shape (clients, classes)."""
        weights = rng.standard_gamma(self.alpha, (self.clients, len(counts)))
        for _ in range(_TRIES):
            shares = np.cumsum(weights, axis=0)
            edges = np.floor(shares / np.maximum(shares[-1], 1e-300) * counts + 0.5).astype(np.int64)
            dealt: Counts = np.diff(edges, axis=0, prepend=0)
            small = dealt.sum(axis=1) < self.min_samples
            if not small.any():
                return dealt
            weights[small] = rng.standard_gamma(self.alpha, (int(small.sum()), len(counts)))
        raise FederationError(
            f"With alpha={self.alpha} some of the {self.clients} clients repeatedly get fewer than "
            f"{self.min_samples} samples: use a greater alpha, fewer clients or "
            f"min_samples={max(2, self.min_samples // 2)}."
        )
