"""Data and clock of every peer: a peer's round and the bare loop take turns in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.bench.data import features
from fl_lightning.bench.plain import batches
from fl_lightning.bench.workloads import WORKLOADS, seeded

WORKLOAD = WORKLOADS["mnist-mlp"]
#: Made when this file is imported, once in each process, and normalised once: nobody pays for it in a round.
DATA, METHOD = WORKLOAD.data(), seeded(WORKLOAD.method)
X, Y, CLIENT_INDEX = features(DATA.federation), DATA.federation.targets, DATA.federation.train
CLIENTS, COHORT = len(CLIENT_INDEX), len(DATA.cohort(0))
EPOCHS, BATCH, LR = METHOD.local.epochs, METHOD.local.batch_size, METHOD.local.lr
WARM_UP = 1


def client_data(client: int) -> tuple[Tensor, Tensor]:
    return X[CLIENT_INDEX[client]], Y[CLIENT_INDEX[client]]


def steps_of(client: int) -> int:
    """Local steps of a client in a round."""
    return EPOCHS * -(-len(CLIENT_INDEX[client]) // BATCH)


class Batches:
    """Shuffled batches of tensors in memory, sliced as the bare loop slices them; a pass is an epoch."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in batches(torch.arange(len(self.y)), epochs=1, size=BATCH):
            yield self.x[part], self.y[part]


def loader(client: int, memory: bool) -> Iterable[Any]:
    """A client's batches: the ``DataLoader`` of the peers' own tutorials, or the bare loop's slices."""
    x, y = client_data(client)
    return Batches(x, y) if memory else DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)


class Turns:
    """Times the rounds after the warm-up; the bare loop runs after each, so one stands on either side of a round.

    Args:
        rounds: rounds to time.
        memory: whether batches are sliced from tensors instead of coming from a ``DataLoader``.
    """

    def __init__(self, rounds: int, memory: bool) -> None:
        self.rounds, self.memory = WARM_UP + rounds, memory
        self.plain: list[float] = []
        self.speeds: list[float] = []

    def round_over(self, steps: int) -> None:
        """A peer calls this at the end of its round, with the local steps that its clients took."""
        if self.plain:
            self.speeds.append(steps / (time.perf_counter() - self.began))
        began = time.perf_counter()
        done = WORKLOAD.loop(METHOD, DATA.federation, X, DATA.cohort(len(self.plain)))
        self.plain.append(done / (time.perf_counter() - began))
        self.began = time.perf_counter()

    def result(self) -> dict[str, float]:
        around = [(a + b) / 2 for a, b in zip(self.plain, self.plain[1:], strict=False)]
        return {
            "ratio": statistics.median(a / b for a, b in zip(self.speeds, around, strict=True)),
            "steps_per_second": statistics.median(self.speeds),
            "plain_steps_per_second": statistics.median(self.plain),
        }
