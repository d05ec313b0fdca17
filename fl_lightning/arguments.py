"""Checks of arguments at the boundary: types, ranges, names, and arrays that become tensors."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import FederationError


def whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse everything that is not a whole number from ``least`` to ``most``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise FederationError(f"{name} must be a whole number, not {value!r}.")
    number = int(value)
    if number < least or (most is not None and number > most):
        bounds = f"{least} or more" if most is None or number < least else f"at most {most:,}"
        raise FederationError(f"{name} must be {bounds}, not {value}.")


def real(name: str, value: Any) -> None:
    """Refuse everything that is not a number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise FederationError(f"{name} must be a number, not {value!r}.")


def tensor(name: str, value: Any) -> Tensor:
    """A tensor of what is one, a NumPy array, a data frame or a nested list."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"its type is {array.dtype}")
        return torch.from_numpy(np.require(array, requirements=("C", "W")))
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise FederationError(f"{name} must be a tensor or an array of numbers ({reason}).") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?``, or nothing where nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parameters(kind: type) -> list[str]:
    """Names of a class's constructor arguments, those that it passes on to its bases included."""
    return list(dict.fromkeys(name for maker in _makers(kind) for name in _names(maker)))


def check_names(kind: type, arguments: Mapping[str, Any]) -> None:
    """Refuse a keyword argument that a class does not take, by the name of this class and not of a base."""
    known = parameters(kind)
    open_ended = _passes_on(list(_makers(kind))[-1])  # up to a class that takes whatever it is given
    for name in () if open_ended else arguments.keys() - set(known):
        raise FederationError(f"{kind.__name__} has no option {name!r}{nearest(name, known) or '.'}")


class NamedArguments:
    """A base of classes that refuse a keyword argument which they do not take in a sentence of their own.

    It has no ``__init__``: what reads constructors, as the command line does, passes it by.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the names; copying and unpickling come here without arguments."""
        if args or kwargs:
            cls.check_arguments(args, kwargs)
        return super().__new__(cls)

    @classmethod
    def check_arguments(cls, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Refuse a constructor's arguments, by place and by name, before it is called."""
        check_names(cls, named)


def _makers(kind: type) -> Iterator[Any]:
    """The constructors that see a call's keyword arguments."""
    for part in kind.__mro__:
        if "__init__" in vars(part):
            maker = vars(part)["__init__"]
            yield maker
            if not _passes_on(maker):
                return


def _names(maker: Any) -> list[str]:
    found = inspect.signature(maker).parameters.values()
    return [one.name for one in found if one.name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def _passes_on(maker: Any) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(maker).parameters.values())
