"""The exchange between server and clients: who answers is a :class:`Clients`, here, in other processes or elsewhere."""

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
    """Scores of clients, one number for each: summed losses, samples, metrics; samples never leave them."""

    clients: Tensor
    loss: Tensor
    total: Tensor
    metrics: Mapping[str, Tensor]

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of clients that answered apart."""
        metrics = {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics}
        clients, loss, total = (torch.cat(tensors) for tensors in zip(*(part[:3] for part in parts), strict=True))
        return cls(clients, loss, total, metrics)


class Clients(Protocol):
    """All clients of a run, as its server sees them."""

    #: True if the clients are simulated here, so that their data can be looked at for reports.
    simulated: bool

    def introduce(self) -> Sequence[Introduction]:
        """Let every client introduce itself, in the order of their numbers."""
        ...

    def train(self, setting: Setting, messages: Messages, max_steps: int | None = None) -> Iterator[Returned]:
        """Train clients and yield what they return, as they end; of several processes each yields its own share.

        Args:
            setting: round and stage.
            messages: what the server sends, by the numbers of the cohort.
            max_steps: local steps at most, for trials; None does not bound them.
        """
        ...

    def gather(self, returned: list[Returned]) -> list[Returned]:
        """Gather the replies of all processes' clients, in the order of their numbers."""
        ...

    def commit(self, numbers: Iterable[int], round: int) -> None:
        """Let these clients keep what they came to in the stage that ends; all others keep what they had."""
        ...

    def reset(self) -> None:
        """Forget what was prepared for a run, and stop what works for it."""
        ...

    def evaluate(self, setting: Setting, messages: Messages, split: Split) -> Scores:
        """Let clients score the models that they make of these messages, on their own samples."""
        ...

    def tell(self, setting: Setting, messages: Messages) -> Mapping[int, State]:
        """Evaluate clients with these messages, and return their reports."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The clients' state for a checkpoint: plain dicts of tensors, numbers and strings."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what :meth:`state_dict` gave."""
        ...


@dataclass
class Trained:
    """One client after its local training.

    Args:
        me: the client.
        up: what it sends.
        keep: what it keeps; None keeps what it had.
        loss: mean loss of its steps, NaN if it took none.
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
    """One round of a stack of clients: enter, train, survey, leave. Nothing is kept.

    Args:
        method: the client's side.
        engine: trains the stack.
        received: the messages to the clients, by their numbers.
        mes: the clients, all in the same round and stage.
        max_steps: local steps at most; None does not bound them.
        plan: what they train by; None means what the method says.
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
    """Let the learning rate be that of a round; either side of a method may ask for it.

    Args:
        method: the method.
        round: the round, from 0.
        rounds: how many rounds the run has, -1 if that is open.
    """
    before = method.local
    method.local = before.in_round(round, rounds)
    try:
        yield
    finally:
        method.local = before


def in_stacks(mes: Sequence[Me], width: int) -> list[Sequence[Me]]:
    """The clients in stacks of at most ``width``, similar sizes together."""
    order = sorted(mes, key=lambda me: (-len(me.data), me.number))
    return [order[start : start + width] for start in range(0, len(order), width)]


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Keep no low-precision copies of weights: local steps change weights in place, so copies would be stale."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
