"""Synchronisation of a run's processes that reports which of them are missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fl_lightning import signals
from fl_lightning.errors import FederationError
from fl_lightning.process import time_limit


class RankError(FederationError):
    """Another process of the run has ended or does not answer; the current stage was discarded."""


#: The process group for barriers, with the world group that it was made for.
_group: list[tuple[Any, Any]] = []


def meet(seconds: float | None = None) -> None:
    """Wait until every process of the run arrives, or raise an error that names the missing ones.

    Must be called by all processes before a collective operation. A process that died is noticed at once, one that
    hangs after the time limit.

    Args:
        seconds: time limit; None takes ``FL_LIGHTNING_TIMEOUT``, else half an hour.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    limit = time_limit() if seconds is None else seconds
    signals.check()
    group = _gloo()
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=limit), wait_all_ranks=True)
    except RuntimeError as error:
        signals.check()  # the other processes may have received the same signal
        raise RankError(_sentence(str(error), limit)) from error


@contextmanager
def crossing() -> Iterator[None]:
    """Wait for every process of the run, and raise the same error if one is lost during the block."""
    meet()
    try:
        yield
    except RuntimeError as error:  # from the sockets
        signals.check()
        raise RankError(_sentence(str(error), time_limit())) from error


def _gloo() -> Any:
    """Return a Gloo group of all processes, which supports monitored barriers, whatever the backend."""
    world = dist.group.WORLD
    if not _group or _group[0][0] is not world:
        own = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _group[:] = [(world, own)]
    return _group[0][1]


def _sentence(said: str, limit: float) -> str:
    """Describe the missing ranks.

    Example:
        >>> _sentence("[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 500 ms", 0.5)[:64]
        'Ranks 1, 3 of the run have ended or did not answer for 0.5 secon'
    """
    missing = re.search(r"Ranks ([\d, ]*\d) failed to pass", said)
    who = f"Ranks {missing[1]}" if missing else "Other ranks"
    return (
        f"{who} of the run have ended or did not answer for {limit:g} seconds: see their output; the last checkpoint "
        "is intact."
    )
