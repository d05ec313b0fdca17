"""Differentially private SGD at a client: every sample's gradient bounded, noise on their sum (Abadi et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.engine.contract import Batch, Gradient, LocalMethod, LocalTraining, Move, Phase, Update
from fl_lightning.engine.gradient import functional_gradient
from fl_lightning.errors import FederationError
from fl_lightning.wire import State

#: Before the names of entries in the noise of a step.
PREFIX = "private."


def per_sample(move: Move, bound: float, std: float, dropout: Collection[str] = ()) -> Move:
    """The move with the mean of bounded gradients of single samples, and noise, for its gradient.

    Args:
        move: as a method makes it on a batch; it is made on every sample of the batch.
        bound: largest joint norm of a sample's gradients.
        std: standard deviation of the noise on the sum over samples; it is multiplied with the standard normal draws
            that a batch's noise holds under ``private.<entry>``.
        dropout: noise entries that hold one value for each sample.
    """

    def step(state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        own = {name: value for name, value in batch.noise.items() if name in dropout}
        rest = {n: v for n, v in batch.noise.items() if n not in own and not n.startswith(PREFIX)}

        def one(x: Tensor, y: Tensor, drawn: State) -> tuple[State, Tensor]:
            noise = rest | {name: value[None] for name, value in drawn.items()}
            single = batch._replace(x=x[None], y=y[None], noise=noise)
            update = move(state, single, phase, functional_gradient)
            if update.add or update.replace:
                raise FederationError(
                    "Private SGD bounds gradients, but this method changes entries by something else: use a method "
                    "that trains by gradients alone."
                )
            norm = torch.stack([g.pow(2).sum() for g in update.grads.values()]).sum().sqrt()
            scale = (bound / norm.clamp(min=1e-12)).clamp(max=1.0)
            return {name: scale * g for name, g in update.grads.items()}, update.loss

        grads, losses = torch.func.vmap(one)(batch.x, batch.y, own)
        size = len(batch.x)
        noisy = {n: (g.sum(0) + std * batch.noise[PREFIX + n]) / size for n, g in grads.items()}
        return Update(losses.mean(), noisy)

    return step


@dataclass
class PrivateSGD:
    """A method whose clients train by private SGD.

    Args:
        method: the method.
        bound: largest norm of a sample's gradient.
        noise_multiplier: standard deviation of the noise on the sum over a batch, as a multiple of ``bound``.
        shapes: shapes of the entries that may get a gradient.
        normal: draws standard normals in float64 of a shape; a new one for every client and epoch.
    """

    method: LocalMethod
    bound: float
    noise_multiplier: float
    shapes: Mapping[str, Sequence[int]]
    normal: Callable[[], Callable[[Sequence[int]], Tensor]]

    @property
    def local(self) -> LocalTraining:
        """How a client trains."""
        return self.method.local

    @property
    def seed(self) -> int:
        """The seed of its streams."""
        return self.method.seed

    @property
    def batch_statistics(self) -> bool:
        """Whether the net normalises over the batch."""
        return self.method.batch_statistics

    @property
    def compute_dtype(self) -> torch.dtype:
        """The net's floating precision."""
        return self.method.compute_dtype

    def phases(self) -> Sequence[Phase]:
        """The method's phases."""
        return self.method.phases()

    def moves(self, phase: Phase) -> Sequence[Move]:
        """The method's moves, sample by sample."""
        return [self._private(move) for move in self.method.moves(phase)]

    def opening(self, phase: Phase) -> Sequence[Move]:
        """The method's opening, sample by sample."""
        return [self._private(move) for move in self.method.opening(phase)]

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """The method's noise and that which protects."""
        drawn, dtype = self.normal(), self.compute_dtype
        noise = {PREFIX + name: drawn((steps, *shape)).to(dtype) for name, shape in self.shapes.items()}
        return {**self.method.draw_noise(rng, steps), **noise}

    def dropout_shapes(self, x: Tensor) -> Mapping[str, tuple[int, ...]]:
        """The method's dropout layers."""
        shapes = self.method.dropout_shapes(x)
        self._dropout.update(shapes)
        return shapes

    def releases(self) -> int:
        """How often a sample takes part in a step of one round, at most."""
        return sum(phase.epochs * max(1, len(self.method.moves(phase))) for phase in self.method.phases())

    def __post_init__(self) -> None:
        self._dropout: set[str] = set()
        if self.method.batch_statistics:
            raise FederationError(
                "Private SGD bounds what each sample does, but a net that normalises over the batch mixes them: use "
                "GroupNorm in place of BatchNorm."
            )

    def _private(self, move: Move) -> Move:
        return per_sample(move, self.bound, self.noise_multiplier * self.bound, self._dropout)
