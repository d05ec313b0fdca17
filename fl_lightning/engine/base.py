"""Interface of engines."""

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
    """Trains clients of one round. All engines give the same results and differ in speed only.

    Args:
        width: maximum number of clients trained together.
    """

    name: str

    def __init__(self, width: int = 16) -> None:
        self.width = width

    @property
    def choice(self) -> str | None:
        """Name of the engine that does the work; None before it is chosen."""
        return self.name

    def choose(self, method: LocalMethod, federation: Federation, jobs: Sequence[Job], round: int) -> Engine:
        """Return the engine that does the work, possibly chosen by a probe of these clients."""
        return self

    def settle(self, choice: str) -> None:  # noqa: B027 - most engines have no choice
        """Use an earlier choice, such as the one in a checkpoint."""

    def reset(self) -> None:  # noqa: B027 - most engines prepare nothing
        """Release what was prepared for a run; called when the next one begins."""

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
            method: defines the local steps.
            federation: the clients' data.
            jobs: the clients and their initial states; at most ``width``.
            round: the round, from 0.
            max_steps: train only the first epoch of every phase, for at most this many steps; None trains fully.

        Returns:
            One result per job, in the order of the jobs.
        """


def epochs_of(phase: Phase, max_steps: int | None) -> int:
    """Return the epochs of a phase: all, or only the first if steps are limited."""
    return phase.epochs if max_steps is None else min(phase.epochs, 1)


def steps_left(phase: Phase, taken: int, max_steps: int | None) -> int:
    """Return the maximum number of steps of an epoch, after ``taken`` steps of the phase."""
    bounds = [MANY if phase.steps is None else phase.steps - taken, MANY if max_steps is None else max_steps]
    return min(bounds)


def steps_of(method: LocalMethod, size: int) -> int:
    """Return the number of steps that a client with ``size`` samples takes in a round."""
    full, rest = batch_sizes(size, method.local.batch_size, method.batch_statistics)
    return sum(min(phase.epochs * (full + (rest > 0)), steps_left(phase, 0, None)) for phase in method.phases())


def moves_of(method: LocalMethod, phase: Phase) -> tuple[list[Move], list[Move]]:
    """Return the moves of a phase's first minibatch and of the others, with gradient clipping if it is set."""
    clip = method.local.clip_norm
    moves = method.moves(phase)
    known = {move: move if clip is None else clipped(move, clip) for move in (*moves, *method.opening(phase))}
    return [known[move] for move in method.opening(phase) or moves], [known[move] for move in moves]
