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


def fit_entries(
    method: FederatedModule,
    federation: Federation,
    clients: Sequence[int],
    state: State,
    names: tuple[str, ...],
    epochs: int,
) -> dict[int, State]:
    """Train the named entries, and nothing else, on each client's own training data.

    A pure function of its arguments and the method's seed, with random streams apart from those of the rounds; it may
    be called in the middle of an evaluation.

    Args:
        method: its moves and its engine are used.
        federation: the clients' data, on the method's device.
        clients: the clients, each fitted for itself.
        state: what all of them start from.
        names: the entries to train.
        epochs: passes over a client's data.

    Returns:
        The trained entries of every client.
    """
    engine = settled(method.engine)
    order = sorted(clients, key=lambda client: (-int(federation.train.sizes[client]), client))
    fitting = _Fitting(method, names, epochs)
    fitted: dict[int, State] = {}
    with torch.inference_mode(False), torch.enable_grad():  # Lightning evaluates without gradients
        for start in range(0, len(order), engine.width):
            jobs = [Job(client, state) for client in order[start : start + engine.width]]
            for job, result in zip(jobs, engine.train(fitting, federation, jobs, round=0), strict=True):
                fitted[job.client] = {name: result.state[name].clone() for name in names}
    return fitted


@dataclass
class _Fitting:
    """What an engine asks of a method: the method's own moves, one phase of its own, streams of its own."""

    method: FederatedModule
    names: tuple[str, ...]
    epochs: int

    def __post_init__(self) -> None:
        self.local: LocalTraining = self.method.local
        self.seed = int(seeding.stream(self.method.seed, "adapt").integers(2**31))
        self.batch_statistics = self.method.batch_statistics
        self.compute_dtype = self.method.compute_dtype

    def phases(self) -> Sequence[Phase]:
        return [Phase(self.epochs, self.names, "adaptation")]

    def moves(self, phase: Phase) -> Sequence[Move]:
        return self.method.moves(phase)

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        return self.method.draw_noise(rng, steps)

    def dropout_shapes(self, x: Tensor) -> Mapping[str, tuple[int, ...]]:
        return self.method.dropout_shapes(x)
