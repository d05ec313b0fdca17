"""Calls in separate processes, a few at a time; a failing or dying one does not affect the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Self


class Workers:
    """Context manager of worker processes; an exception, such as Ctrl-C, ends them all.

    Every process has a pool of its own: were they in one, that of a process which is killed would be lost to all.

    Args:
        number: how many calls are carried out at a time.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        #: Arguments of all running calls.
        self.running: dict[Future[Any], tuple[Any, ...]] = {}
        self._pools: dict[Future[Any], ProcessPoolExecutor] = {}
        self._idle: list[ProcessPoolExecutor] = []
        self._others = set(multiprocessing.active_children())

    @property
    def free(self) -> bool:
        """Whether another call can start."""
        return len(self.running) < self.number

    def begin(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Start a call."""
        # Spawned, not forked: every process starts clean, with threads of its own.
        context = multiprocessing.get_context("spawn")
        pool = self._idle.pop() if self._idle else ProcessPoolExecutor(1, context, end_with_parent)
        # A terminal's Ctrl-C is for all processes: those that begin now leave it to this one, which ends them.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            future = pool.submit(work, *arguments)
        finally:
            signal.signal(signal.SIGINT, handler)
        self.running[future], self._pools[future] = arguments, pool

    def ended(self, timeout: float = 1.0) -> Sequence[tuple[tuple[Any, ...], Future[Any]]]:
        """Wait for finished calls; returns their arguments and outcomes, none after the timeout."""
        over = wait(self.running, timeout=timeout, return_when=FIRST_COMPLETED).done
        for future in over:
            pool = self._pools.pop(future)
            if not isinstance(future.exception(), BrokenProcessPool):
                self._idle.append(pool)
        return [(self.running.pop(future), future) for future in over]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.kill()
        for pool in (*self._idle, *self._pools.values()):
            pool.shutdown()


def end_with_parent() -> None:
    """End this process when its parent ends, however that happens.

    Otherwise a run would continue after its command was killed, next to that of a new command in the same folder.
    """

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
