"""Validation of a client's message: a pure function that trusts none of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Shape and dtype of every entry by name.
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
#: Maximum number of names in an error, and of characters per name.
NAMES, CHARACTERS = 5, 60
#: More samples than any client has.
MANY = 10**15


def layout_of(state: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the layout of the given entries.

    Example:
        >>> layout_of({"fc.bias": torch.zeros(3)})
        {'fc.bias': ((3,), torch.float32)}
    """
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}


def check_message(expected: Layout, message: Any, samples: Any, introduced: int) -> str | None:
    """Return what is wrong with a client's message, or None if it is valid.

    Only methods of plain tensors are called, so a malicious object cannot run code here; nothing is raised.

    Args:
        expected: shape and dtype of every requested entry.
        message: the client's entries, by name.
        samples: the number of training samples that the client reports.
        introduced: the number that it reported when it joined.

    Example:
        >>> check_message({"w": ((2,), torch.float32)}, {"w": torch.tensor([1.0, float("nan")])}, 5, 5)
        'its entry w is not finite'
    """
    return _wrong_names(expected, message) or _wrong_entry(expected, message) or _wrong_samples(samples, introduced)


def _wrong_names(expected: Layout, message: Any) -> str | None:
    if type(message) is not dict:
        return f"it is of type {type(message).__name__}, not a dict of tensors by name"
    strange = [name for name in message if type(name) is not str]
    if strange:
        return f"it has a name of type {type(strange[0]).__name__}"
    missing, extra = expected.keys() - message.keys(), message.keys() - expected.keys()
    if missing:
        return f"it lacks {_listed(missing)}"
    return f"it has {_listed(extra)}, which was not requested" if extra else None


def _wrong_entry(expected: Layout, message: dict[str, Any]) -> str | None:
    for name, (shape, dtype) in expected.items():
        wrong = _wrong_tensor(message[name], shape, dtype)
        if wrong is not None:
            return f"its entry {_short(name)} {wrong}"
    return None


def _wrong_tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    if type(value) is not Tensor:  # a subclass may override anything
        return f"is of type {type(value).__name__}, not a tensor"
    if value.layout != torch.strided or value.device.type == "meta":
        return "is not a dense tensor with values"
    if value.dtype != dtype:
        return f"is {_plain(value.dtype)}, not {_plain(dtype)}"
    if tuple(value.shape) != shape:
        return f"has shape {tuple(value.shape)}, not {shape}"
    if not bool(value.isfinite().all()):
        return "is not finite"
    return None


def _wrong_samples(samples: Any, introduced: int) -> str | None:
    if type(samples) is not int:
        return f"its number of samples is {samples if type(samples) is float else 'no number'}, not a whole number"
    if samples == introduced and samples > 0:
        return None
    said = samples if abs(samples) < MANY else "far too many"  # Python refuses to print very large integers
    return f"it reports {said} samples but joined with {introduced}"


def _listed(names: Any) -> str:
    shown = ", ".join(map(_short, sorted(names)[:NAMES]))
    return f"{shown} and {len(names) - NAMES} more" if len(names) > NAMES else shown


def _short(text: str) -> str:
    """Return a text as one line that is safe to print."""
    plain = "".join(c if c.isprintable() else "?" for c in text[: CHARACTERS + 1])
    return plain if len(plain) <= CHARACTERS else f"{plain[:CHARACTERS]}..."


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
