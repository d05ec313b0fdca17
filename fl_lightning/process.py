"""Effects on the whole process and on other processes: which are wanted, and how long to wait for others."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from fl_lightning.errors import FederationError

#: Environment variables: effects to disable, separated by commas; the time limit of a process without a sign of life.
LEAVE, LIMIT = "FL_LIGHTNING_LEAVE", "FL_LIGHTNING_TIMEOUT"
#: Process-wide effects that can be disabled, with a description of each.
EFFECTS = {
    "memory": "the C library reuses the memory of large tensors (mallopt)",
    "mkldnn": "oneDNN is off while a recurrent layer is mapped over clients",
    "checkpoints": "the Trainer writes and reads checkpoints through fl_lightning.checkpoints",
    "signals": "SIGTERM, Ctrl-C and Slurm's signal are handled between local steps",
    "argv": "the command line resolves short names in sys.argv",
}
#: Default time limit in seconds.
PATIENCE = 1800.0
#: Option of Linux's prctl that kills a process when its parent ends.
PR_SET_PDEATHSIG = 1


def wanted(effect: str) -> bool:
    """Return whether a process-wide effect is enabled.

    Example:
        >>> os.environ[LEAVE] = "memory,argv"
        >>> wanted("memory"), wanted("mkldnn")
        (False, True)
        >>> del os.environ[LEAVE]
    """
    left = {name.strip() for name in os.environ.get(LEAVE, "").split(",")} - {""}
    unknown = left - EFFECTS.keys()
    if unknown:
        raise FederationError(f"{LEAVE} has no {', '.join(sorted(unknown))}: it takes {', '.join(EFFECTS)}.")
    return effect not in left


def time_limit() -> float:
    """Return the seconds after which a worker without a step, or a rank without an answer, counts as hung."""
    given = os.environ.get(LIMIT, "")
    try:
        seconds = float(given or PATIENCE)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise FederationError(f"{LIMIT} must be a number of seconds greater than 0, not {given!r}.")
    return seconds


def end_with_parent() -> None:
    """Have this process killed when its parent ends, even if it is stopped; only on Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
