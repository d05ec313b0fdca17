"""Simulated clients: their data, their private entries and an engine, in this process or divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning import ranks
from fl_lightning.engine import Job
from fl_lightning.errors import FederationError
from fl_lightning.evaluation import ClientOutput, Personal, Scorer, scored
from fl_lightning.exchange import Scores, Trained, in_round, in_stacks, train_clients
from fl_lightning.federation import Federation, Split
from fl_lightning.nets import Asked, LossNet
from fl_lightning.parties import (
    JOINING,
    Introduction,
    LocalData,
    Me,
    Memory,
    Messages,
    Returned,
    Setting,
    together,
)
from fl_lightning.snapshots import ClientSnapshot
from fl_lightning.wire import Message, State, is_finite

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule


class SimulatedClients:
    """All clients of a run in this process; one method object plays each of them in turn.

    Args:
        method: the method; provides the client side, the engine and the snapshots.
    """

    simulated = True

    def __init__(self, method: FederatedModule) -> None:
        self.method = method
        self.pending: dict[int, ClientSnapshot] = {}
        self.scorer = Scorer()
        self._memories: dict[int, Memory] = {}
        self._known: Federation | None = None

    # ---- a client's view of itself ----------------------------------------------------------------------------

    @property
    def federation(self) -> Federation | None:
        """The clients' data, None while there is none."""
        trainer = self.method._trainer
        found = None if trainer is None or getattr(trainer, "datamodule", None) is None else self.method.federation
        if found is not self._known:  # results cached for other data are invalid
            self._known = found
            self._memories.clear()
        return found

    def me(self, number: int, setting: Setting) -> Me:
        """Return a client's view of itself.

        A number without a snapshot of its own starts from the client's snapshot.
        """
        federation, client = self.federation, self.method.client_of(number)
        snapshots = self.method.snapshots
        kept = snapshots[number if number in snapshots else client]
        return Me(
            client,
            number,
            setting.round,
            setting.rounds,
            setting.stage,
            setting.clients,
            self.method.seed,
            kept.private,
            None if federation is None else LocalData(federation, client),  # type: ignore[arg-type]
            memory=self._memories.setdefault(client, Memory()),
        )

    def introduce(self) -> Sequence[Introduction]:
        """Let every client introduce itself."""
        federation = self.federation
        assert federation is not None
        setting = Setting(stage=JOINING, clients=federation.num_clients)
        tokens = not federation.inputs.is_floating_point() and federation.mean is None
        shape, dtype = tuple(federation.inputs.shape[1:]), federation.inputs.dtype if tokens else None
        mes = [self.me(client, setting) for client in range(federation.num_clients)]
        return [Introduction(len(me.data), shape, dtype, self.method.introduce(me)) for me in mes]

    # ---- training ---------------------------------------------------------------------------------------------

    def train(self, setting: Setting, messages: Messages, max_steps: int | None = None) -> Iterator[Returned]:
        """Train clients stack by stack."""
        self.pending = {}
        for stack in self.share(in_stacks([self.me(number, setting) for number in messages], self.method.engine.width)):
            with self._profiled("local_training"):
                trained = train_clients(self.method, self.method.engine, messages, stack, max_steps)
            for one in trained:
                yield self._returned(one)

    def share(self, stacks: list[Sequence[Me]]) -> list[Sequence[Me]]:
        """Return the stacks that this process trains: all."""
        return stacks

    def _returned(self, one: Trained) -> Returned:
        """Wrap a trained client; its new snapshot is pending until the stage ends."""
        me, kept = one.me, one.keep
        if kept is not None:
            self.pending[me.number] = self.method.snapshots[me.number].after(kept, me.round, one.steps)
        message = Message(me.number, one.up, len(me.data), one.loss)
        return Returned(message, kept is not None, kept is None or is_finite(kept))

    def gather(self, returned: list[Returned]) -> list[Returned]:
        """Sort the results by the clients' numbers."""
        return sorted(returned, key=lambda one: one.message.client)

    def commit(self, numbers: Iterable[int], round: int) -> None:
        """Replace the snapshots of these clients."""
        for number in numbers:
            if number in self.pending:
                self.method.snapshots[number] = self.pending[number]
        self.pending = {}

    # ---- evaluation -------------------------------------------------------------------------------------------

    def personal(self, setting: Setting, messages: Messages) -> Iterator[tuple[Me, State]]:
        """Yield the models on which clients are evaluated, made from these messages."""
        for me, received in self._settled(setting, messages):
            yield me, self.method.personal(received, me)

    def tell(self, setting: Setting, messages: Messages) -> Mapping[int, State]:
        """Return the reports of clients that are evaluated with these messages."""
        return {me.client: self.method.tell(received, me) for me, received in self._settled(setting, messages)}

    def evaluated(self, client: int) -> int:
        """Return the number under which a client is evaluated."""
        return self.method.evaluated_as(client)

    def _settled(self, setting: Setting, messages: Messages) -> list[tuple[Me, State]]:
        """Return the clients with the private entries that their evaluation needs, and their messages."""
        mes = [self.me(self.evaluated(client), setting) for client in messages]
        received = list(messages.values())
        found = self.method.settle(received, mes)
        settled = [replace(me, private={**me.private, **m}) if m else me for me, m in zip(mes, found, strict=True)]
        return list(zip(settled, received, strict=True))

    def outputs(self, setting: Setting, messages: Messages, split: Split) -> Iterator[ClientOutput]:
        """Yield the outputs of each client's own model on its samples, with the targets."""
        federation = self.federation
        assert federation is not None

        def models() -> Iterator[Personal]:
            for me, state in self.personal(setting, messages):
                received = {value.data_ptr() for value in messages[me.client].values()}
                yield Personal(me.data.row, state, all(value.data_ptr() in received for value in state.values()))

        return self.scorer.outputs(self.method, federation, models(), split)

    def evaluate(self, setting: Setting, messages: Messages, split: Split) -> Scores:
        """Let clients score their models on their own samples."""
        federation = self.federation
        assert federation is not None
        scores = scored(self.outputs(setting, messages, split), federation.device, self.method.task)
        net = self.method.net
        if not isinstance(net, LossNet) or not net.logs(split):
            return scores
        logged = [self._logged(me, state, split) for me, state in self.personal(setting, messages)]
        place = {int(client): i for i, client in enumerate(scores.clients)}
        found = {name: scores.loss.new_full((len(place),), torch.nan) for one in logged for name in one[1]}
        for client, values in logged:
            for name, value in values.items():
                found[name][place[client]] = value
        return scores._replace(metrics={**scores.metrics, **found})

    def _logged(self, me: Me, state: State, split: Split) -> tuple[int, dict[str, torch.Tensor]]:
        """Return a client and the metrics that its net logs over all samples of a split."""
        size = max(1, me.data.sizes()[split])
        ((x, y),) = me.data.batches(size, self.method.compute_dtype, split)
        with torch.no_grad():
            return me.data.row, self.method.functional(state, Asked(x, y, split), {}, training=False)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the clients' state, for a checkpoint."""
        return self.method.snapshots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the clients' private entries."""
        if "versions" in state and self.method._trainer is not None:
            raise FederationError(
                "The checkpoint's clients are real sites, which keep their own state: continue it with fl-lightning "
                "serve; load_from_checkpoint gives the server's model."
            )
        self.method.snapshots.load_state_dict(state)

    def reset(self) -> None:
        """Drop everything prepared for a run."""
        self.method.engine.reset()
        self.scorer.clear()
        self.pending = {}

    def _profiled(self, action: str) -> Any:
        trainer = self.method._trainer
        return nullcontext() if trainer is None else trainer.profiler.profile(action)  # type: ignore[attr-defined]


class RankedClients(SimulatedClients):
    """Simulated clients divided among the ranks of a ``ddp`` run; every rank gets all results."""

    def train(self, setting: Setting, messages: Messages, max_steps: int | None = None) -> Iterator[Returned]:
        """Train this rank's share of the clients."""
        self._agree_on_engine(setting, messages)
        return super().train(setting, messages, max_steps)

    def share(self, stacks: list[Sequence[Me]]) -> list[Sequence[Me]]:
        """Return every n-th client for n ranks, restacked."""
        trainer = self.method.trainer
        order = [me for stack in stacks for me in stack][trainer.global_rank :: trainer.world_size]
        width = self.method.engine.width
        return [order[start : start + width] for start in range(0, len(order), width)]

    def gather(self, returned: list[Returned]) -> list[Returned]:
        """All-gather the results, so that every rank then computes the same."""
        parts: list[Any] = [None] * self.method.trainer.world_size
        # Entries may be views of a stack of clients, and pickling a view sends its whole storage.
        own = [
            one._replace(message=replace(one.message, tensors={n: v.clone() for n, v in one.message.tensors.items()}))
            for one in returned
        ]
        with ranks.crossing():
            torch.distributed.all_gather_object(parts, (own, self.pending))
        self.pending = {number: snapshot for _, part in parts for number, snapshot in part.items()}
        return super().gather([one for part, _ in parts for one in part])

    def _agree_on_engine(self, setting: Setting, messages: Messages) -> None:
        """Choose an engine on rank 0 and broadcast the choice, once."""
        engine, trainer = self.method.engine, self.method.trainer
        if engine.choice is not None:
            return
        if trainer.is_global_zero:
            mes = in_stacks([self.me(number, setting) for number in messages], engine.width)[0]
            federation, rows = together([me.data for me in mes])
            states = [self.method.enter(messages[me.number], me) for me in mes]
            jobs = [Job(row, state) for row, state in zip(rows, states, strict=True)]
            with in_round(self.method, setting.round, setting.rounds):
                engine.choose(self.method.plan(mes[0]), federation, jobs, setting.round)
        with ranks.crossing():
            choice = trainer.strategy.broadcast(engine.choice)
        if engine.choice is None and choice is not None:
            engine.settle(choice)
