"""A client as it sees itself, its data, and the values that client and server hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation, Split
from fl_lightning.wire import Message, State, under, without

T = TypeVar("T")
#: Names of the stages in which nothing is trained.
EVALUATION, SANITY_CHECK, JOINING = "evaluation", "sanity check", "joining"
#: Prefix of what a client's optimizer remembers, among what the client keeps.
OPTIMIZER = "optimizer."


class LocalData:
    """One client's own samples: all the data that its side of a method can reach.

    Args:
        source: the samples, at least this client's.
        row: the client's place in ``source``.
    """

    def __init__(self, source: Federation, row: int) -> None:
        self.source, self.row = source, row

    def __len__(self) -> int:
        return len(self.source.train[self.row])

    def sizes(self) -> dict[str, int]:
        """Number of samples by split."""
        return {split: len(self.source.index(split)[self.row]) for split in ("train", "val", "test")}

    def labels(self, split: Split = "train") -> Tensor:
        """The labels of a split, in the client's own labelling."""
        return self.source.labels([self.row], self.source.index(split)[self.row][None])[0]

    def batches(self, size: int, dtype: torch.dtype, split: Split = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """All samples of a split in a fixed order, normalised and not augmented.

        Args:
            size: samples in a batch.
            dtype: floating precision of the inputs.
            split: which of the client's samples.
        """
        for part in torch.split(self.source.index(split)[self.row], size):
            x, y = self.source.gather([self.row], part[None], dtype)
            yield x[0], y[0]


def together(parts: Sequence[LocalData]) -> tuple[Federation, list[int]]:
    """Data that holds all of these clients, and their places in it: clients of one simulation share it."""
    source = parts[0].source
    if any(part.source is not source for part in parts):
        raise FederationError("Clients whose data lie apart cannot be trained in one stack: train them one by one.")
    return source, [part.row for part in parts]


class Memory:
    """Results that a client works out from a message, kept while it receives the same tensors again.

    A convenience of one process: a client elsewhere works them out anew and comes to the same.

    Example:
        >>> memory, received = Memory(), {"w": torch.zeros(2)}
        >>> memory.recall("sum", received, lambda: float(received["w"].sum()))
        0.0
        >>> _ = received["w"].fill_(1)
        >>> memory.recall("sum", received, lambda: float(received["w"].sum()))
        2.0
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[Any], State, Any]] = {}

    def get(self, purpose: str, received: State) -> Any | None:
        """The result for these tensors, None if there is none."""
        known = self._known.get(purpose)
        return known[2] if known is not None and known[0] == _traits(received) else None

    def put(self, purpose: str, received: State, value: T) -> T:
        """Keep a result; the tensors stay referenced, so that no others take their place in memory."""
        self._known[purpose] = _traits(received), dict(received), value
        return value

    def recall(self, purpose: str, received: State, work: Callable[[], T]) -> T:
        """The result for these tensors, worked out if need be."""
        known = self.get(purpose, received)
        return self.put(purpose, received, work()) if known is None else known

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


def _traits(tensors: State) -> list[Any]:
    return [
        (name, v.data_ptr(), 0 if v.is_inference() else v._version, v.shape, v.dtype) for name, v in tensors.items()
    ]


@dataclass(frozen=True)
class Me:
    """A client as it sees itself.

    Args:
        client: its number in the federation.
        number: the number of this training; the client's own unless it trains several models in a round.
        round: the present round, from 0.
        rounds: how many rounds the run has, -1 if that is open.
        stage: name of the stage of the round.
        clients: how many clients there are.
        seed: the run's seed.
        private: entries that it kept of its last training.
        data: its own samples; None where there are none, as after ``load_from_checkpoint`` without data.
        steps: local steps just taken, for :meth:`ClientSide.leave`.
        memory: results it may keep from one message to the next.
        optimizer: what its optimizer remembers of its last training, where that is kept.
    """

    client: int
    number: int
    round: int = 0
    rounds: int = -1
    stage: str = "train"
    clients: int = 1
    seed: int = 0
    private: State = field(default_factory=dict)
    data: LocalData = None  # type: ignore[assignment] # looked at only where a client has data
    steps: int = 0
    memory: Memory = field(default_factory=Memory)
    optimizer: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Tell what the optimizer remembers from what the method keeps: both are kept together."""
        object.__setattr__(self, "optimizer", self.optimizer | under(OPTIMIZER, self.private))
        object.__setattr__(self, "private", without(OPTIMIZER, self.private))

    def stream(self, purpose: str) -> np.random.Generator:
        """The client's random stream of a purpose in this round."""
        return seeding.stream(self.seed, purpose, self.round, self.client)


class Reply(NamedTuple):
    """Message of a client, and the entries that it keeps; None keeps the old ones and is no round of its own."""

    up: State
    keep: State | None

    def plus(self, up: State | None = None, keep: State | None = None) -> Reply:
        """The same with more that is sent, or kept."""
        kept = self.keep if self.keep is None or keep is None else {**self.keep, **keep}
        return Reply({**self.up, **(up or {})}, kept)


class Returned(NamedTuple):
    """One client's training, seen from the server."""

    message: Message
    counts: bool = True
    """Whether it counts as a round of the client's."""
    sound: bool = True
    """Whether all that the client keeps is finite."""


@dataclass(frozen=True)
class Introduction:
    """Introduction of a client that joins.

    Args:
        samples: its number of training samples, which every message says again.
        shape: shape of a sample.
        dtype: type of its inputs as the net gets them, None for the net's own precision.
        told: what the method's clients tell besides.
    """

    samples: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    told: State = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A part of a round: clients that train side by side and whose messages the server then aggregates.

    Args:
        clients: who trains; a stage without clients is left out.
        name: how clients tell the stages apart.
        send: makes the message to a client; None means the method's ``message_down``.
        absorb: turns the messages into new values of the server's entries; None means the method's ``aggregate``.
        needed: whether the round cannot go on without it; else one in which no client's update is finite changes
            nothing, as long as another stage of the round has one that is.
    """

    clients: Sequence[int]
    name: str = "train"
    send: Callable[[int], State] | None = None
    absorb: Callable[[list[Message]], State] | None = None
    needed: bool = False


@dataclass(frozen=True)
class Setting:
    """Message of the server to every client of a stage.

    Args:
        round: the present round, from 0.
        rounds: how many rounds the run has, -1 if that is open.
        stage: name of the stage.
        clients: how many clients there are.
    """

    round: int = 0
    rounds: int = -1
    stage: str = "train"
    clients: int = 1


#: Messages by the numbers of the clients that they are for.
Messages = Mapping[int, State]
