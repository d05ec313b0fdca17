"""Fitting some entries of clients' states outside the rounds, with everything else frozen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fl_lightning.contract import ClientSide
from fl_lightning.engine import Job, LocalMethod, Phase, Plan, settled
from fl_lightning.parties import LocalData, together
from fl_lightning.wire import State


def fitting(
    method: LocalMethod, names: Sequence[str], epochs: int, steps: int | None = None, purpose: str = "adapt"
) -> Plan:
    """The method's own moves in one phase, with random streams apart from those of the rounds.

    Args:
        method: its moves are used.
        names: the entries to train.
        epochs: passes over a client's data.
        steps: steps at most; None does not bound them.
        purpose: every name has its own streams.
    """
    return Plan(method, [Phase(epochs, tuple(names), purpose, steps)], purpose=purpose)


def fit_entries(method: ClientSide, plan: Plan, data: Sequence[LocalData], states: Sequence[State]) -> list[State]:
    """Train the entries of a plan, and nothing else, on each client's own training data.

    A pure function of its arguments and the plan's seed; it may be called in the middle of an evaluation.

    Args:
        method: the method, for its engine.
        plan: one phase of training.
        data: the clients' data.
        states: the state that each client starts from.

    Returns:
        The trained entries of every client.
    """
    engine, (phase,) = settled(method.engine), plan.phases()
    order = sorted(range(len(data)), key=lambda i: (-len(data[i]), i))
    fitted: dict[int, State] = {}
    with torch.inference_mode(False), torch.enable_grad():  # Lightning evaluates without gradients
        for start in range(0, len(order), engine.width):
            part = order[start : start + engine.width]
            federation, rows = together([data[i] for i in part])
            jobs = [Job(row, states[i]) for row, i in zip(rows, part, strict=True)]
            for i, result in zip(part, engine.train(plan, federation, jobs, round=0), strict=True):
                fitted[i] = {name: result.state[name].clone() for name in phase.trainable}
    return [fitted[i] for i in range(len(data))]
