"""Fitting some entries of clients' states outside the rounds, with everything else frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.engine import Job, LocalTraining, Move, Phase, settled
from fl_lightning.federation import Federation
from fl_lightning.module import FederatedModule
from fl_lightning.wire import State


def fit_entries(fitting: Fitting, federation: Federation, clients: Sequence[int], state: State) -> dict[int, State]:
    """Train the named entries, and nothing else, on each client's own training data.

    A pure function of its arguments and the method's seed, with random streams apart from those of the rounds; it may
    be called in the middle of an evaluation.

    Args:
        fitting: what is trained, and for how long.
        federation: the clients' data, on the method's device.
        clients: the clients, each fitted for itself.
        state: what all of them start from.

    Returns:
        The trained entries of every client.
    """
    engine = settled(fitting.method.engine)
    order = sorted(clients, key=lambda client: (-int(federation.train.sizes[client]), client))
    fitted: dict[int, State] = {}
    with torch.inference_mode(False), torch.enable_grad():  # Lightning evaluates without gradients
        for start in range(0, len(order), engine.width):
            jobs = [Job(client, state) for client in order[start : start + engine.width]]
            for job, result in zip(jobs, engine.train(fitting, federation, jobs, round=0), strict=True):
                fitted[job.client] = {name: result.state[name].clone() for name in fitting.names}
    return fitted


@dataclass
class Fitting:
    """What an engine asks of a method: the method's own moves, one phase of its own, streams of its own.

    Args:
        method: its moves are used.
        names: the entries to train.
        epochs: passes over a client's data.
        steps: steps at most; None does not bound them.
        purpose: what it is for; every name has its own streams.
    """

    method: FederatedModule
    names: tuple[str, ...]
    epochs: int
    steps: int | None = None
    purpose: str = "adapt"

    def __post_init__(self) -> None:
        self.local: LocalTraining = self.method.local
        self.seed = int(seeding.stream(self.method.seed, self.purpose).integers(2**31))

    @property
    def batch_statistics(self) -> bool:
        """As the method's."""
        return self.method.batch_statistics

    @property
    def compute_dtype(self) -> torch.dtype:
        """As the method's."""
        return self.method.compute_dtype

    def phases(self) -> Sequence[Phase]:
        """One phase."""
        return [Phase(self.epochs, self.names, self.purpose, self.steps)]

    def moves(self, phase: Phase) -> Sequence[Move]:
        """The method's."""
        return self.method.moves(phase)

    def opening(self, phase: Phase) -> Sequence[Move]:
        """The method's."""
        return self.method.opening(phase)

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """As the method draws it."""
        return self.method.draw_noise(rng, steps)

    def dropout_shapes(self, x: Tensor) -> Mapping[str, tuple[int, ...]]:
        """As the method's."""
        return self.method.dropout_shapes(x)
