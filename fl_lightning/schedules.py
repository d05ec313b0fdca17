"""Schedules: values that change over the rounds, epochs or steps of a run."""

from __future__ import annotations

import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_lightning.arguments import NamedArguments
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count


class Schedule(NamedArguments, ABC):
    """A function of progress. A subclass stores its constructor arguments under their own names.

    Any callable of the progress, a number from 0 to 1, can be used instead of a schedule.
    """

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """Return the value at ``progress``, the completed share of the run."""

    def at(self, done: int, total: int) -> float:
        """Return the value after ``done`` of ``total`` rounds, epochs or steps."""
        return self(done / max(total, 1))


class Counted(Schedule):
    """A schedule that counts rounds, epochs or steps, independently of their total."""

    def __call__(self, progress: float) -> float:
        """Raise an error: a share does not determine a count."""
        raise FederationError(
            f"{type(self).__name__} counts rounds or steps and cannot depend on a share of the run: use Linear, "
            "Cosine or Sigmoid."
        )

    @abstractmethod
    def at(self, done: int, total: int) -> float:
        """Return the value after ``done`` of ``total`` rounds, epochs or steps."""


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
        """Return the value at ``progress``."""
        return 1 / (1 + math.exp(self.slope * (2 * progress - 1)))


class Constant(Schedule):
    """A constant value.

    Args:
        value: the value.

    Example:
        >>> Constant(0.3)(0.9)
        0.3
    """

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __call__(self, progress: float) -> float:
        """Return the value."""
        return self.value


class Linear(Schedule):
    """Linear interpolation between two values.

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
        """Return the value at ``progress``."""
        return self.start + (self.end - self.start) * progress


class Cosine(Schedule):
    """From 1 to ``end`` along half a cosine, like ``torch.optim.lr_scheduler.CosineAnnealingLR``.

    Args:
        end: the value at progress 1.

    Example:
        >>> [round(Cosine().at(done, 4), 3) for done in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def __init__(self, end: float = 0.0) -> None:
        self.end = end

    def __call__(self, progress: float) -> float:
        """Return the value at ``progress``."""
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * progress)) / 2


class Exponential(Counted):
    """Multiplied by ``gamma`` every time, like ``torch.optim.lr_scheduler.ExponentialLR``.

    Args:
        gamma: the factor.

    Example:
        >>> [Exponential(0.5).at(done, 10) for done in range(4)]
        [1.0, 0.5, 0.25, 0.125]
    """

    def __init__(self, gamma: float = 0.99) -> None:
        self.gamma = gamma

    def at(self, done: int, total: int) -> float:
        """Return the value after ``done`` rounds, epochs or steps."""
        return float(self.gamma**done)


class Step(Counted):
    """Multiplied by ``gamma`` at regular intervals, like ``torch.optim.lr_scheduler.StepLR``.

    Args:
        every: interval in rounds, epochs or steps.
        gamma: the factor.

    Example:
        >>> [Step(2, 0.5).at(done, 10) for done in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    def __init__(self, every: Count, gamma: float = 0.1) -> None:
        self.every, self.gamma = every, gamma

    def at(self, done: int, total: int) -> float:
        """Return the value after ``done`` rounds, epochs or steps."""
        return float(self.gamma ** (done // self.every))


class WarmUp(Counted):
    """A linear increase to 1, like ``torch.optim.lr_scheduler.LinearLR``, followed by another schedule.

    Args:
        length: duration of the increase in rounds, epochs or steps.
        start: the first value.
        then: the schedule that follows, starting at its own beginning; None stays at 1.

    Example:
        >>> [WarmUp(2, 0.5, Linear()).at(done, 6) for done in range(6)]
        [0.5, 0.75, 1.0, 0.75, 0.5, 0.25]
    """

    def __init__(self, length: Count, start: float = 0.1, then: Schedule | None = None) -> None:
        self.length, self.start, self.then = length, start, then

    def at(self, done: int, total: int) -> float:
        """Return the value after ``done`` of ``total`` rounds, epochs or steps."""
        if done < self.length:
            return self.start + (1 - self.start) * done / self.length
        return 1.0 if self.then is None else self.then.at(done - self.length, total - self.length)


class Table(Counted):
    """A list of values, of which the last one is repeated.

    Args:
        values: the values.

    Example:
        >>> [Table([1.0, 0.3]).at(done, 3) for done in range(3)]
        [1.0, 0.3, 0.3]
    """

    def __init__(self, values: Sequence[float]) -> None:
        if not values:
            raise FederationError("A table of values needs at least one.")
        self.values = list(values)

    def at(self, done: int, total: int) -> float:
        """Return the value after ``done`` rounds, epochs or steps."""
        return self.values[min(done, len(self.values) - 1)]


#: A schedule, or any function of progress.
AnySchedule = Schedule | Callable[[float], float]


def value_at(schedule: AnySchedule, done: int, total: int) -> float:
    """Return the value of a schedule or function after ``done`` of ``total`` rounds, epochs or steps."""
    return schedule.at(done, total) if isinstance(schedule, Schedule) else float(schedule(done / max(total, 1)))


def describe(schedule: AnySchedule) -> dict[str, Any] | str:
    """Return class path and arguments as plain values, for a checkpoint, or the import path of a function."""
    if not isinstance(schedule, Schedule):
        named: Any = schedule if hasattr(schedule, "__qualname__") else type(schedule)
        # Instances of other classes cannot be rebuilt; the parentheses keep their path from being imported.
        return f"{named.__module__}.{named.__qualname__}{'' if named is schedule else '()'}"
    kind = type(schedule)
    arguments = {name: describe(v) if isinstance(v, Schedule) else v for name, v in vars(schedule).items()}
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}


def made(schedule: AnySchedule | Mapping[str, Any] | str | None, name: str) -> AnySchedule:
    """Build the schedule that an argument describes; None gives the paper's sigmoid."""
    if schedule is None:
        return Sigmoid()
    if isinstance(schedule, str):
        path = schedule
        try:
            schedule = pkgutil.resolve_name(path)
        except (ValueError, ImportError, AttributeError):
            if "." in path:  # of a checkpoint
                raise FederationError(f"{name} was {path}, which cannot be imported: pass {name}= again.") from None
            raise FederationError(
                f"{name} is no schedule: {path!r}; use one of fl_lightning.schedules, such as Cosine, or the import "
                "path of a function."
            ) from None
    if isinstance(schedule, Mapping):
        kind = pkgutil.resolve_name(schedule["class_path"])
        given = dict(schedule.get("init_args") or {})
        arguments = {k: made(v, name) if isinstance(v, Mapping) else v for k, v in given.items()}
        schedule = kind(**arguments)
    if not callable(schedule):
        raise FederationError(f"{name} must be a schedule or a function of the progress, not {schedule!r}.")
    return schedule
