"""Schedules: numbers that follow a run, from its first round, epoch or step to its last."""

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
    """A function of progress. A subclass keeps its constructor arguments under their own names.

    Any callable that takes the progress, a number from 0 to 1, may be used instead of a schedule.
    """

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """The value at ``progress``, the share that is done."""

    def at(self, done: int, total: int) -> float:
        """The value when ``done`` of ``total`` rounds, epochs or steps are done."""
        return self(done / max(total, 1))


class Counted(Schedule):
    """A schedule that counts rounds, epochs or steps, whatever their total."""

    def __call__(self, progress: float) -> float:
        """Refuse: a share tells no count."""
        raise FederationError(
            f"{type(self).__name__} counts rounds or steps and cannot follow a share of the run: use Linear, Cosine or "
            "Sigmoid."
        )

    @abstractmethod
    def at(self, done: int, total: int) -> float:
        """The value when ``done`` of ``total`` rounds, epochs or steps are done."""


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


class Cosine(Schedule):
    """From 1 to ``end`` along half a cosine, as ``torch.optim.lr_scheduler.CosineAnnealingLR``.

    Args:
        end: the value at progress 1.

    Example:
        >>> [round(Cosine().at(done, 4), 3) for done in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def __init__(self, end: float = 0.0) -> None:
        self.end = end

    def __call__(self, progress: float) -> float:
        """The value at ``progress``."""
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * progress)) / 2


class Exponential(Counted):
    """Multiplied by ``gamma`` every time, as ``torch.optim.lr_scheduler.ExponentialLR``.

    Args:
        gamma: the factor.

    Example:
        >>> [Exponential(0.5).at(done, 10) for done in range(4)]
        [1.0, 0.5, 0.25, 0.125]
    """

    def __init__(self, gamma: float = 0.99) -> None:
        self.gamma = gamma

    def at(self, done: int, total: int) -> float:
        """The value when ``done`` are done."""
        return float(self.gamma**done)


class Step(Counted):
    """Multiplied by ``gamma`` after every so many, as ``torch.optim.lr_scheduler.StepLR``.

    Args:
        every: how many rounds, epochs or steps lie between two falls.
        gamma: the factor.

    Example:
        >>> [Step(2, 0.5).at(done, 10) for done in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    def __init__(self, every: Count, gamma: float = 0.1) -> None:
        self.every, self.gamma = every, gamma

    def at(self, done: int, total: int) -> float:
        """The value when ``done`` are done."""
        return float(self.gamma ** (done // self.every))


class WarmUp(Counted):
    """A steady rise to 1, as ``torch.optim.lr_scheduler.LinearLR``, then another schedule.

    Args:
        length: how many rounds, epochs or steps it takes.
        start: the first value.
        then: what follows, as if it began there; None stays at 1.

    Example:
        >>> [WarmUp(2, 0.5, Linear()).at(done, 6) for done in range(6)]
        [0.5, 0.75, 1.0, 0.75, 0.5, 0.25]
    """

    def __init__(self, length: Count, start: float = 0.1, then: Schedule | None = None) -> None:
        self.length, self.start, self.then = length, start, then

    def at(self, done: int, total: int) -> float:
        """The value when ``done`` of ``total`` are done."""
        if done < self.length:
            return self.start + (1 - self.start) * done / self.length
        return 1.0 if self.then is None else self.then.at(done - self.length, total - self.length)


class Table(Counted):
    """Values one after the other; the last one stays.

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
        """The value when ``done`` are done."""
        return self.values[min(done, len(self.values) - 1)]


#: A schedule, or any function of progress.
AnySchedule = Schedule | Callable[[float], float]


def value_at(schedule: AnySchedule, done: int, total: int) -> float:
    """The value of a schedule, or of a function of progress, when ``done`` of ``total`` are done."""
    return schedule.at(done, total) if isinstance(schedule, Schedule) else float(schedule(done / max(total, 1)))


def describe(schedule: AnySchedule) -> dict[str, Any] | str:
    """Class path and arguments in plain values, for a checkpoint; the import path of a function."""
    if not isinstance(schedule, Schedule):
        named: Any = schedule if hasattr(schedule, "__qualname__") else type(schedule)
        # An object of a class that is no Schedule cannot be made again: its path leads nowhere.
        return f"{named.__module__}.{named.__qualname__}{'' if named is schedule else '()'}"
    kind = type(schedule)
    arguments = {name: describe(v) if isinstance(v, Schedule) else v for name, v in vars(schedule).items()}
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}


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
        given = dict(schedule.get("init_args") or {})
        arguments = {k: made(v, name) if isinstance(v, Mapping) else v for k, v in given.items()}
        schedule = kind(**arguments)
    if not callable(schedule):
        raise FederationError(f"{name} must be a schedule or a function of the progress, not {schedule!r}.")
    return schedule
