"""``FederatedLoop``: one round, called by the training step of a stock ``Trainer.fit``.

A round is one epoch, one stock "batch" and one step of the server's optimizer, so progress, checkpoints, early
stopping and loggers of a stock ``Trainer`` count rounds.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning import signals
from fl_lightning.errors import FederationError
from fl_lightning.exchange import in_round
from fl_lightning.message_checks import Layout, check_message, layout_of
from fl_lightning.nets import LossNet
from fl_lightning.parties import Returned, Setting, Stage
from fl_lightning.wire import Message, State, nbytes

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

#: Reason for leaving out an update that is not finite; other reasons may end with it.
NOT_FINITE = "is not finite"
#: Clients and local steps of a round with ``Trainer(fast_dev_run=True)``.
DEV_CLIENTS, DEV_STEPS = 2, 2
#: A cross entropy far above that of guessing, for any number of classes.
LOST = 1000.0


@dataclass(frozen=True)
class Tally:
    """Running totals over the stages of a round.

    Args:
        up: bytes sent by clients.
        down: bytes sent by the server.
        trained: number of clients whose messages were aggregated.
        left_out: number of clients whose updates were rejected.
        samples: samples of the trained clients that took at least one step.
        loss: their losses, weighted by samples.
        clients_seconds: duration of local training, including its overhead.
        server_seconds: duration of the aggregation and the server's step.
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
        """Return these totals with the clients of a stage counted."""
        known = [m for m in messages if not math.isnan(m.loss)]
        samples, loss = sum(m.samples for m in known), sum(m.loss * m.samples for m in known)
        return replace(self, trained=len(messages), left_out=left_out, samples=samples, loss=loss)

    def add(self, other: Tally) -> Tally:
        """Return the sum of these totals and those of a later stage."""
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def summary(self) -> dict[str, float]:
        """Return the metrics of the round; the loss is the mean over samples."""
        return {
            "train/loss": self.loss / self.samples if self.samples else math.nan,
            "comm/up_bytes": float(self.up),
            "comm/down_bytes": float(self.down),
            "clients/trained": float(self.trained),
            "clients/left_out": float(self.left_out),
            "time/clients": self.clients_seconds,
            "time/server": self.server_seconds,
        }


class FederatedLoop:
    """Runs one round each time it is called.

    A round has one stage unless the method divides it. A stage is atomic: the server's model and the clients' snapshots
    change together at its end, so a run that stops within a stage resumes at its beginning. A run that stops after the
    last stage, with a checkpoint written before Lightning counted the round, does not repeat the round.

    Args:
        module: the federated method, attached to a Trainer.
    """

    def __init__(self, module: FederatedModule) -> None:
        self.module = module
        self._diverged = False

    @property
    def trainer(self) -> Any:
        """The module's Trainer, untyped because Lightning attaches much of what is used here at run time."""
        return self.module.trainer

    def run(self) -> dict[str, float]:
        """Run round ``trainer.current_epoch`` unless it is already done, and return its metrics."""
        round = self.trainer.current_epoch
        if self.module.completed_rounds <= round:
            self._round(round)
        return self.module.summary

    def _round(self, round: int) -> None:
        """Run all stages of the round except those completed before the run was resumed."""
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
            messages += self._stage(stages[number], last=number + 1 == len(stages))
        self._warn_of_divergence(round)
        self._hook("on_round_end", messages)

    def _warn_of_divergence(self, round: int) -> None:
        """Warn once if the classification loss is far above that of an untrained net."""
        module, loss = self.module, self.module.summary["train/loss"]
        if loss > LOST and not self._diverged and module.task.of_classes and not isinstance(module.net, LossNet):
            self._diverged = True
            rank_zero_warn(
                f"The mean training loss of round {round} is {loss:.3g}: the run diverges, lower the learning rate or "
                "set clip_norm."
            )

    def coming(self) -> dict[int, tuple[Setting, State]]:
        """Return the messages and settings of the next round's first stage, without calling hooks."""
        module, round = self.module, self.module.completed_rounds
        stage = next((stage for stage in module.stages(round, module.cohort(round)) if stage.clients), None)
        if stage is None:
            return {}
        before, module.stage = module.stage, stage
        try:
            make = module.message_down if stage.send is None else stage.send
            return {number: (module.setting(stage.name), make(number)) for number in sorted(stage.clients)}
        finally:
            module.stage = before

    def _stage(self, stage: Stage, last: bool) -> list[Message]:
        """Train a stage's clients, commit the server's update, and return the aggregated messages."""
        module, began = self.module, time.perf_counter()
        module.stage = stage
        signals.check()
        sent = self._send(stage)
        returned: list[Returned] = []
        steps = DEV_STEPS if self.trainer.fast_dev_run else None
        for one in module.exchange.train(module.setting(stage.name), sent, steps):
            self._hook("on_client_end", one.message.client, one.message)
            returned.append(one)
        returned = module.exchange.gather(returned)
        for one in returned:
            self._hook("on_message_up", one.message.client, one.message)
        tally = Tally(up=sum(one.message.nbytes for one in returned), down=sum(map(nbytes, sent.values())))
        kept = self._accepted(returned, stage.needed or (last and not module.tally.trained))
        if kept:
            self._hook("on_before_aggregate", kept)
        tally = replace(tally, clients_seconds=time.perf_counter() - began)
        if any(one.counts for one in returned):
            tally = tally.count(kept, len(returned) - len(kept))
        self._commit(stage, kept, tally, last)
        return kept

    def _send(self, stage: Stage) -> dict[int, State]:
        """Make the messages to the clients of a stage."""
        make = self.module.message_down if stage.send is None else stage.send
        sent: dict[int, State] = {}
        for number in sorted(stage.clients):
            sent[number] = make(number)
            self._hook("on_client_start", number, sent[number])
        return sent

    def _accepted(self, returned: list[Returned], needed: bool) -> list[Message]:
        """Return the valid messages; clients with invalid updates are left out and keep their snapshots.

        Args:
            returned: the clients' results.
            needed: whether to fail if no message is valid.
        """
        module, expected = self.module, self._expected(returned)
        wrong: dict[int, str] = {}
        for one in returned:
            number, introduced = one.message.client, module.roster[module.client_of(one.message.client)].samples
            found = check_message(expected, one.message.tensors, one.message.samples, introduced)
            if found is not None or not one.sound:
                wrong[number] = found or NOT_FINITE
        accepted = [one.message for one in returned if one.message.client not in wrong]
        self._report(wrong, needed and not accepted)
        return accepted

    def _expected(self, returned: list[Returned]) -> Layout:
        """Return the most common layout of the messages; entries of the net have the server's shape and dtype."""
        if not returned:
            return {}
        layouts = [layout_of(one.message.tensors) for one in returned]
        counted = Counter(tuple(sorted((name, *entry) for name, entry in layout.items())) for layout in layouts)
        ((common, _),) = counted.most_common(1)
        own = layout_of(self.module.server_state())
        return {name: own.get(name, (shape, dtype)) for name, shape, dtype in common}

    def _report(self, wrong: dict[int, str], lost: bool) -> None:
        """Warn of clients that are left out, or fail if none remains."""
        round = self.trainer.current_epoch
        unsound = sorted(number for number, reason in wrong.items() if reason.endswith(NOT_FINITE))
        named = ", ".join(map(str, unsound[:10])) + (" and others" if len(unsound) > 10 else "")
        strange = [f"client {number}: {reason}" for number, reason in sorted(wrong.items()) if number not in unsound]
        if lost and not wrong:
            raise FederationError(f"In round {round} no client answered.")
        if lost and unsound and not strange:
            raise FederationError(
                f"In round {round} the updates of all {len(unsound)} clients ({named}) are not "
                "finite: lower the learning rate or set clip_norm; if a client may have sent huge values in an earlier "
                "round, set aggregation to a robust rule and resume from an earlier checkpoint."
            )
        if lost:
            raise FederationError(f"In round {round} no client sent a valid message ({'; '.join(strange[:3])}).")
        if unsound:
            rank_zero_warn(f"Round {round}: left out clients {named}, whose updates are not finite.")
        if strange:
            rank_zero_warn(f"Round {round}: left out {'; '.join(strange[:10])}.")

    def _commit(self, stage: Stage, messages: list[Message], tally: Tally, last: bool) -> None:
        """Step the server and keep the clients' snapshots, all at once."""
        module, began, round = self.module, time.perf_counter(), self.trainer.current_epoch
        absorb = module.aggregate if stage.absorb is None else stage.absorb
        with signals.held():
            if messages:
                setting = module.setting()
                with in_round(module, setting.round, setting.rounds):
                    module.server_step(absorb(messages))
            server_seconds = time.perf_counter() - began
            module.exchange.commit([message.client for message in messages], round)
            module.bytes_up += tally.up
            module.bytes_down += tally.down
            module.tally = module.tally.add(replace(tally, server_seconds=server_seconds))
            module.completed_stages += 1
            if last:
                module.summary = {**module.tally.summary(), **module.round_metrics()}
                module.completed_rounds, module.completed_stages, module.tally = round + 1, 0, Tally()

    def _hook(self, name: str, *args: Any) -> None:
        """Call a round hook of all callbacks and of the module that define it."""
        for callback in self.trainer.callbacks:
            function = getattr(callback, name, None)
            if callable(function):
                with self.trainer.profiler.profile(f"[Callback]{callback.state_key}.{name}"):
                    function(self.trainer, self.module, *args)
        function = getattr(self.module, name, None)
        if callable(function):
            function(*args)
