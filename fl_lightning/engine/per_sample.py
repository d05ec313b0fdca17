"""Differentially private SGD at a client: per-sample gradient clipping and noise on the sum (Abadi et al., 2016)."""

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

#: Prefix of the entries' names in the noise of a step.
PREFIX = "private."


def per_sample(move: Move, bound: float, std: float, dropout: Collection[str] = ()) -> Move:
    """Return the move with the noisy mean of clipped per-sample gradients as its gradient.

    Args:
        move: the method's move on a batch; it is applied to every sample.
        bound: maximum joint norm of a sample's gradients.
        std: standard deviation of the noise on the sum over samples; it scales the standard normal draws in the
            batch's noise under ``private.<entry>``.
        dropout: noise entries that have one value per sample.
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
                    "Private SGD bounds gradients, but this method changes entries in other ways: use a method "
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
    """A method whose clients train with private SGD.

    Args:
        method: the method.
        bound: maximum norm of a sample's gradient.
        noise_multiplier: standard deviation of the noise on the sum over a batch, as a multiple of ``bound``.
        shapes: shapes of the entries that may get a gradient.
        normal: returns a sampler of standard normals in float64 by shape; called for every client and epoch.
    """

    method: LocalMethod
    bound: float
    noise_multiplier: float
    shapes: Mapping[str, Sequence[int]]
    normal: Callable[[], Callable[[Sequence[int]], Tensor]]

    @property
    def local(self) -> LocalTraining:
        """Settings of local training."""
        return self.method.local

    @property
    def seed(self) -> int:
        """Seed of the RNG streams."""
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
        """Return the method's phases."""
        return self.method.phases()

    def moves(self, phase: Phase) -> Sequence[Move]:
        """Return the method's moves with per-sample clipping."""
        return [self._private(move) for move in self.method.moves(phase)]

    def opening(self, phase: Phase) -> Sequence[Move]:
        """Return the method's opening moves with per-sample clipping."""
        return [self._private(move) for move in self.method.opening(phase)]

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Draw the method's noise and the privacy noise."""
        drawn, dtype = self.normal(), self.compute_dtype
        noise = {PREFIX + name: drawn((steps, *shape)).to(dtype) for name, shape in self.shapes.items()}
        return {**self.method.draw_noise(rng, steps), **noise}

    def dropout_shapes(self, x: Tensor) -> Mapping[str, tuple[int, ...]]:
        """Return the noise shapes of the method's dropout layers."""
        shapes = self.method.dropout_shapes(x)
        self._dropout.update(shapes)
        return shapes

    def releases(self) -> int:
        """Return the maximum number of steps of one round that a sample takes part in."""
        return sum(phase.epochs * max(1, len(self.method.moves(phase))) for phase in self.method.phases())

    def __post_init__(self) -> None:
        self._dropout: set[str] = set()
        if self.method.batch_statistics:
            raise FederationError(
                "Private SGD bounds the influence of each sample, but a net that normalises over the batch mixes them: "
                "use GroupNorm instead of BatchNorm."
            )

    def _private(self, move: Move) -> Move:
        return per_sample(move, self.bound, self.noise_multiplier * self.bound, self._dropout)
