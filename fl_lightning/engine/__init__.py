"""How a cohort is trained: one client at a time, or stacked; the results agree."""

from fl_lightning.engine.auto import ENGINES, AutoEngine, settled
from fl_lightning.engine.base import Engine
from fl_lightning.engine.captured import CapturedEngine
from fl_lightning.engine.contract import (
    Batch,
    Gradient,
    Job,
    LocalTraining,
    Move,
    Objective,
    Phase,
    Result,
    Update,
)
from fl_lightning.engine.functional import FunctionalNet, entries
from fl_lightning.engine.sequential import SequentialEngine
from fl_lightning.engine.stacked import StackedEngine
from fl_lightning.errors import FederationError

__all__ = [
    "AutoEngine",
    "Batch",
    "CapturedEngine",
    "Engine",
    "FunctionalNet",
    "Gradient",
    "Job",
    "LocalTraining",
    "Move",
    "Objective",
    "Phase",
    "Result",
    "SequentialEngine",
    "StackedEngine",
    "Update",
    "entries",
    "make_engine",
    "settled",
]


def make_engine(name: str, width: int = 16, choice: str | None = None) -> Engine:
    """Make an engine by name.

    Args:
        name: ``auto``, ``sequential``, ``stacked`` or ``captured``.
        width: how many clients are trained together at most.
        choice: what ``auto`` chose earlier, kept by a checkpoint.
    """
    if width < 1:
        raise FederationError(f"clients_per_stack must be 1 or more, not {width}.")
    if name == "auto":
        return AutoEngine(width, choice)
    if name not in ENGINES:
        raise FederationError(f"There is no engine {name!r}: choose auto, {', '.join(ENGINES)}.")
    return ENGINES[name](width)
