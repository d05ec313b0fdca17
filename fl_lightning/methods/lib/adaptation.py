"""Fitting of some entries of clients' states outside of rounds, with all others frozen."""

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
    """Build a plan with the method's own moves in one phase and random streams separate from the rounds'.

    Args:
        method: the method whose moves are used.
        names: the entries to train.
        epochs: number of passes over a client's data.
        steps: maximum number of steps; None for no limit.
        purpose: name of the random streams.
    """
    return Plan(method, [Phase(epochs, tuple(names), purpose, steps)], purpose=purpose)


def fit_entries(method: ClientSide, plan: Plan, data: Sequence[LocalData], states: Sequence[State]) -> list[State]:
    """Train only the entries of a plan on each client's own training data.

    A pure function of its arguments and the plan's seed; may be called during an evaluation.

    Args:
        method: the method, for its engine.
        plan: one phase of training.
        data: the clients' data.
        states: each client's initial state.

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
