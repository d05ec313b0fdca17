"""Signal handling: signals are recorded when they arrive and handled at safe points.

During a fit :class:`SignalsCallback` handles SIGTERM, Ctrl-C and, in a job that Slurm may requeue, Slurm's signal. Its
handler only records the number. Engines call :func:`check` between local steps: there the run stops with an exception,
in the state of its last completed stage. If all stages of a round are complete, the round is first evaluated and
logged, so that a resumed run misses nothing. ``with held()`` protects critical sections, such as the server's step and
the snapshots of its stage.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning.process import wanted

#: Functions called by :func:`check`; empty outside of fits.
_listeners: list[Callable[[], None]] = []
#: Nesting depth of :func:`held`.
_depth = 0


class TerminatedError(SIGTERMException):
    """A signal ended the run; the process exits with 128 plus its number."""


class InterruptedRun(KeyboardInterrupt):
    """Ctrl-C, handled at a safe point."""


#: Exceptions that leave the run in the state of its last completed stage.
STOPS = (TerminatedError, InterruptedRun)


def check() -> None:
    """Handle a recorded signal; called between local steps, at a cost of a tenth of a microsecond."""
    for listen in _listeners:
        listen()


@contextmanager
def held() -> Iterator[None]:
    """Defer all signals during the block, even a second Ctrl-C, to the next :func:`check`."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """Make :func:`check` call a function within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Deferred:
    """Handlers of the main thread that record signals.

    Args:
        numbers: the signals.
    """

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        #: The signal received, None if none was; SIGTERM replaces any other.
        self.came: int | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Start recording signals; signals that this process ignores stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Restore the previous handlers, unless others were installed since."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note and handler is not None:
                signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT == self.came
        if self.came is None or number == signal.SIGTERM:
            self.came = number
        if again and not _depth:
            raise KeyboardInterrupt


class SignalsCallback(Callback):
    """Ends a fit at its last complete stage after SIGTERM, Ctrl-C or Slurm's requeue signal.

    After SIGTERM the process exits with 143, after Slurm's signal with 128 plus its number; Ctrl-C raises the usual
    ``KeyboardInterrupt``, and a second one acts at once. Under Slurm, where Lightning requeues jobs, the
    checkpoint for the requeued job is written first. Each of several processes stops on its own, without waiting for
    the others.
    """

    def __init__(self) -> None:
        self._signals: Deferred | None = None
        self._act: Callable[[], None] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handlers, which are installed by now."""
        self._forget()
        if not wanted("signals"):
            return
        requeue = requeue_signal(trainer)
        self._signals = Deferred(signal.SIGTERM, signal.SIGINT, *([] if requeue is None else [requeue]))
        self._act = lambda: self._stop(trainer)
        self._signals.install()
        _listeners.append(self._act)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Handle signals before a round."""
        check()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals a last time, and restore the handlers."""
        check()
        self._forget()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop handling signals, so that pending writes finish; Lightning restores its handlers."""
        self._silence()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the handlers."""
        self._forget()

    def _forget(self) -> None:
        self._silence()
        if self._signals is not None:
            self._signals.restore()
            self._signals = None

    def _silence(self) -> None:
        with suppress(ValueError):
            _listeners.remove(self._act)  # type: ignore[arg-type]
        self._act = None

    def _stop(self, trainer: Trainer) -> None:
        number = None if self._signals is None or _depth else self._signals.came
        if number is None or _done(trainer) > trainer.current_epoch:  # the round is complete but not yet evaluated
            return
        name = signal.Signals(number).name
        rank_zero_warn(f"{name}: the run ends with its last complete stage, after {_done(trainer)} rounds.")
        self._silence()
        if number == signal.SIGINT:
            raise InterruptedRun
        _preempted(trainer, number)
        launcher: Any = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(number)
        raise TerminatedError(128 + number)


def requeue_signal(trainer: Trainer) -> int | None:
    """Return the signal upon which Lightning requeues a Slurm job, None in any other."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return int(environment.requeue_signal or signal.SIGUSR1)


def _preempted(trainer: Trainer, number: int) -> None:
    """In a Slurm job that may be requeued, write the checkpoint to restart from, and requeue it if signalled to."""
    requeue, connector = requeue_signal(trainer), trainer._signal_connector
    if requeue is None:
        return
    with alone(trainer):
        if number == requeue:
            connector._slurm_sigusr_handler_fn(number, None)  # type: ignore[arg-type]
        else:
            trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(str(trainer.default_root_dir)))


def _done(trainer: Trainer) -> int:
    return int(getattr(trainer.lightning_module, "completed_rounds", trainer.current_epoch))


@contextmanager
def alone(trainer: Trainer) -> Iterator[None]:
    """Let this process save a checkpoint without waiting for other ranks, which may never arrive."""
    strategy: Any = trainer.strategy
    waits = {
        "barrier": lambda *args, **kwargs: None,
        "broadcast": lambda value, src=0: value,
        "reduce_boolean_decision": lambda decision, all=True: decision,
    }
    for name, instead in waits.items():
        setattr(strategy, name, instead)
    try:
        yield
    finally:
        for name in waits:
            delattr(strategy, name)
