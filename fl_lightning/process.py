"""Effects on the whole process and on other processes: which are wanted, and how long to wait for others."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from fl_lightning.errors import FederationError

#: Environment variables: effects that are left alone, separated by commas; seconds without a sign of life.
LEAVE, LIMIT = "FL_LIGHTNING_LEAVE", "FL_LIGHTNING_TIMEOUT"
#: Effects on the process that may be left alone, and what each of them is.
EFFECTS = {
    "memory": "the C library keeps the memory of large tensors (mallopt)",
    "mkldnn": "oneDNN is off while a recurrent layer is mapped over clients",
    "checkpoints": "the Trainer writes and reads checkpoints through fl_lightning.checkpoints",
    "signals": "SIGTERM, Ctrl-C and Slurm's signal are acted on between local steps",
    "argv": "the command line resolves short names in sys.argv",
}
#: Seconds that a process may show no sign of life unless LIMIT says otherwise.
PATIENCE = 1800.0
#: Linux: the number of prctl's option that has a process killed with its parent.
PR_SET_PDEATHSIG = 1


def wanted(effect: str) -> bool:
    """Whether an effect on the whole process is wanted.

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
    """Seconds after which a worker that takes no step, or a rank that does not answer, counts as hung."""
    given = os.environ.get(LIMIT, "")
    try:
        seconds = float(given or PATIENCE)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise FederationError(f"{LIMIT} must be a number of seconds greater than 0, not {given!r}.")
    return seconds


def end_with_parent() -> None:
    """Have this process killed with the one that started it, even while it is stopped; on Linux alone."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
