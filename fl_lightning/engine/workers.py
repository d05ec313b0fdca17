"""Clients divided among worker processes, each with its own engine and core."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning import signals
from fl_lightning.engine.auto import ENGINES
from fl_lightning.engine.base import Engine
from fl_lightning.engine.contract import Job, LocalMethod, LocalTraining, Phase, Result
from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation
from fl_lightning.process import end_with_parent, time_limit
from fl_lightning.wire import State

#: Seconds between two checks whether a worker is alive.
LOOK = 0.25
#: Minimum time limit in seconds before a worker's first step, because of its imports.
START = 300.0


class WorkerEngine(Engine):
    """Trains a cohort in several processes; each runs the given engine with one thread.

    The data is in shared memory. Workers get the copy of the method that ``for_worker()`` returns; anything else that
    changes between rounds, except ``local``, ``seed`` and ``phases()``, must be part of the clients' states. Workers
    start with the first round and stop with the run. Results are the same as with one process, since streams depend on
    (seed, purpose, round, client) alone. A worker that dies is restarted once and trains its clients again. One that
    takes no local step for too long counts as hung and ends the run.

    Args:
        engine: the engine of every worker; ``auto`` chooses once, in this process, for all of them.
        workers: number of processes.
        timeout: seconds without a local step after which a worker counts as hung; None takes ``FL_LIGHTNING_TIMEOUT``,
            else half an hour.
    """

    name = "workers"

    def __init__(self, engine: Engine, workers: int, timeout: float | None = None) -> None:
        super().__init__(engine.width * workers)
        self.engine = engine
        self.workers = workers
        self.timeout = time_limit() if timeout is None else timeout
        self._pool: list[_Worker] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def choice(self) -> str | None:
        """Name of the workers' engine; None before it is chosen."""
        return self.engine.choice

    def choose(self, method: LocalMethod, federation: Federation, jobs: Sequence[Job], round: int) -> Engine:
        """Return the workers' engine."""
        return self.engine.choose(method, federation, jobs[: self.engine.width], round)

    def settle(self, choice: str) -> None:
        """Let the workers use an earlier choice of engine."""
        self.engine.settle(choice)

    def reset(self) -> None:
        """Stop the workers, and release what the engine prepared."""
        self.engine.reset()
        while self._pool:
            self._pool.pop().stop()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": [], "_memory": torch.empty(0, dtype=torch.uint8)}  # processes stay

    def train(
        self,
        method: LocalMethod,
        federation: Federation,
        jobs: Sequence[Job],
        round: int,
        max_steps: int | None = None,
    ) -> list[Result]:
        """Train the jobs in the workers; see ``Engine.train``."""
        self.choose(method, federation, jobs, round)
        send = getattr(method, "for_worker", None)
        if send is None:  # small training outside of rounds, such as the adaptation of new clients
            parts = [jobs[i : i + self.engine.width] for i in range(0, len(jobs), self.engine.width)]
            return [r for part in parts for r in self.engine.train(method, federation, part, round, max_steps)]
        if not self._pool:
            self._pool = self._start(send(), federation)
        # Jobs are sorted by falling size, so dealing them out in turn balances the load.
        shares = [list(range(i, len(jobs), self.workers)) for i in range(min(self.workers, len(jobs)))]
        # One block of memory for all jobs and rounds; entries that clients share are copied once.
        layouts, self._memory = _pack([s for job in jobs for s in (job.state, job.optimizer)], self._memory)
        for worker, share in zip(self._pool, shares, strict=False):
            clients, own = [jobs[i].client for i in share], [layouts[2 * i + k] for i in share for k in (0, 1)]
            settings = (method.local, method.seed, list(method.phases()), _Precision.current(), round, max_steps)
            worker.begin(_Task(*settings, clients, own, self._memory))
        results: dict[int, Result] = {}
        for worker, share in zip(self._pool, shares, strict=False):
            results |= dict(zip(share, worker.results(), strict=True))
        return [results[i] for i in range(len(jobs))]

    def _start(self, method: LocalMethod, federation: Federation) -> list[_Worker]:
        setting = (method, federation.shared(), self.engine.choice, self.engine.width)
        try:
            return [_Worker(number, setting, self.timeout) for number in range(self.workers)]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise FederationError(
                f"{type(method).__name__} cannot be sent to worker processes ({error}): define its classes and "
                "functions at the top level of a module, or set workers=1."
            ) from error


class _Precision(NamedTuple):
    """Precision settings of a Trainer in its own process, to be repeated in workers."""

    mixed: bool
    lower: torch.dtype
    default: torch.dtype

    @classmethod
    def current(cls) -> _Precision:
        """Return the settings of this process."""
        return cls(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings; without autocast's weight cache, because weights change in place."""
        torch.set_default_dtype(self.default)
        with torch.autocast("cpu", self.lower, self.mixed, cache_enabled=False):
            yield


class _Task(NamedTuple):
    """Clients to train, and the memory layout of their initial tensors: state, optimizer, state, ..."""

    local: LocalTraining
    seed: int
    phases: list[Phase]
    precision: _Precision
    round: int
    max_steps: int | None
    clients: list[int]
    layouts: list[dict[str, _Place]]
    memory: torch.Tensor


@dataclass(frozen=True)
class _Place:
    """Position of a tensor in a block of memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize


def _pack(states: Sequence[State], memory: torch.Tensor | None = None) -> tuple[list[dict[str, _Place]], torch.Tensor]:
    """Copy tensors into one block of shared memory; tensors shared by several states are copied once.

    Args:
        states: the tensors by name.
        memory: shared memory to reuse if it is large enough.
    """
    places: dict[tuple[Any, ...], tuple[_Place, torch.Tensor]] = {}
    layouts: list[dict[str, _Place]] = []
    end = 0
    for state in states:
        layout = {}
        for name, value in state.items():
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if key not in places:
                place = _Place(end, tuple(value.shape), value.dtype)
                places[key] = (place, value)
                end = -(-place.stop // 64) * 64
            layout[name] = places[key][0]
        layouts.append(layout)
    if memory is None or len(memory) < end:
        memory = torch.empty(end, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    for place, value in places.values():
        _at(memory, place).copy_(value)
    return layouts, memory


def _at(memory: torch.Tensor, place: _Place) -> torch.Tensor:
    return memory[place.start : place.stop].view(place.dtype).view(place.shape)


def _unpack(layouts: Sequence[dict[str, _Place]], memory: torch.Tensor) -> list[State]:
    return [{name: _at(memory, place) for name, place in layout.items()} for layout in layouts]


class _Worker:
    """One worker process, as seen from the main process."""

    def __init__(self, number: int, setting: tuple[Any, ...], timeout: float) -> None:
        self.number, self.setting, self.timeout = number, setting, timeout
        self.beat = _context().RawValue("q", 0)  # number of local steps taken
        self.task: _Task | None = None
        self.answered = False
        self._launch()

    def _launch(self) -> None:
        context = _context()
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, self.beat, *self.setting), daemon=True)
        self.process.start()
        other.close()

    def begin(self, task: _Task) -> None:
        """Start training some clients."""
        self.task = task
        _in_thread(self.connection.send_bytes, ForkingPickler.dumps(task))  # blocks until the worker reads

    def results(self) -> list[Result]:
        """Receive the results; a worker that died is restarted once."""
        assert self.task is not None
        try:
            answer = self._receive()
        except (EOFError, OSError):
            signals.check()  # the same signal may have killed it
            self._check_started()
            rank_zero_warn(f"{self} died; it is restarted and its clients are trained again.")
            self._launch()
            self.begin(self.task)
            try:
                answer = self._receive()
            except (EOFError, OSError):
                clients = ", ".join(map(str, self.task.clients[:10]))
                raise FederationError(
                    f"{self} died twice while it trained clients {clients}: the machine may be out of memory, try "
                    "fewer workers or a smaller clients_per_stack; the last checkpoint is intact."
                ) from None
        self.answered = True
        if isinstance(answer, _Failure):
            raise answer.error from _WorkerError(answer.trace)
        layouts, memory, losses, steps = answer
        found = _unpack(layouts, memory)
        return [
            Result(state, loss, count, kept)
            for state, kept, loss, count in zip(found[::2], found[1::2], losses, steps, strict=True)
        ]

    def _check_started(self) -> None:
        """Raise an error if the process failed before its first answer; being killed does not count."""
        self.process.join(timeout=5)
        if not self.answered and (self.process.exitcode or 0) > 0:
            raise FederationError(
                f"{self} could not start, as its error above says: worker processes import the script, so let it train "
                "under if __name__ == '__main__', have classes of your own in a module if it is a notebook, or set "
                "workers=1."
            ) from None

    def _receive(self) -> Any:
        """Receive from the worker with a time limit between its steps; pauses of this process do not count."""
        answer, idle, beat = _in_thread(self.connection.recv), 0.0, self.beat.value
        while not wait([answer], LOOK).done:
            signals.check()
            idle = idle + LOOK if self.beat.value == beat else 0.0
            beat = self.beat.value
            if idle >= (self.timeout if beat else max(self.timeout, START)):
                self._give_up()
        return answer.result()

    def _give_up(self) -> None:
        self.process.kill()
        clients = ", ".join(map(str, [] if self.task is None else self.task.clients[:10]))
        raise FederationError(
            f"{self} has taken no step for {self.timeout:g} seconds while training clients {clients}: find out what it "
            "waits for, or set FL_LIGHTNING_TIMEOUT above the duration of any step; the last checkpoint is intact."
        )

    def stop(self) -> None:
        """Stop the process."""
        self.connection.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()

    def __str__(self) -> str:
        return f"Worker {self.number} (process {self.process.pid})"


def _in_thread(act: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread, because it may block on a process that hangs."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(act(*args))
        except BaseException as error:  # raised by result()
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def _context() -> Any:
    """Return a context that forks from a process with all imports but no threads; forks of a busy one may deadlock."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["fl_lightning.methods"])
    return context


class _Failure(NamedTuple):
    error: Exception
    trace: str


class _WorkerError(Exception):
    """Shows the traceback of an error in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _work(connection: Connection, beat: Any, method: Any, federation: Federation, engine: str, width: int) -> None:
    """Run a worker process: train the clients of received tasks until the connection closes."""
    _end_with_run()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a run, handled by the main process
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    trainer = ENGINES[engine](width)

    def step() -> None:
        beat.value += 1

    with suppress(EOFError, OSError), signals.listening(step):
        while True:
            task: _Task = connection.recv()
            method.local, method.seed, method.phases = task.local, task.seed, partial(list, task.phases)
            found = _unpack(task.layouts, task.memory)
            jobs = [Job(*own) for own in zip(task.clients, found[::2], found[1::2], strict=True)]
            try:
                with task.precision.applied():
                    results = trainer.train(method, federation, jobs, task.round, task.max_steps)
                layouts, memory = _pack([s for result in results for s in (result.state, result.optimizer)])
                connection.send((layouts, memory, [r.loss for r in results], [r.steps for r in results]))
            except Exception as error:  # raised again in the main process
                connection.send(_Failure(_sendable(error), traceback.format_exc()))


def _end_with_run() -> None:
    """Have this worker killed when the main process ends, even if it is stopped.

    Its parent is the fork server, which ends with the main process unless a worker keeps its pipe open.
    """
    kept = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd", None)
    if kept is not None:
        os.close(kept)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    end_with_parent()


def _sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # raised by the error's own pickling methods
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
