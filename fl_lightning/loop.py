"""``FederatedLoop``: one round, nested under Lightning's own fit loop.

A round is one epoch, one stock "batch" and one step of the server's optimizer, so progress, checkpoints, early
stopping and loggers of a stock ``Trainer`` count rounds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning.client import ClientSnapshot
from fl_lightning.engine import Job, Result
from fl_lightning.errors import FederationError
from fl_lightning.wire import Message, State, is_finite, nbytes

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

#: Clients and local steps of a round under ``Trainer(fast_dev_run=True)``.
DEV_CLIENTS, DEV_STEPS = 2, 2


class FederatedLoop(_Loop):
    """Runs one round each time it is called.

    Nothing of the round is kept until it is over: the server's model and the snapshots change together at the end. A
    run that stops before that resumes as if the round had not begun; one that stops after it, with a checkpoint
    written before Lightning has counted the round, does not run the round twice.

    Args:
        trainer: the Trainer that it hangs under.
        module: the federated method.
    """

    def __init__(self, trainer: Trainer, module: FederatedModule) -> None:
        super().__init__(trainer)
        self.trainer: Any = trainer  # most of what is used here Lightning attaches without types
        self.module = module

    def run(self) -> dict[str, float]:
        """Run the round ``trainer.current_epoch``, unless it is done, and return what to log of it."""
        round = self.trainer.current_epoch
        if self.module.completed_rounds <= round:
            self._round(round)
        return self.module.summary

    def _round(self, round: int) -> None:
        cohort = self.module.cohort(round)
        if self.trainer.fast_dev_run:
            cohort = cohort[:DEV_CLIENTS]
        self._hook("on_round_start", round, cohort)
        down, messages, snapshots = 0, [], {}
        for job, received, result in self._train(cohort, round):
            message, snapshots[job.client] = self._collect(job, received, result, round)
            messages.append(message)
            down += nbytes(received)
            self._hook("on_client_end", job.client, message)
            self._hook("on_message_up", job.client, message)
        messages.sort(key=lambda message: message.client)
        traffic = {"comm/up_bytes": float(sum(m.nbytes for m in messages)), "comm/down_bytes": float(down)}
        kept = self._finite(messages, snapshots)
        left_out = len(messages) - len(kept)
        self._hook("on_before_aggregate", kept)
        counts = {"clients/trained": float(len(kept)), "clients/left_out": float(left_out)}
        self._commit(round, kept, snapshots, {"train/loss": _mean_loss(kept), **traffic, **counts})
        self._hook("on_round_end", kept)

    def _train(self, cohort: list[int], round: int) -> Iterator[tuple[Job, State, Result]]:
        """Train the cohort stack by stack, similar sizes together."""
        module, federation = self.module, self.module.federation
        sizes = federation.train.sizes
        order = sorted(cohort, key=lambda client: (-int(sizes[client]), client))
        steps = DEV_STEPS if self.trainer.fast_dev_run else None
        width = module.engine.width
        for start in range(0, len(order), width):
            received = {}
            for client in order[start : start + width]:
                received[client] = module.message_down(client)
                self._hook("on_client_start", client, received[client])
            jobs = [Job(client, module.begin(client, message)) for client, message in received.items()]
            with self.trainer.profiler.profile("local_training"), _no_autocast_cache():
                results = module.engine.train(module, federation, jobs, round, steps)
            yield from zip(jobs, received.values(), results, strict=True)

    def _collect(self, job: Job, received: State, result: Result, round: int) -> tuple[Message, ClientSnapshot]:
        tensors, private = self.module.finish(job.client, result.state, received)
        message = Message(job.client, tensors, len(self.module.federation.train[job.client]), result.loss)
        kept = {name: value.detach().clone() for name, value in private.items()}
        return message, self.module.snapshots[job.client].after(kept, round, result.steps)

    def _finite(self, messages: list[Message], snapshots: dict[int, ClientSnapshot]) -> list[Message]:
        """Leave out clients whose update, sent or kept, is not finite; their snapshots stay as they were."""
        finite = [m for m in messages if is_finite(m.tensors) and is_finite(snapshots[m.client].private)]
        bad = sorted({m.client for m in messages} - {m.client for m in finite})
        if bad:
            named = ", ".join(map(str, bad[:10])) + (" and others" if len(bad) > 10 else "")
            if not finite:
                raise FederationError(
                    f"In round {self.trainer.current_epoch} the updates of all {len(bad)} clients ({named}) are not "
                    "finite: lower the learning rate or set clip_norm; the last checkpoint is intact."
                )
            rank_zero_warn(
                f"Round {self.trainer.current_epoch}: left out clients {named}, whose updates are not finite."
            )
        return finite

    def _commit(
        self, round: int, messages: list[Message], snapshots: dict[int, ClientSnapshot], summary: dict[str, float]
    ) -> None:
        module = self.module
        with _interrupts_held():
            module.server_step(module.aggregate(messages))
            for message in messages:
                module.snapshots[message.client] = snapshots[message.client]
            module.bytes_up += int(summary["comm/up_bytes"])
            module.bytes_down += int(summary["comm/down_bytes"])
            module.completed_rounds = round + 1
            module.summary = summary

    def _hook(self, name: str, *args: Any) -> None:
        """Call a round hook of every callback that has it, and of the module."""
        for callback in self.trainer.callbacks:
            function = getattr(callback, name, None)
            if callable(function):
                with self.trainer.profiler.profile(f"[Callback]{callback.state_key}.{name}"):
                    function(self.trainer, self.module, *args)
        function = getattr(self.module, name, None)
        if callable(function):
            function(*args)


def _mean_loss(messages: list[Message]) -> float:
    """Mean training loss, weighted by samples."""
    total = sum(message.samples for message in messages)
    return sum(message.loss * message.samples for message in messages) / total


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the block is over, so that no checkpoint sees half of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held and callable(handler):
            handler(*held[0])


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Local steps change weights in place: a cached low-precision copy of them would be stale."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
