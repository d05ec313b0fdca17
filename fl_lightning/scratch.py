"""Files that are mapped into memory, with room on the disk for all of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fl_lightning.errors import FederationError


def reserve(path: Path, size: int) -> None:
    """Let a file have at least so many bytes, made if need be, with room on the disk for each.

    A file that is only lengthened has none: the process is killed by SIGBUS when it writes to the mapped memory of a
    disk that has filled up.
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
                f"There is no room for {size / 1e6:.1f} MB of what clients keep in {path.parent} ({error.strerror}): "
                "make room, let store be a folder of another disk, or leave store out; the last checkpoint is intact."
            ) from error
