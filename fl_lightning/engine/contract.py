"""The interface between engine and method for one client's local training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning import local_optim
from fl_lightning.arguments import NamedArguments
from fl_lightning.errors import FederationError
from fl_lightning.local_optim import SGD, LocalOptimizer
from fl_lightning.ranges import CountUpToAMillion, NonNegative, Positive, ShareBelowOne
from fl_lightning.schedules import AnySchedule, Constant, Counted, describe, value_at
from fl_lightning.wire import State

ScheduleUnit = Literal["round", "epoch", "step"]


@dataclass(frozen=True)
class LocalTraining(NamedArguments):
    """Settings of local training.

    Args:
        lr: learning rate.
        epochs: passes over the client's data per round, 1 or more.
        batch_size: minibatch size; the last batch of a pass may be smaller.
        momentum: momentum, as in ``torch.optim.SGD``.
        weight_decay: weight decay, as defined by the optimizer.
        clip_norm: maximum norm of a client's gradient at every step; None does not clip.
        optimizer: SGD by default; an object of ``fl_lightning.local_optim``, its name, or class path and arguments.
        keep_optimizer: whether a client keeps the optimizer's state between rounds; else it is new in every round.
        schedule: factor of the learning rate; None is always 1.
        schedule_by: the unit that the schedule counts: rounds, epochs over all rounds, or the steps of one round.
        rounds: number of rounds of the run, for a schedule by epochs; see :meth:`in_round`.
    """

    lr: NonNegative = 0.01
    epochs: CountUpToAMillion = 1
    batch_size: CountUpToAMillion = 10
    momentum: ShareBelowOne = 0.0
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = None
    optimizer: LocalOptimizer | Mapping[str, Any] | str | None = None
    keep_optimizer: bool = False
    schedule: AnySchedule | None = None
    schedule_by: ScheduleUnit = "round"
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            self._take(local_optim.made(self.optimizer, self.momentum, self.weight_decay))

    def _take(self, optimizer: LocalOptimizer) -> None:
        """Copy ``momentum`` and ``weight_decay`` from the optimizer."""
        known = {name: getattr(optimizer, name, 0.0) for name in ("momentum", "weight_decay")}
        for name, value in {"optimizer": optimizer, **known}.items():
            object.__setattr__(self, name, value)

    @property
    def rule(self) -> LocalOptimizer:
        """The local optimizer."""
        if isinstance(self.optimizer, LocalOptimizer):
            return self.optimizer
        return SGD(self.momentum, self.weight_decay)

    def in_round(self, round: int, rounds: int) -> LocalTraining:
        """Return the settings of one round of a run of ``rounds`` rounds, with its learning rate."""
        if self.schedule is None:
            return self
        if rounds < 1 and self.schedule_by != "step" and not isinstance(self.schedule, Counted):
            name = getattr(self.schedule, "__name__", type(self.schedule).__name__)
            raise FederationError(f"{name} depends on the share of completed rounds: set max_epochs.")
        if self.schedule_by == "round":
            return replace(self, lr=self.lr * value_at(self.schedule, round, rounds), schedule=Constant())
        return replace(self, rounds=rounds)

    def rate(self, round: int, epoch: int, step: int, steps: int) -> float:
        """Return the learning rate of a step.

        Args:
            round: the round, from 0.
            epoch: epochs that the client has completed in this round.
            step: steps that the client has taken in this round.
            steps: steps that it takes in a round.
        """
        if self.schedule is None:
            return self.lr
        if self.schedule_by == "step":
            return self.lr * value_at(self.schedule, step, steps)
        if self.schedule_by == "epoch":
            return self.lr * value_at(self.schedule, round * self.epochs + epoch, self.rounds * self.epochs)
        return self.lr * value_at(self.schedule, round, self.rounds)

    @property
    def not_plain(self) -> str:
        """Options that differ from SGD (with or without momentum) at one rate per round; empty if none do."""
        rule = self.rule
        if type(rule) is not SGD or rule.nesterov:
            return f"optimizer={rule!r}"
        if self.keep_optimizer and self.momentum:
            return "keep_optimizer=True"
        return f"schedule_by={self.schedule_by!r}" if self.schedule is not None and self.schedule_by != "round" else ""

    def described(self) -> dict[str, Any]:
        """Return all settings as plain values, without those that have no effect."""
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)[:6]}
        if self.optimizer is not None:
            found["optimizer"] = self.rule.describe()
        if self.keep_optimizer:
            found["keep_optimizer"] = True
        if self.schedule is not None:
            found |= {"schedule": describe(self.schedule), "schedule_by": self.schedule_by, "rounds": self.rounds}
        return found


@dataclass(frozen=True)
class Phase:
    """Part of local training in which the same entries are trained.

    Args:
        epochs: passes over the client's data.
        trainable: names of the entries that the local optimizer updates.
        name: name of the phase in messages.
        steps: number of steps after which the phase ends, even within an epoch; None means no limit.
    """

    epochs: int
    trainable: tuple[str, ...]
    name: str = "train"
    steps: int | None = None


class Batch(NamedTuple):
    """One minibatch of one client, and everything else that a step may depend on.

    Engines that stack clients map over the leading dimension of every tensor.
    """

    x: Tensor
    """Inputs, shape (B, ...)."""
    y: Tensor
    """Targets, shape (B, ...)."""
    noise: State
    """Noise for this step from the method's ``draw_noise``, and the uniform noise of dropout layers."""
    scalars: State
    """``samples`` (the client's training size), ``round``, ``epoch`` and ``step``, as 0-dim tensors, so that a
    captured step does not freeze them; ``lr``, the learning rate of the step, if there is a schedule."""


class Update(NamedTuple):
    """Changes made by one move; the engine applies them in place."""

    loss: Tensor
    """The loss before the move, for logging, 0-dim."""
    grads: State
    """Gradients for the local optimizer (clipping, weight decay, momentum, learning rate)."""
    replace: State = {}  # noqa: RUF012 - never written to, and a dict for vmap
    """Entries that get a new value, such as BatchNorm buffers."""
    add: State = {}  # noqa: RUF012
    """Values added to entries directly, such as for a second model with its own learning rate."""


#: ``objective(state)`` returns the loss and the entries (buffers) changed by the forward pass.
Objective = Callable[[State], tuple[Tensor, State]]
#: ``gradient(objective, state, names)`` returns the gradients by name, the loss and the changed entries.
Gradient = Callable[[Objective, State, Sequence[str]], tuple[State, Tensor, State]]
#: One move on one minibatch: a pure function that reads the state and returns the changes.
Move = Callable[[State, Batch, Phase, Gradient], Update]


class LocalMethod(Protocol):
    """The parts of a method that an engine uses."""

    local: LocalTraining
    seed: int

    def phases(self) -> Sequence[Phase]:
        """Return the phases of a client's training in one round."""
        ...

    def moves(self, phase: Phase) -> Sequence[Move]:
        """Return the moves made on every minibatch of a phase, in order."""
        ...

    def opening(self, phase: Phase) -> Sequence[Move]:
        """Return the moves made on the first minibatch of a phase; empty if they are the same."""
        ...

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Draw the method's noise for the steps of one epoch, each tensor of shape (steps, ...)."""
        ...

    def dropout_shapes(self, x: Tensor) -> Mapping[str, tuple[int, ...]]:
        """Return the noise entries of the net's dropout layers with their shapes, without the batch dimension."""
        ...

    @property
    def batch_statistics(self) -> bool:
        """Whether the net normalises over the batch, so that it cannot be trained on a batch of one."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """The net's floating precision."""
        ...


@dataclass
class Job:
    """One client's local training in one round.

    Args:
        client: the client's row in the data.
        state: its initial named tensors: shared, private and extra entries. Engines never write to them.
        optimizer: its optimizer state of an earlier round, for entries that were stepped; empty for a new one.
    """

    client: int
    state: State
    optimizer: State = field(default_factory=dict)


@dataclass
class Result:
    """Result of local training: the final state, the mean loss over its steps (NaN if there were none), their number.

    With ``keep_optimizer`` also the optimizer state.
    """

    state: State
    loss: float
    steps: int
    optimizer: State = field(default_factory=dict)
