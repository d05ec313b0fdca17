"""Which samples a client sees in which order, and the noise of its steps: drawn the same way by every engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.engine.contract import LocalMethod
from fl_lightning.federation import Federation
from fl_lightning.wire import State


@dataclass
class ClientSchedule:
    """One client's streams in one round.

    Args:
        client: the client.
        index: its training samples, on the data's device, shape (n,).
        batches: stream of the batch order.
        noise: stream of the method's noise.
        dropout: stream of the dropout layers' noise.
        augment: stream of the augmentation.
    """

    client: int
    index: Tensor
    batches: np.random.Generator
    noise: np.random.Generator
    dropout: np.random.Generator
    augment: np.random.Generator

    @classmethod
    def of(cls, method: LocalMethod, federation: Federation, client: int, round: int) -> ClientSchedule:
        """The streams of (seed, purpose, round, client)."""
        purposes = ("batches", "noise", "dropout", "augment")
        streams = (seeding.stream(method.seed, purpose, round, client) for purpose in purposes)
        return cls(client, federation.train[client], *streams)

    @property
    def size(self) -> int:
        """Number of training samples."""
        return len(self.index)

    def order(self) -> Tensor:
        """Sample numbers of the next epoch in the order they are visited, shape (n,)."""
        return self.index[seeding.permutation(self.batches, self.size).to(self.index.device)]


def batch_sizes(size: int, batch_size: int, batch_statistics: bool) -> tuple[int, int]:
    """Number of full batches in an epoch, and the size of the last partial one (0: none).

    A last batch of one sample is dropped where the net normalises over the batch: it has no variance.
    """
    full, rest = divmod(size, batch_size)
    if batch_statistics and batch_size == 1:
        return 0, 0
    return full, 0 if rest == 1 and batch_statistics else rest


def epoch_noise(method: LocalMethod, schedule: ClientSchedule, steps: int, x: Tensor) -> tuple[State, State]:
    """Noise of one client's next epoch.

    Args:
        method: the method.
        schedule: the client's streams.
        steps: number of steps of the epoch.
        x: a gathered batch, for its device and, with dropout, the shapes within the net; shape (B, ...).

    Returns:
        The method's noise, shapes (steps, ...), and the dropout layers' noise, shapes (steps, B, ...).
    """
    drawn = {k: v.to(x.device) for k, v in method.draw_noise(schedule.noise, steps).items()}
    dropout = {
        name: seeding.uniform(schedule.dropout, (steps, method.local.batch_size, *shape), method.compute_dtype).to(
            x.device
        )
        for name, shape in method.dropout_shapes(x).items()
    }
    return drawn, dropout


def scalars(sizes: Tensor, round: int, dtype: torch.dtype) -> State:
    """The scalars of ``Batch``, each shaped as ``sizes``: 0-dim for one client, (K,) for a stack."""
    counter = torch.zeros_like(sizes, dtype=dtype)
    return {"samples": sizes.to(dtype), "round": counter + round, "epoch": counter.clone(), "step": counter}
