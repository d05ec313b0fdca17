"""``Journal``: rows of a file that grows with a run, of which a checkpoint keeps no more than where they end."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn


class Journal:
    r"""Text that is added to the end of a file, so that a round and a checkpoint cost the same however long a run is.

    A checkpoint keeps the file's name, how long it was, and a checksum. A run that is resumed goes on from there: what
    was written since is cut off; in another folder the file is begun with a copy of what counts.

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
        """Begin anew with the next :meth:`open`."""
        self.path, self.size, self.sum = None, 0, 0

    def open(self, path: Path | None, header: str = "") -> None:
        """Go on in a file, with all that counts so far.

        Args:
            path: the file; None adds nothing to any.
            header: the text that the file begins with if nothing counts so far.
        """
        before, earlier = self.path, self._earlier()
        if self.size and earlier is None:
            rank_zero_warn(f"{before} is not as the checkpoint knew it: what it had of earlier rounds is left out.")
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
        """Add text to the end."""
        if self.path is None:
            return
        data = text.encode()
        with self.path.open("ab") as file:
            file.write(data)
        self.size, self.sum = self.size + len(data), zlib.crc32(data, self.sum)

    def text(self) -> str:
        """All that counts; nothing if it is not there any more."""
        return (self._earlier() or b"").decode()

    def state_dict(self) -> dict[str, Any]:
        """Where the text ends, once it is on the disk."""
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
        """The part of the file that counts, None if it is not there."""
        if self.path is None or not self.path.is_file():
            return None
        with self.path.open("rb") as file:
            content = file.read(self.size)
        return content if len(content) == self.size and zlib.crc32(content) == self.sum else None
