"""Tuning of malloc: reuse memory between steps instead of returning it to the system."""

from __future__ import annotations

import ctypes
import functools
import sys

from fl_lightning.process import wanted

#: Names of glibc's options, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: malloc thresholds in bytes: allocate from the heap up to KEPT, return unused heap memory above UNUSED.
KEPT, UNUSED = 1 << 30, (1 << 31) - 1


@functools.cache
def keep_memory() -> bool:
    """Let the C library reuse the memory of large tensors.

    By default glibc maps every block of more than a few hundred kilobytes anew and unmaps it when freed. A stack of
    clients allocates dozens of them at every step, and the system clears every page each time, which is slow.

    Returns:
        Whether it was done; not without glibc, nor if ``FL_LIGHTNING_LEAVE`` disables it.
    """
    if not sys.platform.startswith("linux") or not wanted("memory"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, UNUSED))
