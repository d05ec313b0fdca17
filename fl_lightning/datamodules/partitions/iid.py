"""The baseline partition: all clients have the same distribution."""

from __future__ import annotations

import numpy as np

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.deal import local_split
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, Part


class IID(PartitionScheme):
    """Deal the shuffled training rows evenly: every row is used and sizes differ by at most one.

    Official test rows, if any, become the global test set.

    Args:
        clients: number of clients.
        test_fraction: fraction of each client's samples held out for testing.
        train_samples: number of training samples of each client, in addition to its test samples; the remaining rows
            are not used. None deals all rows.
    """

    def __init__(self, clients: Count = 10, test_fraction: Part = 0.2, train_samples: Count | None = None) -> None:
        self.clients = clients
        self.test_fraction = test_fraction
        self.train_samples = train_samples

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows."""
        if pool.train_size < 2 * self.clients:
            raise FederationError(
                f"{pool.train_size} samples are too few for {self.clients} clients, which need one for training and "
                f"one for testing each: use at most {max(1, pool.train_size // 2)} clients."
            )
        rows = rng.permutation(pool.train_rows)
        cuts = np.arange(self.clients + 1) * pool.train_size // self.clients
        if self.train_samples is not None:
            each = self.train_samples + max(
                1, round(self.train_samples * self.test_fraction / (1 - self.test_fraction))
            )
            if each * self.clients > pool.train_size:
                raise FederationError(
                    f"{self.clients} clients with {self.train_samples} samples to train on need "
                    f"{each * self.clients} rows, and there are {pool.train_size}: lower train_samples or clients."
                )
            cuts, rows = np.arange(self.clients + 1) * each, rows[: each * self.clients]
        train, test = local_split(rows, np.diff(cuts), self.test_fraction, rng)
        return Partition(train, test, global_test=pool.global_test)
