"""The baseline partition: every client sees the same distribution."""

from __future__ import annotations

import numpy as np

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.deal import check_clients, local_split
from fl_lightning.errors import FederationError


class IID(PartitionScheme):
    """Deal the shuffled training rows evenly: every row is used and sizes differ by at most one.

    Official test rows, where there are any, become the global test set.

    Args:
        clients: number of clients.
        test_fraction: part of each client's samples that it is tested on.
    """

    def __init__(self, clients: int = 10, test_fraction: float = 0.2) -> None:
        check_clients(clients)
        self.clients = clients
        self.test_fraction = test_fraction

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows out."""
        if pool.train_size < 2 * self.clients:
            raise FederationError(
                f"{pool.train_size} samples are too few for {self.clients} clients, which need one to train on and one "
                f"to be tested on: use at most {max(1, pool.train_size // 2)} clients."
            )
        rows = rng.permutation(pool.train_rows)
        cuts = np.arange(self.clients + 1) * pool.train_size // self.clients
        train, test = local_split(rows, np.diff(cuts), self.test_fraction, rng)
        return Partition(train, test, global_test=pool.global_test)
