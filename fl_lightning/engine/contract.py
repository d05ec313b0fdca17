"""What an engine and a method say to each other about one client's local training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.arguments import real, whole
from fl_lightning.errors import FederationError
from fl_lightning.wire import State

#: Epochs of a round, and samples of a batch; more of them are a slip.
MOST = 1_000_000


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: SGD with a new optimizer every round.

    Args:
        lr: learning rate.
        epochs: passes over the client's data per round, 1 or more.
        batch_size: minibatch size; the last batch of a pass may be smaller.
        momentum: momentum, as in ``torch.optim.SGD``; not kept between rounds.
        weight_decay: L2 penalty, as in ``torch.optim.SGD``.
        clip_norm: bound on the norm of a client's gradient at every step; None does not clip.
    """

    lr: float = 0.01
    epochs: int = 1
    batch_size: int = 10
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        whole("epochs", self.epochs, 1, MOST)
        whole("batch_size", self.batch_size, 1, MOST)
        for name in ("lr", "momentum", "weight_decay"):
            real(name, getattr(self, name))
        if self.clip_norm is not None:
            real("clip_norm", self.clip_norm)
        if not 0 <= self.lr < math.inf:
            raise FederationError(f"lr must be 0 or more and finite, not {self.lr}.")
        if not 0 <= self.momentum < 1:
            raise FederationError(f"momentum must lie in [0, 1), not {self.momentum}.")
        if not self.weight_decay >= 0:
            raise FederationError(f"weight_decay must be 0 or more, not {self.weight_decay}.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise FederationError(f"clip_norm must be greater than 0, not {self.clip_norm}.")


@dataclass(frozen=True)
class Phase:
    """A stretch of local training in which the same entries are trained.

    Args:
        epochs: passes over the client's data.
        trainable: names of the entries that local SGD updates.
        name: how the phase is called in messages.
        steps: the phase ends after so many steps, be it within an epoch; None does not bound them.
    """

    epochs: int
    trainable: tuple[str, ...]
    name: str = "train"
    steps: int | None = None


class Batch(NamedTuple):
    """One minibatch of one client, and all else that a step may depend on.

    Engines that stack clients map over the leading dimension of every tensor in here.
    """

    x: Tensor
    """Inputs, shape (B, ...)."""
    y: Tensor
    """Labels, shape (B,)."""
    noise: State
    """What the method's ``draw_noise`` drew for this step, and the uniform noise of dropout layers."""
    scalars: State
    """``samples`` (the client's training size), ``round``, ``epoch`` and ``step``, as 0-dim tensors, so that a
    captured step does not freeze them."""


class Product(NamedTuple):
    """A stack of changes that are matrix products, not multiplied out, and what is to be added to them.

    It stands for ``scale * left @ right + own * entry + sum(factor * tensor)`` where ``entry`` is what it is a change
    of. Only engines make them: the local SGD multiplies them straight into the weights, which spares writing gradients
    and reading them again.
    """

    left: Tensor
    """Shape (K, m, n)."""
    right: Tensor
    """Shape (K, n, p)."""
    scale: float = 1.0
    own: float = 0.0
    rest: Sequence[tuple[float, Tensor]] = ()

    def add_to(self, entry: Tensor, alpha: float, beta: float = 1.0, own: bool = True) -> None:
        """``entry = beta * entry + alpha * product``, in place; ``own`` false says that ``entry`` is not its entry."""
        if own:
            beta += alpha * self.own
        entry.baddbmm_(self.left, self.right, beta=beta, alpha=alpha * self.scale)
        for factor, tensor in self.rest:
            entry.add_(tensor, alpha=alpha * factor)


class Update(NamedTuple):
    """What one move changes; the engine applies it in place."""

    loss: Tensor
    """The loss before the move, for the log, 0-dim."""
    grads: State
    """Gradients for the local SGD (clipping, weight decay, momentum, learning rate)."""
    replace: State = {}  # noqa: RUF012 - never written to, and a dict for vmap
    """Entries that take a new value, such as BatchNorm buffers."""
    add: State = {}  # noqa: RUF012
    """Entries to which a value is added as it is, such as a second model with a learning rate of its own."""


#: ``objective(state)`` returns the loss and the entries (buffers) that the forward pass changed.
Objective = Callable[[State], tuple[Tensor, State]]
#: ``gradient(objective, state, names)`` returns the gradients by name, the loss and the changed entries.
Gradient = Callable[[Objective, State, Sequence[str]], tuple[State, Tensor, State]]
#: One move on one minibatch: pure, it reads the state and returns what to change.
Move = Callable[[State, Batch, Phase, Gradient], Update]


class LocalMethod(Protocol):
    """What an engine needs of a method."""

    local: LocalTraining
    seed: int

    def phases(self) -> Sequence[Phase]:
        """The phases of a client's training in one round."""
        ...

    def moves(self, phase: Phase) -> Sequence[Move]:
        """The moves made on every minibatch of a phase, one after the other."""
        ...

    def opening(self, phase: Phase) -> Sequence[Move]:
        """The moves made on a client's first minibatch of a phase instead; none if that one is like the others."""
        ...

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Method noise for the steps of one epoch, each tensor of shape (steps, ...)."""
        ...

    def dropout_shapes(self, x: Tensor) -> Mapping[str, tuple[int, ...]]:
        """Noise entries of the net's dropout layers and their shapes without the batch dimension."""
        ...

    @property
    def batch_statistics(self) -> bool:
        """Whether the net normalises over the batch, so that a batch of one cannot be trained on."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """The net's floating precision."""
        ...


@dataclass
class Job:
    """One client's local training in one round.

    Args:
        client: the client.
        state: named tensors it starts from: shared, private and extra entries. Engines never write to them.
    """

    client: int
    state: State


@dataclass
class Result:
    """What local training left behind: the final state, the mean loss over its steps (of none NaN) and their number."""

    state: State
    loss: float
    steps: int
