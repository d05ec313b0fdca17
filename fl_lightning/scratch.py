"""Disk space for memory-mapped files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fl_lightning.errors import FederationError


def reserve(path: Path, size: int) -> None:
    """Extend a file to at least ``size`` bytes, allocated on the disk; the file is created if necessary.

    A sparse file is not enough: writing to its mapped memory when the disk is full kills the process with SIGBUS.
    """
    with path.open("ab") as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            else:
                file.truncate(max(size, os.fstat(file.fileno()).st_size))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise FederationError(
                f"There is no room for {size / 1e6:.1f} MB of client state in {path.parent} ({error.strerror}): "
                "make room, let store be a folder of another disk, or leave store out; the last checkpoint is intact."
            ) from error
