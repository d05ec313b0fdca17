"""Messages between server and site as bytes: safetensors with a header of plain values.

A tensor that occurs in several parts, such as the model to evaluate and to train from, is sent once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fl_lightning.errors import FederationError
from fl_lightning.wire import State

#: Version of the format; both sides must have the same.
FORMAT = 1
#: Size in bytes of the length field of a safetensors header.
LENGTH = 8


class Envelope(NamedTuple):
    """A message: a header of plain values, and named tensors in parts."""

    header: dict[str, Any]
    parts: dict[str, State]


def checksum(state: State) -> str:
    """Return a checksum of names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if value.numel():
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def seal(header: Mapping[str, Any], parts: Mapping[str, State]) -> bytes:
    """Serialise a message.

    Args:
        header: any value that JSON supports.
        parts: named tensors by the name of their part.
    """
    stored: State = {}
    places: dict[tuple[Any, ...], str] = {}
    table: dict[str, dict[str, str]] = {}
    for part, tensors in parts.items():
        table[part] = {}
        for name, value in tensors.items():
            found = value.detach()
            key = (found.data_ptr(), found.shape, found.stride(), found.dtype) if found.numel() else (part, name)
            if key not in places:
                places[key] = str(len(stored))
                stored[places[key]] = found.cpu().clone(memory_format=torch.contiguous_format)
            table[part][name] = places[key]
    text = json.dumps({"format": FORMAT, "header": header, "parts": table}, allow_nan=True)
    return save(stored, metadata={"fl_lightning": text})


def unseal(data: bytes) -> Envelope:
    """Deserialise a message; raise an error if it is not one."""
    try:
        length = int.from_bytes(data[:LENGTH], "little")
        said = json.loads(json.loads(data[LENGTH : LENGTH + length])["__metadata__"]["fl_lightning"])
        if said["format"] != FORMAT:
            raise FederationError(
                f"The other side writes messages of format {said['format']}, this one reads {FORMAT}: use the same "
                "version of fl_lightning on both."
            )
        stored = load(data)
        parts = {part: {name: stored[place] for name, place in names.items()} for part, names in said["parts"].items()}
        header = said["header"]
    except FederationError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise FederationError("It is not a message of fl_lightning, or was damaged on its way.") from error
    if type(header) is not dict:
        raise FederationError("It is not a message of fl_lightning: it has no header.")
    return Envelope(header, parts)
