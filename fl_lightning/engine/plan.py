"""A method's local training with different phases, settings or streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.engine.contract import LocalMethod, LocalTraining, Move, Phase
from fl_lightning.wire import State


class Plan:
    """A method's moves in other phases or with other settings; everything not given is the method's.

    Args:
        method: the method.
        phases: the phases; None means the method's.
        local: settings of local training; None means the method's.
        purpose: name of separate RNG streams for this plan; None uses the method's.
    """

    def __init__(
        self,
        method: LocalMethod,
        phases: Sequence[Phase] | None = None,
        local: LocalTraining | None = None,
        purpose: str | None = None,
    ) -> None:
        self.method = method
        self.own_phases = phases
        self.local = method.local if local is None else local
        own = purpose is not None
        self.seed = int(seeding.stream(method.seed, str(purpose)).integers(2**31)) if own else method.seed

    @property
    def batch_statistics(self) -> bool:
        """Whether the net normalises over the batch."""
        return self.method.batch_statistics

    @property
    def compute_dtype(self) -> torch.dtype:
        """The net's floating precision."""
        return self.method.compute_dtype

    def phases(self) -> Sequence[Phase]:
        """Return the plan's phases."""
        return self.method.phases() if self.own_phases is None else self.own_phases

    def moves(self, phase: Phase) -> Sequence[Move]:
        """Return the method's moves."""
        return self.method.moves(phase)

    def opening(self, phase: Phase) -> Sequence[Move]:
        """Return the method's moves on a first minibatch."""
        return self.method.opening(phase)

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Draw the method's noise."""
        return self.method.draw_noise(rng, steps)

    def dropout_shapes(self, x: Tensor) -> Mapping[str, tuple[int, ...]]:
        """Return the noise shapes of the net's dropout layers."""
        return self.method.dropout_shapes(x)

    def for_worker(self) -> Any:
        """Return the method as worker processes get it; phases, settings and seed are sent with every task."""
        return self.method.for_worker()  # type: ignore[attr-defined]
