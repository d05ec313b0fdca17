"""The exchange between server and clients: a :class:`Clients` runs them here, in other processes or at remote sites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fl_lightning.engine import Engine, Job, LocalMethod
from fl_lightning.federation import Split
from fl_lightning.model import NamedModel
from fl_lightning.parties import OPTIMIZER, Introduction, Me, Messages, Returned, Setting, together
from fl_lightning.wire import State, prefixed

if TYPE_CHECKING:
    from fl_lightning.contract import ClientSide


class Scores(NamedTuple):
    """Scores of clients, one number per client: summed losses, sample counts, metrics. No samples."""

    clients: Tensor
    loss: Tensor
    total: Tensor
    metrics: Mapping[str, Tensor]

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Concatenate the scores of clients that were evaluated separately."""
        metrics = {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics}
        clients, loss, total = (torch.cat(tensors) for tensors in zip(*(part[:3] for part in parts), strict=True))
        return cls(clients, loss, total, metrics)


class Clients(Protocol):
    """All clients of a run, as its server sees them."""

    #: True if the clients are simulated in this process, so that reports may read their data.
    simulated: bool

    def introduce(self) -> Sequence[Introduction]:
        """Return every client's introduction, in the order of their numbers."""
        ...

    def train(self, setting: Setting, messages: Messages, max_steps: int | None = None) -> Iterator[Returned]:
        """Train clients and yield their results as they finish; each of several processes yields its own share.

        Args:
            setting: round and stage.
            messages: the server's messages, by the numbers of the cohort.
            max_steps: maximum number of local steps, for trials; None means no limit.
        """
        ...

    def gather(self, returned: list[Returned]) -> list[Returned]:
        """Gather the results of all processes, in the order of the clients' numbers."""
        ...

    def commit(self, numbers: Iterable[int], round: int) -> None:
        """Store the new private entries of these clients at the end of a stage; other clients keep the old ones."""
        ...

    def reset(self) -> None:
        """Drop everything prepared for a run, and stop its workers."""
        ...

    def evaluate(self, setting: Setting, messages: Messages, split: Split) -> Scores:
        """Let clients score the models made from these messages, on their own samples."""
        ...

    def tell(self, setting: Setting, messages: Messages) -> Mapping[int, State]:
        """Return the reports of clients that are evaluated with these messages."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the clients' state for a checkpoint: plain dicts of tensors, numbers and strings."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        ...


@dataclass
class Trained:
    """One client after its local training.

    Args:
        me: the client.
        up: the entries that it sends.
        keep: the entries that it keeps; None keeps the old ones.
        loss: mean loss over its steps, NaN if it took none.
        steps: number of its steps.
    """

    me: Me
    up: State
    keep: State | None
    loss: float
    steps: int


def train_clients(
    method: ClientSide,
    engine: Engine,
    received: Mapping[int, State],
    mes: Sequence[Me],
    max_steps: int | None = None,
    plan: LocalMethod | None = None,
) -> list[Trained]:
    """Run one round for a stack of clients: enter, train, survey, leave. Nothing is stored.

    Args:
        method: the client's side.
        engine: the engine that trains the stack.
        received: the messages to the clients, by their numbers.
        mes: the clients, all in the same round and stage.
        max_steps: maximum number of local steps; None means no limit.
        plan: the local method; None means the one of ``method.plan``.
    """
    federation, rows = together([me.data for me in mes])
    with in_round(method, mes[0].round, mes[0].rounds):
        states = [method.enter(received[me.number], me) for me in mes]
        jobs = [Job(*own) for own in zip(rows, states, (me.optimizer for me in mes), strict=True)]
        training = method.plan(mes[0]) if plan is None else plan
        with no_autocast_cache():
            results = engine.train(training, federation, jobs, mes[0].round, max_steps)
        method.survey([result.state for result in results], mes)
        trained = []
        for me, result in zip(mes, results, strict=True):
            up, keep = method.leave(result.state, received[me.number], replace(me, steps=result.steps))
            whole = None if keep is None else {**keep, **prefixed(OPTIMIZER, result.optimizer)}
            kept = None if whole is None else {name: value.detach().clone() for name, value in whole.items()}
            trained.append(Trained(me, up, kept, result.loss, result.steps))
    return trained


@contextmanager
def in_round(method: NamedModel, round: int, rounds: int) -> Iterator[None]:
    """Set the learning rate of a round, for either side of a method.

    Args:
        method: the method.
        round: the round, from 0.
        rounds: number of rounds of the run, -1 if unlimited.
    """
    before = method.local
    method.local = before.in_round(round, rounds)
    try:
        yield
    finally:
        method.local = before


def in_stacks(mes: Sequence[Me], width: int) -> list[Sequence[Me]]:
    """Split the clients into stacks of at most ``width``, with clients of similar size together."""
    order = sorted(mes, key=lambda me: (-len(me.data), me.number))
    return [order[start : start + width] for start in range(0, len(order), width)]


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Disable autocast's weight cache: local steps change weights in place, so cached copies would be stale."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
