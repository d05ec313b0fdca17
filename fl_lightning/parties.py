"""The client's view of itself and its data, and the values exchanged by client and server."""

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
#: Names of the stages without training.
EVALUATION, SANITY_CHECK, JOINING = "evaluation", "sanity check", "joining"
#: Prefix of the local optimizer's state among the entries that a client keeps.
OPTIMIZER = "optimizer."


class LocalData:
    """One client's own samples: the only data that its side of a method can access.

    Args:
        source: a federation that contains this client.
        row: the client's index in ``source``.
    """

    def __init__(self, source: Federation, row: int) -> None:
        self.source, self.row = source, row

    def __len__(self) -> int:
        return len(self.source.train[self.row])

    def sizes(self) -> dict[str, int]:
        """Return the number of samples by split."""
        return {split: len(self.source.index(split)[self.row]) for split in ("train", "val", "test")}

    def labels(self, split: Split = "train") -> Tensor:
        """Return the labels of a split, under the client's own label permutation."""
        return self.source.labels([self.row], self.source.index(split)[self.row][None])[0]

    def batches(self, size: int, dtype: torch.dtype, split: Split = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all samples of a split in a fixed order, normalised but not augmented.

        Args:
            size: batch size.
            dtype: floating precision of the inputs.
            split: the split to read.
        """
        for part in torch.split(self.source.index(split)[self.row], size):
            x, y = self.source.gather([self.row], part[None], dtype)
            yield x[0], y[0]


def together(parts: Sequence[LocalData]) -> tuple[Federation, list[int]]:
    """Return the federation that these clients share, and their rows in it."""
    source = parts[0].source
    if any(part.source is not source for part in parts):
        raise FederationError("Clients with separate data cannot be trained in one stack: train them one by one.")
    return source, [part.row for part in parts]


class Memory:
    """Cache of results that a client computes from a message, valid while it receives the same tensors.

    An optimisation within one process: a client elsewhere recomputes them and gets the same.

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
        """Return the result for these tensors, None if there is none."""
        known = self._known.get(purpose)
        return known[2] if known is not None and known[0] == _traits(received) else None

    def put(self, purpose: str, received: State, value: T) -> T:
        """Store a result; the tensors stay referenced, so that their memory cannot be reused."""
        self._known[purpose] = _traits(received), dict(received), value
        return value

    def recall(self, purpose: str, received: State, work: Callable[[], T]) -> T:
        """Return the result for these tensors, computed if necessary."""
        known = self.get(purpose, received)
        return self.put(purpose, received, work()) if known is None else known

    def clear(self) -> None:
        """Drop all results."""
        self._known.clear()


def _traits(tensors: State) -> list[Any]:
    return [
        (name, v.data_ptr(), 0 if v.is_inference() else v._version, v.shape, v.dtype) for name, v in tensors.items()
    ]


@dataclass(frozen=True)
class Me:
    """A client's view of itself.

    Args:
        client: its number in the federation.
        number: the number of this training; the client's own unless it trains several models in a round.
        round: the current round, from 0.
        rounds: number of rounds of the run, -1 if unlimited.
        stage: name of the stage of the round.
        clients: number of clients.
        seed: the run's seed.
        private: entries kept from its last training.
        data: its own samples; None if there are none, for example after ``load_from_checkpoint`` without data.
        steps: local steps just taken, for :meth:`ClientSide.leave`.
        memory: cache of results across messages.
        optimizer: state of its optimizer after its last training, if kept.
    """

    client: int
    number: int
    round: int = 0
    rounds: int = -1
    stage: str = "train"
    clients: int = 1
    seed: int = 0
    private: State = field(default_factory=dict)
    data: LocalData = None  # type: ignore[assignment] # only read where a client has data
    steps: int = 0
    memory: Memory = field(default_factory=Memory)
    optimizer: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Split what the client keeps into the optimizer's state and the method's entries."""
        object.__setattr__(self, "optimizer", self.optimizer | under(OPTIMIZER, self.private))
        object.__setattr__(self, "private", without(OPTIMIZER, self.private))

    def stream(self, purpose: str) -> np.random.Generator:
        """Return the client's RNG stream for a purpose in this round."""
        return seeding.stream(self.seed, purpose, self.round, self.client)


class Reply(NamedTuple):
    """A client's message and the entries it keeps; ``keep=None`` keeps the old ones and does not count as a round."""

    up: State
    keep: State | None

    def plus(self, up: State | None = None, keep: State | None = None) -> Reply:
        """Return this reply with further entries to send or to keep."""
        kept = self.keep if self.keep is None or keep is None else {**self.keep, **keep}
        return Reply({**self.up, **(up or {})}, kept)


class Returned(NamedTuple):
    """The result of one client's training, as the server sees it."""

    message: Message
    counts: bool = True
    """Whether it counts as a round of the client."""
    sound: bool = True
    """Whether all entries that the client keeps are finite."""


@dataclass(frozen=True)
class Introduction:
    """Sent by a client when it joins.

    Args:
        samples: its number of training samples, repeated in every message.
        shape: shape of a sample.
        dtype: dtype of the net's inputs, None for the net's own precision.
        told: further entries, from the method's ``introduce``.
    """

    samples: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    told: State = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Part of a round: clients that train in parallel, and the aggregation of their messages.

    Args:
        clients: the clients that train; a stage without clients is skipped.
        name: lets clients distinguish the stages.
        send: makes the message to a client; None means the method's ``message_down``.
        absorb: turns the messages into new values of the server's entries; None means the method's ``aggregate``.
        needed: whether the round must fail if no update of this stage is finite; otherwise such a stage changes
            nothing, as long as another stage of the round has a finite update.
    """

    clients: Sequence[int]
    name: str = "train"
    send: Callable[[int], State] | None = None
    absorb: Callable[[list[Message]], State] | None = None
    needed: bool = False


@dataclass(frozen=True)
class Setting:
    """Sent by the server to every client of a stage.

    Args:
        round: the current round, from 0.
        rounds: number of rounds of the run, -1 if unlimited.
        stage: name of the stage.
        clients: number of clients.
    """

    round: int = 0
    rounds: int = -1
    stage: str = "train"
    clients: int = 1


#: Messages by the numbers of their recipients.
Messages = Mapping[int, State]
