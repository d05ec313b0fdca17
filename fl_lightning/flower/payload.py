"""Bytes as content of a Flower message."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

#: Names of the record and of its array.
RECORD, ARRAY = "fl_lightning", "bytes"


def packed(payload: bytes) -> RecordDict:
    """Wrap bytes in a record with one array, which Flower sends in chunks if it is large."""
    array = Array(dtype="uint8", shape=(len(payload),), stype="fl_lightning.bytes", data=payload)
    return RecordDict({RECORD: ArrayRecord({ARRAY: array})})


def unpacked(content: RecordDict) -> bytes:
    """Return the bytes of such a record."""
    return bytes(content.array_records[RECORD][ARRAY].data)
