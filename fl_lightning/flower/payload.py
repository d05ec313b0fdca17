"""Bytes as the content of a Flower message."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

#: Names of the record and of the array in it.
RECORD, ARRAY = "fl_lightning", "bytes"


def packed(payload: bytes) -> RecordDict:
    """A record with one array of bytes, which Flower sends in pieces where it is large."""
    array = Array(dtype="uint8", shape=(len(payload),), stype="fl_lightning.bytes", data=payload)
    return RecordDict({RECORD: ArrayRecord({ARRAY: array})})


def unpacked(content: RecordDict) -> bytes:
    """The bytes of such a record."""
    return bytes(content.array_records[RECORD][ARRAY].data)
