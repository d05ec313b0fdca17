"""Ranges of constructor options, declared in their annotations: ``mu: NonNegative = 0.01``.

A range is part of a type: ``Annotated[float, AtLeast(0)]``, or one of the names below. Type checkers see the plain
type. From the declaration follow the check before the constructor runs (:mod:`fl_lightning.arguments`), what ``--help``
says of the option, and the table on the method's page.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Range:
    """Numbers from one to another, which are themselves among them unless they are said not to be.

    Args:
        least: the least.
        most: the largest.
        above: whether ``least`` itself is left out.
        below: whether ``most`` itself is left out.

    Example:
        >>> Range(0, 1, below=True).words, 0 in Range(0, 1), 1 in Range(0, 1, below=True)
        ('at least 0 and below 1', True, False)
    """

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: Any) -> bool:
        """Whether a number is one of them; infinity and NaN never are."""
        low = value > self.least if self.above else value >= self.least
        high = value < self.most if self.below else value <= self.most
        return bool(math.isfinite(value) and low and high)

    @property
    def words(self) -> str:
        """The range as a sentence has it after "must be"."""
        least, most = f"{self.least:,}", f"{self.most:,}"
        if self.most == math.inf:
            return f"greater than {least}" if self.above else f"{least} or more"
        end = f"below {most}" if self.below else f"at most {most}"
        if self.least == -math.inf:
            return end
        if not self.above and not self.below:
            return f"between {least} and {most}"
        return f"{'greater than' if self.above else 'at least'} {least} and {end}"


def AtLeast(least: float) -> Range:  # noqa: N802 - reads as a type
    """A number and all above it."""
    return Range(least)


def Above(least: float) -> Range:  # noqa: N802
    """All above a number."""
    return Range(least, above=True)


def AtMost(most: float) -> Range:  # noqa: N802
    """A number and all below it."""
    return Range(most=most)


def Between(least: float, most: float) -> Range:  # noqa: N802
    """Two numbers and all between them."""
    return Range(least, most)


NonNegative = Annotated[float, AtLeast(0)]
Positive = Annotated[float, Above(0)]
#: 0, 1 and what lies between.
Share = Annotated[float, Between(0, 1)]
#: As a share, but not 0.
PositiveShare = Annotated[float, Range(0, 1, above=True)]
#: As a share, but not 1: momentum, dropout.
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]
#: As a share, but neither 0 nor 1.
Part = Annotated[float, Range(0, 1, above=True, below=True)]
Count = Annotated[int, AtLeast(1)]
#: One sample to train on and one for testing, at least.
TwoOrMore = Annotated[int, AtLeast(2)]
CountOrZero = Annotated[int, AtLeast(0)]
#: Of epochs in a round, or samples in a batch; more of them are a slip.
CountUpToAMillion = Annotated[Count, AtMost(1_000_000)]


def plain(hint: Any) -> Any:
    """A type without its ranges.

    Example:
        >>> plain(Count), plain(float)
        (<class 'int'>, <class 'float'>)
    """
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def ranges(hint: Any) -> list[Range]:
    """The ranges of an annotated type itself, not those of its parts."""
    return [one for one in get_args(hint)[1:] if isinstance(one, Range)] if get_origin(hint) is Annotated else []


def allowed(hint: Any) -> str:
    """The values that an option takes, where its type says more than a plain one: ranges and words.

    Example:
        >>> allowed(Share | Literal["auto"]), allowed(list[Count] | None), allowed(float)
        ('between 0 and 1, or auto', 'each 1 or more', '')
    """
    return ", or ".join(_allowed(hint, words=True))


def bounds(hint: Any) -> str:
    """The ranges among the values that an option takes, without words, which a command's help names already.

    Example:
        >>> bounds(Share | Literal["auto"]), bounds(Literal["a", "b"])
        ('between 0 and 1', '')
    """
    return ", or ".join(_allowed(hint, words=False))


def _allowed(hint: Any, words: bool) -> Iterator[str]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield ", ".join([*_allowed(inner[0], words), *(one.words for one in ranges(hint))])
    elif origin in (Union, types.UnionType):
        for one in inner:
            yield from _allowed(one, words)
    elif origin is Literal:
        if words:
            yield ", ".join(map(str, inner))
    elif inner and origin is not types.NoneType:
        parts = inner[-1:] if origin is dict else inner
        said = dict.fromkeys(text for one in parts if one is not ... for text in _allowed(one, words))
        if said and isinstance(origin, type) and origin.__module__ in ("builtins", "collections.abc"):
            yield f"each {' or '.join(said)}"
