"""Loaders for the Trainer: rounds in training, chunks of clients in evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Tick:
    """The training "loader": one tick is one federated round and one epoch.

    It has length 1 and is not a ``DataLoader``, so the Trainer does not inject a sampler.
    """

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter((0,))


class ClientChunks:
    """The evaluation "loader": client numbers in chunks.

    Args:
        clients: the clients.
        size: number of clients in a chunk.

    Example:
        >>> [chunk.tolist() for chunk in ClientChunks(range(5), 2)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, clients: Sequence[int], size: int) -> None:
        self.clients = torch.tensor(list(clients), dtype=torch.int64)
        self.size = size

    def __len__(self) -> int:
        return -(-len(self.clients) // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(self.clients, self.size)[: len(self)])
