"""``FederatedLoop``: one round, nested under Lightning's own fit loop.

A round is one epoch, one stock "batch" and one step of the server's optimizer, so progress, checkpoints, early
stopping and loggers of a stock ``Trainer`` count rounds.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning.client import ClientSnapshot
from fl_lightning.engine import Job, Result, Stage
from fl_lightning.errors import FederationError
from fl_lightning.wire import Message, State, is_finite, nbytes

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

#: Clients and local steps of a round under ``Trainer(fast_dev_run=True)``.
DEV_CLIENTS, DEV_STEPS = 2, 2


@dataclass(frozen=True)
class Tally:
    """What the stages of a round add up to.

    Args:
        up: bytes that clients sent.
        down: bytes that the server sent.
        trained: clients whose messages were aggregated.
        left_out: clients whose updates were not finite.
        samples: samples of the trained clients that took a step.
        loss: their losses, each times its samples.
        clients_seconds: time that local training took, with all that belongs to it.
        server_seconds: time that the aggregate and the server's step took.
    """

    up: int = 0
    down: int = 0
    trained: int = 0
    left_out: int = 0
    samples: int = 0
    loss: float = 0.0
    clients_seconds: float = 0.0
    server_seconds: float = 0.0

    def count(self, messages: list[Message], left_out: int) -> Tally:
        """With the clients of a stage."""
        known = [m for m in messages if not math.isnan(m.loss)]
        samples, loss = sum(m.samples for m in known), sum(m.loss * m.samples for m in known)
        return replace(self, trained=len(messages), left_out=left_out, samples=samples, loss=loss)

    def add(self, other: Tally) -> Tally:
        """This and a later stage."""
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def summary(self) -> dict[str, float]:
        """What is logged of the round; the loss is the mean over samples."""
        return {
            "train/loss": self.loss / self.samples if self.samples else math.nan,
            "comm/up_bytes": float(self.up),
            "comm/down_bytes": float(self.down),
            "clients/trained": float(self.trained),
            "clients/left_out": float(self.left_out),
            "time/clients": self.clients_seconds,
            "time/server": self.server_seconds,
        }


class FederatedLoop(_Loop):
    """Runs one round each time it is called.

    A round has one stage, unless the method divides it. Nothing of a stage is kept until it is over: the server's model
    and the snapshots change together at its end. A run that stops before that resumes as if the stage had not begun;
    one that stops after the last stage, with a checkpoint written before Lightning has counted the round, does not run
    the round twice.

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
        """All stages of the round, but for those that were done before the run was resumed."""
        module, cohort = self.module, self.module.cohort(round)
        if self.trainer.fast_dev_run:
            cohort = cohort[:DEV_CLIENTS]
        stages = [stage for stage in module.stages(round, cohort) if stage.clients]
        if not stages:
            raise FederationError(f"{type(module).__name__} has no client to train in round {round}.")
        if self.trainer.fast_dev_run:
            stages = [replace(stage, clients=stage.clients[:DEV_CLIENTS]) for stage in stages]
        self._hook("on_round_start", round, [client for stage in stages for client in stage.clients])
        messages: list[Message] = []
        for number in range(module.completed_stages, len(stages)):
            messages += self._stage(round, stages[number], last=number + 1 == len(stages))
        self._hook("on_round_end", messages)

    def _stage(self, round: int, stage: Stage, last: bool) -> list[Message]:
        """Train a stage's clients and commit what the server makes of their messages, which are returned."""
        self.module.stage = stage
        began, down, messages, snapshots = time.perf_counter(), 0, [], {}
        for number, received, result in self._train(stage, round):
            message, snapshots[number] = self._collect(number, received, result, round)
            messages.append(message)
            down += nbytes(received)
            self._hook("on_client_end", number, message)
        messages, snapshots, down = self._exchange(messages, snapshots, down)
        for message in messages:
            self._hook("on_message_up", message.client, message)
        tally = Tally(up=sum(m.nbytes for m in messages), down=down)
        kept = self._finite(messages, snapshots, stage.needed or (last and not self.module.tally.trained))
        left_out = len(messages) - len(kept)
        if kept:
            self._hook("on_before_aggregate", kept)
        tally = replace(tally, clients_seconds=time.perf_counter() - began)
        if stage.training is None:
            tally = tally.count(kept, left_out)
        else:
            snapshots = {}
        self._commit(round, kept, snapshots, tally, last)
        return kept

    def _train(self, stage: Stage, round: int) -> Iterator[tuple[int, State, Result]]:
        """Train a stage's clients stack by stack, similar sizes together."""
        module, federation = self.module, self.module.federation
        sizes = federation.train.sizes
        order = sorted(stage.clients, key=lambda number: (-int(sizes[module.client_of(number)]), number))
        steps = DEV_STEPS if self.trainer.fast_dev_run else None
        width = module.engine.width
        if self.trainer.world_size > 1:
            self._agree_on_engine(stage, round, order[:width])
            order = self._share(order)
        for start in range(0, len(order), width):
            received = {}
            for number in order[start : start + width]:
                received[number] = module.message_down(number)
                self._hook("on_client_start", number, received[number])
            jobs = [Job(module.client_of(n), module.begin(n, message)) for n, message in received.items()]
            with self.trainer.profiler.profile("local_training"), _no_autocast_cache():
                results = module.engine.train(stage.training or module, federation, jobs, round, steps)
            if stage.training is None:
                module.after_training({n: r.state for n, r in zip(received, results, strict=True)}, round)
            yield from zip(received, received.values(), results, strict=True)

    def _share(self, order: list[int]) -> list[int]:
        """The clients that this process trains; it hears what the others' are sent, as it will hear what they send."""
        own = order[self.trainer.global_rank :: self.trainer.world_size]
        for number in [number for number in order if number not in set(own)]:
            self._hook("on_client_start", number, self.module.message_down(number))
        return own

    def _agree_on_engine(self, stage: Stage, round: int, first: list[int]) -> None:
        """Let all processes use the engine that the first of them chooses."""
        module, engine = self.module, self.module.engine
        if engine.choice is None and self.trainer.is_global_zero:
            jobs = [Job(module.client_of(n), module.begin(n, module.message_down(n))) for n in first]
            engine.choose(stage.training or module, module.federation, jobs, round)
        choice = self.trainer.strategy.broadcast(engine.choice)
        if engine.choice is None:
            engine.settle(choice)

    def _exchange(
        self, messages: list[Message], snapshots: dict[int, ClientSnapshot], down: int
    ) -> tuple[list[Message], dict[int, ClientSnapshot], int]:
        """What the clients of all processes sent, keep and received, by client; every process then does the same."""
        if self.trainer.world_size > 1:
            parts: list[Any] = [None] * self.trainer.world_size
            # Entries may be views of a stack of clients, which would be sent whole with each of them.
            own = [replace(m, tensors={name: value.clone() for name, value in m.tensors.items()}) for m in messages]
            torch.distributed.all_gather_object(parts, (own, snapshots, down))
            messages = [message for part, _, _ in parts for message in part]
            snapshots = {client: snapshot for _, part, _ in parts for client, snapshot in part.items()}
            down = sum(part for _, _, part in parts)
        return sorted(messages, key=lambda message: message.client), snapshots, down

    def _collect(self, number: int, received: State, result: Result, round: int) -> tuple[Message, ClientSnapshot]:
        module = self.module
        tensors, private = module.finish(number, result.state, received)
        message = Message(number, tensors, len(module.federation.train[module.client_of(number)]), result.loss)
        kept = {name: value.detach().clone() for name, value in private.items()}
        return message, module.snapshots[number].after(kept, round, result.steps)

    def _finite(self, messages: list[Message], snapshots: dict[int, ClientSnapshot], needed: bool) -> list[Message]:
        """Leave out clients whose update, sent or kept, is not finite; their snapshots stay as they were.

        Args:
            messages: what they sent.
            snapshots: what they keep.
            needed: whether somebody must be left.
        """
        finite = [m for m in messages if is_finite(m.tensors) and is_finite(snapshots[m.client].private)]
        bad = sorted({m.client for m in messages} - {m.client for m in finite})
        if bad:
            named = ", ".join(map(str, bad[:10])) + (" and others" if len(bad) > 10 else "")
            if needed and not finite:
                raise FederationError(
                    f"In round {self.trainer.current_epoch} the updates of all {len(bad)} clients ({named}) are not "
                    "finite: lower the learning rate or set clip_norm; the last checkpoint is intact."
                )
            rank_zero_warn(
                f"Round {self.trainer.current_epoch}: left out clients {named}, whose updates are not finite."
            )
        return finite

    def _commit(
        self, round: int, messages: list[Message], snapshots: dict[int, ClientSnapshot], tally: Tally, last: bool
    ) -> None:
        module, began = self.module, time.perf_counter()
        with _interrupts_held():
            if messages:
                module.server_step(module.aggregate(messages))
            server_seconds = time.perf_counter() - began
            for message in messages:
                if message.client in snapshots:
                    module.snapshots[message.client] = snapshots[message.client]
            module.bytes_up += tally.up
            module.bytes_down += tally.down
            module.tally = module.tally.add(replace(tally, server_seconds=server_seconds))
            module.completed_stages += 1
            if last:
                module.summary = {**module.tally.summary(), **module.round_metrics()}
                module.completed_rounds, module.completed_stages, module.tally = round + 1, 0, Tally()

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
