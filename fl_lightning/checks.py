"""Checks of constructor options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fl_lightning.errors import FederationError


def one_of(name: str, value: Any, allowed: Sequence[str]) -> Any:
    """The value of an option that must be one of a few words.

    Example:
        >>> one_of("weighting", "samples", ("samples", "uniform"))
        'samples'
    """
    if value not in allowed:
        words = " or ".join([", ".join(allowed[:-1]), allowed[-1]]) if len(allowed) > 1 else allowed[0]
        raise FederationError(f"{name} must be {words}, not {value!r}.")
    return value


def at_least(least: float, **values: float) -> None:
    """Refuse options that are less than a number, infinite or NaN.

    Example:
        >>> at_least(0, mu=0.5)
    """
    for name, value in values.items():
        if not least <= value < math.inf:
            raise FederationError(f"{name} must be {least} or more, not {value}.")


def only(value: str, allowed: str, reason: str, name: str = "weighting") -> None:
    """Refuse every word but one for an option that a method has no choice in.

    Example:
        >>> only("uniform", "uniform", "SCAFFOLD weighs all clients the same")
    """
    if value != allowed:
        raise FederationError(f"{reason}: leave {name} out.")
