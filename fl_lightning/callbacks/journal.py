"""``Journal``: a growing file of a run, of which a checkpoint stores only the length."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn


class Journal:
    r"""A file that text is appended to, so that the cost of a round and a checkpoint does not grow with the run.

    A checkpoint stores the file's name, length and a checksum. A resumed run truncates the file to this length; in
    another folder, it starts with a copy of this part.

    Example:
        >>> import tempfile
        >>> path, journal = Path(tempfile.mkdtemp()) / "rows.csv", Journal()
        >>> journal.open(path, "round\n")
        >>> journal.add("0\n")
        >>> mark = journal.state_dict()
        >>> journal.add("1\n")
        >>> resumed = Journal()
        >>> resumed.load_state_dict(mark)
        >>> resumed.open(path)
        >>> resumed.text(), path.read_text()
        ('round\n0\n', 'round\n0\n')
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.size = self.sum = 0

    def forget(self) -> None:
        """Start over with the next :meth:`open`."""
        self.path, self.size, self.sum = None, 0, 0

    def open(self, path: Path | None, header: str = "") -> None:
        """Continue in a file, with the text so far.

        Args:
            path: the file; None writes nothing.
            header: first text of the file if there is none so far.
        """
        before, earlier = self.path, self._earlier()
        if self.size and earlier is None:
            rank_zero_warn(f"{before} differs from the checkpoint's record: its text of earlier rounds is left out.")
        if path is not None:
            content = earlier or header.encode()
            path.parent.mkdir(parents=True, exist_ok=True)
            if earlier and before is not None and path.absolute() == before.absolute():
                os.truncate(path, len(earlier))
            else:
                path.write_bytes(content)
            self.size, self.sum = len(content), zlib.crc32(content)
        self.path = path

    def add(self, text: str) -> None:
        """Append text."""
        if self.path is None:
            return
        data = text.encode()
        with self.path.open("ab") as file:
            file.write(data)
        self.size, self.sum = self.size + len(data), zlib.crc32(data, self.sum)

    def text(self) -> str:
        """Return the text so far; empty if the file is missing."""
        return (self._earlier() or b"").decode()

    def state_dict(self) -> dict[str, Any]:
        """Flush the file and return its length and checksum."""
        if self.path is not None and self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        path = None if self.path is None else str(self.path.absolute())
        return {"path": path, "size": self.size, "sum": self.sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint with the next :meth:`open`."""
        self.path = None if state["path"] is None else Path(state["path"])
        self.size, self.sum = int(state["size"]), int(state["sum"])

    def _earlier(self) -> bytes | None:
        """Return the valid part of the file; None if missing."""
        if self.path is None or not self.path.is_file():
            return None
        with self.path.open("rb") as file:
            content = file.read(self.size)
        return content if len(content) == self.size and zlib.crc32(content) == self.sum else None
