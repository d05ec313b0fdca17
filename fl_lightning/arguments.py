"""Checks of arguments at the boundary: types, ranges, names, and arrays that become tensors."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import FederationError

#: Characters of a value that a sentence shows.
SHOWN = 60


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether a value is a number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


#: Types that a value is of or not, and what a sentence calls them.
PLAIN: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: is_whole,
    float: is_real,
    str: lambda value: isinstance(value, str | os.PathLike),
}
WORDS: dict[Any, str] = {
    None: "None",
    type(None): "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
}


def whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse everything that is not a whole number from ``least`` to ``most``."""
    if not is_whole(value):
        raise FederationError(f"{name} must be a whole number, not {value!r}.")
    number = int(value)
    if number < least or (most is not None and number > most):
        bounds = f"{least} or more" if most is None or number < least else f"at most {most:,}"
        raise FederationError(f"{name} must be {bounds}, not {value}.")


def real(name: str, value: Any) -> None:
    """Refuse everything that is not a number."""
    if not is_real(value):
        raise FederationError(f"{name} must be a number, not {value!r}.")


def tensor(name: str, value: Any) -> Tensor:
    """A tensor of what is one, a NumPy array, a data frame or a nested list."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex():
            raise FederationError(f"{name} must be a dense tensor of real numbers: call its to_dense() or real.")
        return value.detach() if value.requires_grad else value
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


def check_types(kind: type, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse arguments that are not of the type that the constructor says, where it says a plain one.

    Args:
        kind: the class.
        given: the constructor's arguments by place.
        named: the constructor's arguments by name.
    """
    makers = list(_makers(kind))
    wanted = {name: type for maker in reversed(makers) for name, type in _types(maker).items()}
    for name, value in {**dict(zip(_names(makers[0]), given, strict=False)), **named}.items():
        if name in wanted and value is not wanted[name].default and not fits(value, wanted[name].annotation):
            shown = repr(value) if len(repr(value)) <= SHOWN else f"a {type(value).__name__}"
            raise FederationError(f"{name} must be {in_words(wanted[name].annotation)}, not {shown}.")


def check_sizes(kind: type, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse sizes of a net below 0, where the default is not, and a dropout that is no part."""
    maker = next(_makers(kind))
    for name, value in {**dict(zip(_names(maker), given, strict=False)), **named}.items():
        one = _types(maker).get(name)
        if one is None or not is_real(value):
            continue
        if one.annotation is int and value < 0 and (one.default is one.empty or one.default >= 0):
            raise FederationError(f"{name} must be 0 or more, not {value}.")
        if name == "dropout" and not 0 <= value < 1:
            raise FederationError(f"dropout must be at least 0 and below 1, not {value}.")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a plain type: a number, a text, one of a few words, a list or dict of these, a function.

    Of any other type everything is. A whole number is a number, NaN is none.

    Example:
        >>> fits(3, float), fits(0.5, int), fits("a", float | Literal["a"]), fits([1, 0.5], list[int])
        (True, False, True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if hint in (None, type(None)):
        return value is None
    if origin is Literal:  # of one word alone the class says why there is no other
        return isinstance(value, str | int) and (value in inner or len(inner) == 1)
    if hint in PLAIN:
        return PLAIN[hint](value)
    kind = origin or hint
    if kind is Callable:
        return callable(value)
    if not isinstance(kind, type) or kind.__module__ not in ("builtins", "collections.abc"):
        return True
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if not issubclass(kind, Collection):
        return True
    if kind is tuple and inner and ... not in inner:  # of so many things
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if isinstance(value, list | tuple) and inner:
        return all(fits(one, inner[0]) for one in value)
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping)


def in_words(hint: Any) -> str:
    """A type as a sentence names it.

    Example:
        >>> in_words(float | None), in_words(Literal["a", "b", "c"]), in_words(list[int])
        ('a number or None', 'a, b or c', 'a list')
    """
    if hint in WORDS:
        return WORDS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType, Literal):
        words = [*dict.fromkeys(str(one) if origin is Literal else in_words(one) for one in inner)]
        return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    kind = origin or hint
    if kind is Callable:
        return "a function"
    return "a dict" if issubclass(kind, Mapping) else "a list"


class NamedArguments:
    """A base of classes that refuse in a sentence of their own what their constructors do not take.

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
        check_types(cls, given, named)


def _makers(kind: type) -> Iterator[Any]:
    """The constructors that see a call's keyword arguments."""
    for part in kind.__mro__:
        if "__init__" in vars(part):
            maker = vars(part)["__init__"]
            yield maker
            if not _passes_on(maker):
                return


@functools.cache
def _types(maker: Any) -> dict[str, inspect.Parameter]:
    """A constructor's parameters whose types it says, as types where they were written as texts."""
    space, found = getattr(inspect.unwrap(maker), "__globals__", {}), {}
    for name, one in inspect.signature(maker).parameters.items():
        hint = one.annotation
        if isinstance(hint, str):
            try:
                hint = eval(hint, space)
            except Exception:  # a name that only type checkers see
                continue
        if hint is not one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            found[name] = one.replace(annotation=hint)
    return found


def _names(maker: Any) -> list[str]:
    found = inspect.signature(maker).parameters.values()
    return [one.name for one in found if one.name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def _passes_on(maker: Any) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(maker).parameters.values())
