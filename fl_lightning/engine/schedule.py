"""Order of a client's samples and noise of its steps, drawn in the same way by every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.engine.contract import LocalMethod
from fl_lightning.federation import Federation
from fl_lightning.wire import State


@dataclass
class ClientSchedule:
    """One client's RNG streams in one round.

    Args:
        client: the client's row in the data.
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
        """Create the streams of (seed, purpose, round, client)."""
        purposes = ("batches", "noise", "dropout", "augment")
        number = federation.number_of(client)
        streams = (seeding.stream(method.seed, purpose, round, number) for purpose in purposes)
        return cls(client, federation.train[client], *streams)

    @property
    def size(self) -> int:
        """Number of training samples."""
        return len(self.index)

    def permutation(self) -> Tensor:
        """Draw the order of the client's samples for the next epoch, shape (n,)."""
        return seeding.permutation(self.batches, self.size).to(self.index.device)

    def order(self) -> Tensor:
        """Draw the sample indices of the next epoch in order, shape (n,)."""
        return self.index[self.permutation()]


class StackSamples:
    """The samples of a stack of clients.

    They are normalised once a round instead of at every step if clients see them several times, without augmentation,
    and if they are few enough.

    Args:
        federation: the data.
        schedules: the clients' streams.
        dtype: floating precision of the net.
        again: whether clients see their samples more than once.
    """

    #: Maximum size in bytes of the normalised samples.
    most = 2**28

    def __init__(
        self, federation: Federation, schedules: Sequence[ClientSchedule], dtype: torch.dtype, again: bool
    ) -> None:
        self.federation, self.schedules, self.dtype = federation, schedules, dtype
        self.index = torch.cat([schedule.index for schedule in schedules])
        self.starts = [0, *accumulate(schedule.size for schedule in schedules)]
        size = len(self.index) * federation.inputs[0].numel() * dtype.itemsize
        self.kept: tuple[Tensor, Tensor] | None = None
        if again and federation.augment is None and size <= self.most:
            self.kept = self._inputs(), torch.cat([federation.labels([s.client], s.index[None])[0] for s in schedules])

    def _inputs(self) -> Tensor:
        """Normalise the inputs of all clients, client by client, so that the working set fits in cache."""
        federation, raw = self.federation, self.federation.inputs
        precision = raw.dtype if federation.mean is None and not raw.is_floating_point() else self.dtype
        inputs = raw.new_empty(len(self.index), *raw.shape[1:], dtype=precision)
        for schedule, start, stop in zip(self.schedules, self.starts, self.starts[1:], strict=False):
            federation.features(raw.index_select(0, schedule.index), self.dtype, out=inputs[start:stop])
        return inputs

    def orders(self, done: int, size: int) -> Sequence[Tensor]:
        """Draw the next epoch's batches as positions among the samples of all clients, from client ``done`` on.

        Returns:
            One tensor of positions per step, shape (K, size), padded for clients with shorter batches.
        """
        drawn = zip(self.starts[done:], self.schedules[done:], strict=False)
        places = [start + schedule.permutation() for start, schedule in drawn]
        padded = torch.nn.utils.rnn.pad_sequence(places, batch_first=True)
        steps = -(-padded.shape[1] // size)
        padded = torch.nn.functional.pad(padded, (0, steps * size - padded.shape[1]))
        return padded.view(len(places), steps, size).transpose(0, 1).contiguous().unbind()

    def gather(self, start: int, stop: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Gather one batch of each of some clients: inputs and targets of shape (K, B, ...)."""
        flat = places.reshape(-1)
        if self.kept is not None:
            x, y = (values.index_select(0, flat) for values in self.kept)
            return x.view(*places.shape, *x.shape[1:]), y.view(*places.shape, *y.shape[1:])
        schedules = self.schedules[start:stop]
        clients, streams = [s.client for s in schedules], [s.augment for s in schedules]
        return self.federation.gather(clients, self.index[flat].view(places.shape), self.dtype, streams)


def batch_sizes(size: int, batch_size: int, batch_statistics: bool) -> tuple[int, int]:
    """Return the number of full batches in an epoch, and the size of the last partial one (0: none).

    A last batch of one sample is dropped if the net normalises over the batch, since it has no variance.
    """
    full, rest = divmod(size, batch_size)
    if batch_statistics and batch_size == 1:
        return 0, 0
    return full, 0 if rest == 1 and batch_statistics else rest


def epoch_noise(method: LocalMethod, schedule: ClientSchedule, steps: int, x: Tensor) -> tuple[State, State]:
    """Draw the noise of one client's next epoch.

    Args:
        method: the method.
        schedule: the client's streams.
        steps: number of steps of the epoch.
        x: a gathered batch, shape (B, ...), for its device and, with dropout, the shapes within the net.

    Returns:
        The method's noise, shapes (steps, ...), and the dropout layers' noise, shapes (steps, batch_size, ...).
    """
    drawn = {k: v.to(x.device) for k, v in method.draw_noise(schedule.noise, steps).items()}
    dropout = {
        name: seeding.uniform(schedule.dropout, (steps, method.local.batch_size, *shape), method.compute_dtype).to(
            x.device
        )
        for name, shape in method.dropout_shapes(x).items()
    }
    return drawn, dropout


def scalars(sizes: Tensor, round: int, dtype: torch.dtype, scheduled: bool = False) -> State:
    """Create the scalars of ``Batch``, each with the shape of ``sizes``: 0-dim for one client, (K,) for a stack."""
    counter = torch.zeros_like(sizes, dtype=dtype)
    found = {"samples": sizes.to(dtype), "round": counter + round, "epoch": counter.clone(), "step": counter}
    return found | ({"lr": counter.clone()} if scheduled else {})
