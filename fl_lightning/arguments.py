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
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.ranges import Range, bounds, ranges

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
    names = dict.fromkeys(name for maker in _makers(kind) for name in _names(maker))
    return [name for name in names if name not in fixed_options(kind)]


def fixed_options(kind: type) -> Mapping[str, str]:
    """The options of its bases that a class has no choice in, and why: its attribute ``fixed``."""
    found: Mapping[str, str] = getattr(kind, "fixed", {})
    return found


def check_names(kind: type, arguments: Mapping[str, Any]) -> None:
    """Refuse a keyword argument that a class does not take, by the name of this class and not of a base."""
    known = parameters(kind)
    open_ended = _passes_on(list(_makers(kind))[-1])  # up to a class that takes whatever it is given
    for name, reason in fixed_options(kind).items():
        if name in arguments:
            raise FederationError(f"{kind.__name__} has no option {name!r}, as {reason}: leave it out.")
    for name in () if open_ended else arguments.keys() - set(known):
        raise FederationError(f"{kind.__name__} has no option {name!r}{hint(name, [kind]) or '.'}")


def hint(name: str, kinds: Sequence[type]) -> str:
    """``; did you mean ...?`` for an option that some classes do not have; it may be one of their settings' options."""
    own = {one: one for kind in kinds for one in parameters(kind) if one != name}
    inner = {f"{place}.{one}": one for kind in kinds for place, s in settings(kind).items() for one in parameters(s)}
    same = [place for place, one in inner.items() if name == one or (len(kinds) == 1 and name.endswith(f"_{one}"))]
    places = {one: place for place, one in inner.items()} | {place: place for place in inner} | own
    near = same or [places[one] for one in difflib.get_close_matches(name, places, n=1)]
    return f"; did you mean {near[0]}?" if near else ""


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
        if name in wanted and value is not wanted[name].default:
            check_range(name, value, wanted[name].annotation)


def check_range(name: str, value: Any, hint: Any) -> None:
    """Refuse numbers outside the range that their type declares, also in lists and dicts.

    Example:
        >>> from fl_lightning.ranges import Count
        >>> check_range("widths", [3, 0], list[Count])
        Traceback (most recent call last):
        fl_lightning.errors.FederationError: widths[1] must be 1 or more, not 0.
    """
    for place, number, range, others in outside(value, hint):
        verb, end = "lie" if range.words.startswith("between") else "be", "" if math.isfinite(number) else " and finite"
        raise FederationError(f"{name}{place} must {verb} {range.words}{end}{others or ','} not {number}.")


def outside(value: Any, hint: Any) -> Iterator[tuple[str, Any, Range, str]]:
    """The numbers outside their ranges: where in the value, which, the range, and the words that would do instead."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        found = [list(outside(value, one)) for one in inner if fits(value, one)]
        if found and all(found):
            words = [word for one in inner if get_origin(one) is Literal for word in get_args(one)]
            place, number, range, _ = found[0][0]
            yield place, number, range, f", or be {', '.join(map(str, words))}," if words else ""
    elif origin is Annotated:
        yield from outside(value, inner[0])
        yield from (("", value, one, "") for one in ranges(hint) if value not in one)
    elif isinstance(value, Mapping) and inner:
        for key, one in value.items():
            yield from ((f"[{key!r}]{rest[0]}", *rest[1:]) for rest in outside(one, inner[-1]))
    elif isinstance(value, list | tuple) and inner:
        hints = inner if origin is tuple and ... not in inner else [inner[0]] * len(value)
        for number, (one, kind) in enumerate(zip(value, hints, strict=False)):
            yield from ((f"[{number}]{rest[0]}", *rest[1:]) for rest in outside(one, kind))


def options(kind: type) -> dict[str, Any]:
    """The types of a class's options by name, those of its bases that it passes on to included."""
    found = {name: one.annotation for maker in reversed(list(_makers(kind))) for name, one in _types(maker).items()}
    return {name: found[name] for name in parameters(kind) if name in found}


def settings(kind: type) -> dict[str, type[Settings]]:
    """The options of a class that are settings, which have options themselves."""
    return {n: one for n, one in options(kind).items() if isinstance(one, type) and issubclass(one, Settings)}


def limits(kind: type) -> dict[str, str]:
    """The ranges of a class's options in words, where they have one; those of settings under ``posterior.temperature``.

    Example:
        >>> from fl_lightning.schedules import Step
        >>> limits(Step)
        {'every': '1 or more'}
    """
    found = {name: bounds(one) for name, one in options(kind).items()}
    inner = {f"{n}.{name}": words for n, one in settings(kind).items() for name, words in limits(one).items()}
    return {name: words for name, words in {**found, **inner}.items() if words}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a plain type: a number, a text, one of a few words, a list or dict of these, a function.

    Of any other type everything is. A whole number is a number, NaN is none.

    Example:
        >>> fits(3, float), fits(0.5, int), fits("a", float | Literal["a"]), fits([1, 0.5], list[int])
        (True, False, True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(value, inner[0])
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if hint in (None, type(None)):
        return value is None
    if origin is Literal:
        return isinstance(value, str | int) and value in inner
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
    if origin is Annotated:
        return in_words(inner[0])
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

    #: Options of its bases that a class has no choice in, and why.
    fixed: ClassVar[Mapping[str, str]] = {}

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


@dataclass(frozen=True)
class Settings(NamedArguments):
    """A few options that are rarely used, as one of a class's options; a subclass is a frozen dataclass with defaults.

    Where a constructor takes one it also takes a dict of its options, as configuration files and checkpoints have it.
    """

    @classmethod
    def of(cls, given: Self | Mapping[str, Any], name: str) -> Self:
        """The settings that were given for an option.

        Args:
            given: themselves, or a dict of their options.
            name: the option's name.
        """
        if isinstance(given, Mapping):
            return cls(**given)
        if not isinstance(given, cls):
            shown = f"{cls.__name__}({', '.join(f'{one}=...' for one in parameters(cls))})"
            raise FederationError(f"{name} must be {shown}, or a dict of these options, not {given!r}.")
        return given


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
