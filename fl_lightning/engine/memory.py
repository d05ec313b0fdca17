"""Memory that is used again and again is kept, not given back to the system after every step."""

from __future__ import annotations

import ctypes
import functools
import sys

from fl_lightning.process import wanted

#: Names of glibc's options, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: Blocks up to this size, in bytes, are taken from memory that is kept, of which so much may lie unused.
KEPT, UNUSED = 1 << 30, (1 << 31) - 1


@functools.cache
def keep_memory() -> bool:
    """Let the C library keep the memory of large tensors for the next ones.

    By default glibc asks the system for every block of more than a few hundred kilobytes and gives it back at once. A
    stack of clients makes dozens of them at every step, and the system clears each page of each: time that shows.

    Returns:
        Whether it was done; on systems without glibc, and where ``FL_LIGHTNING_LEAVE`` says so, nothing is changed.
    """
    if not sys.platform.startswith("linux") or not wanted("memory"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, UNUSED))
