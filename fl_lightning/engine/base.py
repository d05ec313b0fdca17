"""The engine's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fl_lightning.engine.contract import Job, LocalMethod, Move, Phase, Result
from fl_lightning.engine.gradient import clipped
from fl_lightning.engine.schedule import batch_sizes
from fl_lightning.federation import Federation

#: More steps than any epoch has.
MANY = 2**63


class Engine(ABC):
    """Trains clients of one round. All engines give the same result; they differ in speed.

    Args:
        width: how many clients are trained together at most.
    """

    name: str

    def __init__(self, width: int = 16) -> None:
        self.width = width

    @property
    def choice(self) -> str | None:
        """The engine that does the work; None while that is open."""
        return self.name

    def choose(self, method: LocalMethod, federation: Federation, jobs: Sequence[Job], round: int) -> Engine:
        """The engine that does the work, which may be found by a probe of these clients."""
        return self

    def settle(self, choice: str) -> None:  # noqa: B027 - most engines leave nothing open
        """Take a choice that was made earlier, such as by the run that wrote a checkpoint."""

    def reset(self) -> None:  # noqa: B027 - most engines have nothing to forget
        """Forget what was prepared for a run; called when the next one begins."""

    @abstractmethod
    def train(
        self,
        method: LocalMethod,
        federation: Federation,
        jobs: Sequence[Job],
        round: int,
        max_steps: int | None = None,
    ) -> list[Result]:
        """Train every job's client from its state.

        Args:
            method: what a local step is.
            federation: the clients' data.
            jobs: the clients and the states they start from; at most ``width``.
            round: the round, from 0.
            max_steps: only the first epoch of every phase and at most this many steps of it; None runs all.

        Returns:
            One result per job, in the order of the jobs.
        """


def epochs_of(phase: Phase, max_steps: int | None) -> int:
    """Epochs of a phase: all, or just the first when steps are limited."""
    return phase.epochs if max_steps is None else min(phase.epochs, 1)


def steps_left(phase: Phase, taken: int, max_steps: int | None) -> int:
    """How many steps of an epoch a client takes at most, after so many that it took in the phase."""
    bounds = [MANY if phase.steps is None else phase.steps - taken, MANY if max_steps is None else max_steps]
    return min(bounds)


def steps_of(method: LocalMethod, size: int) -> int:
    """How many steps a client of so many samples takes in a round."""
    full, rest = batch_sizes(size, method.local.batch_size, method.batch_statistics)
    return sum(min(phase.epochs * (full + (rest > 0)), steps_left(phase, 0, None)) for phase in method.phases())


def moves_of(method: LocalMethod, phase: Phase) -> tuple[list[Move], list[Move]]:
    """The moves of a phase's first minibatch and of the others, with the clipping that the local training asks for."""
    clip = method.local.clip_norm
    moves = method.moves(phase)
    known = {move: move if clip is None else clipped(move, clip) for move in (*moves, *method.opening(phase))}
    return [known[move] for move in method.opening(phase) or moves], [known[move] for move in moves]
