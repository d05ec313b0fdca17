"""Schedules: numbers that follow the run's progress from 0 (nothing trained) to 1 (the last round)."""

from __future__ import annotations

import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from fl_lightning.errors import FederationError


class Schedule(ABC):
    """A function of progress. A subclass keeps its constructor arguments under their own names.

    Any callable that takes the progress as a number may stand in the place of a schedule.
    """

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """The value at ``progress``, the share of all rounds that the present one completes."""


class Sigmoid(Schedule):
    """1 / (1 + exp(slope (2 progress - 1))): falls from near 1 to near 0 and is 1/2 half way (Eq. 4 of WAFFLE).

    Args:
        slope: how steeply it falls; the paper's delta Omega.

    Example:
        >>> [round(Sigmoid()(r / 100), 4) for r in (1, 50, 94)]
        [0.9584, 0.5, 0.0565]
    """

    def __init__(self, slope: float = 3.2) -> None:
        self.slope = slope

    def __call__(self, progress: float) -> float:
        """The value at ``progress``."""
        return 1 / (1 + math.exp(self.slope * (2 * progress - 1)))


class Constant(Schedule):
    """Always the same.

    Args:
        value: the value.

    Example:
        >>> Constant(0.3)(0.9)
        0.3
    """

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __call__(self, progress: float) -> float:
        """The value."""
        return self.value


class Linear(Schedule):
    """From one value to another at a steady rate.

    Args:
        start: the value at progress 0.
        end: the value at progress 1.

    Example:
        >>> Linear(1.0, 0.0)(0.25)
        0.75
    """

    def __init__(self, start: float = 1.0, end: float = 0.0) -> None:
        self.start, self.end = start, end

    def __call__(self, progress: float) -> float:
        """The value at ``progress``."""
        return self.start + (self.end - self.start) * progress


#: A schedule, or any function of progress.
AnySchedule = Schedule | Callable[[float], float]


def describe(schedule: AnySchedule) -> dict[str, Any] | str:
    """Class path and arguments in plain values, for a checkpoint; the import path of a function."""
    if not isinstance(schedule, Schedule):
        named: Any = schedule if hasattr(schedule, "__qualname__") else type(schedule)
        # An object of a class that is no Schedule cannot be made again: its path leads nowhere.
        return f"{named.__module__}.{named.__qualname__}{'' if named is schedule else '()'}"
    kind = type(schedule)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": dict(vars(schedule))}


def made(schedule: AnySchedule | Mapping[str, Any] | str | None, name: str) -> AnySchedule:
    """The schedule that an argument stands for: itself, what a description describes, the paper's sigmoid for None."""
    if schedule is None:
        return Sigmoid()
    if isinstance(schedule, str):
        try:
            schedule = pkgutil.resolve_name(schedule)
        except (ValueError, ImportError, AttributeError):
            raise FederationError(f"{name} was {schedule}, which cannot be imported: pass {name}= again.") from None
    if isinstance(schedule, Mapping):
        kind = pkgutil.resolve_name(schedule["class_path"])
        schedule = kind(**(schedule.get("init_args") or {}))
    if not callable(schedule):
        raise FederationError(f"{name} must be a schedule or a function of the progress, not {schedule!r}.")
    return schedule
