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

#: The reason to leave out an update that is not finite, or ends a sentence that says so.
NOT_FINITE = "is not finite"
#: Clients and local steps of a round under ``Trainer(fast_dev_run=True)``.
DEV_CLIENTS, DEV_STEPS = 2, 2
#: A cross entropy far above that of guessing among any number of classes.
LOST = 1000.0


@dataclass(frozen=True)
class Tally:
    """Running totals over the stages of a round.

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
        """Metrics of the round; the loss is the mean over samples."""
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

    A round has one stage, unless the method divides it. Nothing of a stage is kept until it is over: the server's model
    and the clients' snapshots change together at its end. A run that stops before that resumes as if the stage had not
    begun; one that stops after the last stage, with a checkpoint written before Lightning has counted the round, does
    not run the round twice.

    Args:
        module: the federated method, attached to a Trainer.
    """

    def __init__(self, module: FederatedModule) -> None:
        self.module = module
        self._diverged = False

    @property
    def trainer(self) -> Any:
        """The module's Trainer; much of what is used here Lightning attaches without types."""
        return self.module.trainer

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
            messages += self._stage(stages[number], last=number + 1 == len(stages))
        self._tell_divergence(round)
        self._hook("on_round_end", messages)

    def _tell_divergence(self, round: int) -> None:
        """Warn once where the loss of classes is one that no net has before it was trained."""
        module, loss = self.module, self.module.summary["train/loss"]
        if loss > LOST and not self._diverged and module.task.of_classes and not isinstance(module.net, LossNet):
            self._diverged = True
            rank_zero_warn(
                f"The mean training loss of round {round} is {loss:.3g}: the run diverges, lower the learning rate or "
                "set clip_norm."
            )

    def coming(self) -> dict[int, tuple[Setting, State]]:
        """The messages of the next round's first stage as things stand, with what is told of it; no hook is called."""
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
        """Train a stage's clients and commit what the server makes of their messages, which are returned."""
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
        """The messages to the clients of a stage."""
        make = self.module.message_down if stage.send is None else stage.send
        sent: dict[int, State] = {}
        for number in sorted(stage.clients):
            sent[number] = make(number)
            self._hook("on_client_start", number, sent[number])
        return sent

    def _accepted(self, returned: list[Returned], needed: bool) -> list[Message]:
        """Leave out clients whose update is not what was asked for; their snapshots stay as they were.

        Args:
            returned: what the clients returned.
            needed: whether somebody must be left.
        """
        module, expected = self.module, self._expected(returned)
        wrong: dict[int, str] = {}
        for one in returned:
            number, introduced = one.message.client, module.roster[module.client_of(one.message.client)].samples
            found = check_message(expected, one.message.tensors, one.message.samples, introduced)
            if found is not None or not one.sound:
                wrong[number] = found or NOT_FINITE
        accepted = [one.message for one in returned if one.message.client not in wrong]
        self._name(wrong, needed and not accepted)
        return accepted

    def _expected(self, returned: list[Returned]) -> Layout:
        """Names, shapes and types that most messages have; entries of the net have those of the server's."""
        if not returned:
            return {}
        layouts = [layout_of(one.message.tensors) for one in returned]
        counted = Counter(tuple(sorted((name, *entry) for name, entry in layout.items())) for layout in layouts)
        ((common, _),) = counted.most_common(1)
        own = layout_of(self.module.server_state())
        return {name: own.get(name, (shape, dtype)) for name, shape, dtype in common}

    def _name(self, wrong: dict[int, str], lost: bool) -> None:
        """Warn of clients that are left out, or end the run where nobody is left."""
        round = self.trainer.current_epoch
        unsound = sorted(number for number, reason in wrong.items() if reason.endswith(NOT_FINITE))
        named = ", ".join(map(str, unsound[:10])) + (" and others" if len(unsound) > 10 else "")
        strange = [f"client {number}: {reason}" for number, reason in sorted(wrong.items()) if number not in unsound]
        if lost and not wrong:
            raise FederationError(f"In round {round} no client answered.")
        if lost and unsound and not strange:
            raise FederationError(
                f"In round {round} the updates of all {len(unsound)} clients ({named}) are not "
                "finite: lower the learning rate or set clip_norm; if a client may have sent huge values in a round "
                "before, set aggregation to a robust rule and resume from an earlier checkpoint."
            )
        if lost:
            raise FederationError(f"In round {round} no client sent what was asked for ({'; '.join(strange[:3])}).")
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
        """Call a round hook of every callback that has it, and of the module."""
        for callback in self.trainer.callbacks:
            function = getattr(callback, name, None)
            if callable(function):
                with self.trainer.profiler.profile(f"[Callback]{callback.state_key}.{name}"):
                    function(self.trainer, self.module, *args)
        function = getattr(self.module, name, None)
        if callable(function):
            function(*args)
