"""Checks of constructor options."""

from __future__ import annotations

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
