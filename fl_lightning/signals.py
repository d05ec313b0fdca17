"""Signals are noted when they come, and acted on where nothing is half done.

While a fit is under way :class:`SignalsCallback` listens to SIGTERM, Ctrl-C and, in a job that Slurm may requeue, to
Slurm's signal. Its handler does nothing but note the number. Engines call :func:`check` between local steps: there the
run ends, by an exception, with what its last completed stage left. A round whose stages are all complete is first
evaluated and logged, so that a resumed run misses nothing of it. ``with held()`` is for what must not be divided, such
as a server's step and the snapshots of that stage.
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

#: What is called by :func:`check`; empty unless somebody listens.
_listeners: list[Callable[[], None]] = []
#: How many blocks of :func:`held` are open.
_depth = 0


class TerminatedError(SIGTERMException):
    """A signal asked for the end of the run; the process exits with 128 plus its number."""


class InterruptedRun(KeyboardInterrupt):
    """Ctrl-C, acted on where nothing was half done."""


#: The exceptions after which what a run holds is that of its last completed stage.
STOPS = (TerminatedError, InterruptedRun)


def check() -> None:
    """Act on a signal that has come; called between local steps, where it costs a tenth of a microsecond."""
    for listen in _listeners:
        listen()


@contextmanager
def held() -> Iterator[None]:
    """Let no signal, not even a second Ctrl-C, divide the block; it is acted on by the next :func:`check`."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """Have :func:`check` call a function within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Deferred:
    """Handlers of a main thread that note signals.

    Args:
        numbers: the signals.
    """

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        #: The signal that came, None if none has; SIGTERM replaces any other.
        self.came: int | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Note signals from now on; those that this process ignores stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Put the handlers back that were there before, where they are still these."""
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
    """Ends a fit where its last stage is complete when SIGTERM, Ctrl-C or Slurm's requeue signal has come.

    After SIGTERM the process exits with 143, after Slurm's signal with 128 plus its number; Ctrl-C is the usual
    ``KeyboardInterrupt``, and a second one acts at once. Under Slurm, where Lightning requeues jobs, a checkpoint that
    the requeued job starts from is written first. Of several processes each acts for itself, without waiting for the
    others, which end when they miss it.
    """

    def __init__(self) -> None:
        self._signals: Deferred | None = None
        self._act: Callable[[], None] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the place of Lightning's handlers, which are there by now."""
        self._forget()
        if not wanted("signals"):
            return
        requeue = requeue_signal(trainer)
        self._signals = Deferred(signal.SIGTERM, signal.SIGINT, *([] if requeue is None else [requeue]))
        self._act = lambda: self._stop(trainer)
        self._signals.install()
        _listeners.append(self._act)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Act before a round."""
        check()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act a last time, and let go."""
        check()
        self._forget()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let what is written now be written; Lightning puts the handlers back."""
        self._silence()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go."""
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
        if number is None or _done(trainer) > trainer.current_epoch:  # complete, and not yet evaluated and logged
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
    """The signal upon which Lightning requeues a Slurm job, None in any other."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return int(environment.requeue_signal or signal.SIGUSR1)


def _preempted(trainer: Trainer, number: int) -> None:
    """In a job that Slurm may start again, write the checkpoint that it then starts from; requeue it if asked to."""
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
    """Let this process save a checkpoint without waiting for the others, which may never come."""
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
