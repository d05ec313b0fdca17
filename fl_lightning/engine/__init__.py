"""Engines: train a cohort one client at a time, or stacked, with equal results."""

from fl_lightning import arguments
from fl_lightning.engine.auto import ENGINES, AutoEngine, settled
from fl_lightning.engine.base import Engine
from fl_lightning.engine.captured import CapturedEngine
from fl_lightning.engine.contract import (
    Batch,
    Gradient,
    Job,
    LocalMethod,
    LocalTraining,
    Move,
    Objective,
    Phase,
    Result,
    Update,
)
from fl_lightning.engine.functional import FunctionalNet, entries
from fl_lightning.engine.plan import Plan
from fl_lightning.engine.sequential import SequentialEngine
from fl_lightning.engine.stacked import StackedEngine
from fl_lightning.engine.workers import WorkerEngine
from fl_lightning.errors import FederationError

__all__ = [
    "AutoEngine",
    "Batch",
    "CapturedEngine",
    "Engine",
    "FunctionalNet",
    "Gradient",
    "Job",
    "LocalMethod",
    "LocalTraining",
    "Move",
    "Objective",
    "Phase",
    "Plan",
    "Result",
    "SequentialEngine",
    "StackedEngine",
    "Update",
    "WorkerEngine",
    "entries",
    "make_engine",
    "settled",
]


#: Maximum number of processes; larger numbers are taken for a typing error.
MOST_WORKERS = 256


def make_engine(name: str, width: int = 16, workers: int = 1, timeout: float | None = None) -> Engine:
    """Make an engine by name.

    Args:
        name: ``auto``, ``sequential``, ``stacked`` or ``captured``.
        width: maximum number of clients trained together.
        workers: number of processes among which clients are divided.
        timeout: seconds without a local step after which a worker counts as hung; None takes ``FL_LIGHTNING_TIMEOUT``.
    """
    arguments.whole("clients_per_stack", width, 1)
    arguments.whole("workers", workers, 1, MOST_WORKERS)
    if timeout is not None and not timeout > 0:
        raise FederationError(f"timeout must be a number of seconds greater than 0, not {timeout}.")
    if name != "auto" and name not in ENGINES:
        raise FederationError(f"There is no engine {name!r}: choose auto, {', '.join(ENGINES)}.")
    engine = AutoEngine(width) if name == "auto" else ENGINES[name](width)
    return engine if workers == 1 else WorkerEngine(engine, workers, timeout)
