"""Messages of some clients, recorded in a run or requested after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.engine import settled
from fl_lightning.exchange import train_clients
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.profiles import remaining
from fl_lightning.wire import Message, State, Weighting, message_weights, weighted_mean

T = TypeVar("T")
#: A client's defences: change a message in place, given the received one.
Protection = Callable[[State, Message], None]


@dataclass
class Wire:
    """The last messages of the most recent clients; recent messages make attacks stronger.

    Args:
        clients: number of clients to keep messages of; None means all.
        memory: number of messages kept of each client.
    """

    clients: int | None = None
    memory: int = 3
    #: Up messages by client, in order of time; the most recent client is last.
    sent: dict[int, deque[State]] = field(default_factory=dict)
    #: The received message before each of them; empty if not recorded.
    received: dict[int, deque[State]] = field(default_factory=dict)
    #: Weighted means of rounds in order, if recorded.
    means: deque[State] = field(default_factory=deque)
    #: Means without all other clients' messages, by client, in order.
    left: dict[int, deque[State]] = field(default_factory=dict)
    _down: dict[int, State] = field(default_factory=dict)

    def hand(self, client: int, message: State) -> None:
        """Record a down message, which precedes the client's next up message."""
        self._down[client] = message

    def note(self, client: int, message: State) -> None:
        """Record an up message, and drop the least recent client if there are too many."""
        for kept, heard in ((self.sent, message), (self.received, self._down.pop(client, {}))):
            messages = kept.pop(client, deque(maxlen=self.memory))
            messages.append({name: value.detach().clone() for name, value in heard.items()})
            kept[client] = messages
            if self.clients is not None and len(kept) > self.clients:
                gone = next(iter(kept))
                del kept[gone]
                self.left.pop(gone, None)

    def note_mean(self, messages: Sequence[Message], weighting: Weighting, apart: Sequence[int] = ()) -> None:
        """Record the mean of a stage's messages, also without the messages of colluding clients.

        Args:
            messages: all messages of the stage.
            weighting: weighting of the mean.
            apart: clients whose messages are recovered by subtracting all others from the mean.
        """
        if not messages or not messages[0].tensors:
            return
        weights = message_weights(messages, weighting)
        mean = weighted_mean(messages, weights)
        self.means = deque([*self.means, mean], maxlen=self.memory)
        for place, message in enumerate(messages):
            if message.client in apart:
                known = [other.tensors for other in messages if other is not message]
                rest = [w for number, w in enumerate(weights) if number != place]
                kept = self.left.setdefault(message.client, deque(maxlen=self.memory))
                kept.append(remaining(mean, rest, known, weights[place]))

    def exchanged(self, client: int) -> list[tuple[State, State]]:
        """Return pairs of messages to and from a client, in order."""
        both = zip(self.received[client], self.sent[client], strict=True)
        return [(received, sent) for received, sent in both if sent]


@dataclass
class Run:
    """A federated run as seen by attacks.

    Args:
        module: the method, with the server's model.
        wire: the recorded messages.
        private: the clients' private state, used by the insider's view only.
    """

    module: FederatedModule
    wire: Wire
    private: dict[int, State]
    #: Guessed private entries by client, shared by all views.
    guesses: dict[tuple[str, int], State] = field(default_factory=dict)
    #: Progress function, called with the numbers of finished and of all targets.
    watch: Callable[[int, int], None] | None = None
    #: Defences applied to requested messages.
    protect: Protection | None = None

    def each(self, targets: Sequence[T]) -> Iterator[T]:
        """Iterate over the targets of an attack, and report progress to ``watch``."""
        for done, target in enumerate(targets):
            if self.watch is not None:
                self.watch(done, len(targets))
            yield target
        if self.watch is not None:
            self.watch(len(targets), len(targets))

    @property
    def clients(self) -> list[int]:
        """Clients with recorded messages."""
        return sorted(self.wire.sent)


class Wiretap(Callback):
    """Records the messages of a run.

    Args:
        wire: storage of the messages.
        sums: whether to record means of rounds too, also without all other clients.
    """

    def __init__(self, wire: Wire, sums: bool = False) -> None:
        self.wire, self.sums = wire, sums

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Record a message to a client."""
        self.wire.hand(client, message)

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Record a message from a client."""
        self.wire.note(client, message.tensors)

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Record the mean."""
        if self.sums:
            assert isinstance(pl_module, FederatedModule)
            self.wire.note_mean(messages, pl_module.weighting, [m.client for m in messages])


def finished(module: FederatedModule, wire: Wire) -> Run:
    """Return a recorded run, with the clients' current private state."""
    return Run(module, wire, {client: dict(module.snapshots[client].private) for client in wire.sent})


def intercept(
    module: FederatedModule,
    clients: Sequence[int],
    protect: Protection | None = None,
    others: Sequence[int] | None = None,
    hidden: bool = False,
) -> Run:
    """Request messages of the next round, for a run without recorded messages, such as from a checkpoint.

    Server and snapshots do not change.

    Args:
        module: a trained method under a Trainer with its data.
        clients: the clients to request messages from.
        protect: the clients' defences, applied to messages.
        others: further clients of the round, for the mean of all messages; None computes no mean.
        hidden: whether secure aggregation hides the messages.
    """
    run, engine = Run(module, Wire(memory=1), {}), settled(module.engine)
    everybody, messages = [*clients, *(others or ())], list[Message]()
    with torch.inference_mode(False), torch.enable_grad():
        for start in range(0, len(everybody), engine.width):
            received = {client: module.message_down(client) for client in everybody[start : start + engine.width]}
            mes = [module.simulation.me(client, module.setting()) for client in received]
            for one in train_clients(module, engine, received, mes):
                client, message = one.me.number, Message(one.me.number, one.up, len(one.me.data))
                if protect is not None:
                    protect(received[client], message)
                messages.append(message)
                if client in clients:
                    run.wire.hand(client, received[client])
                    run.wire.note(client, {} if hidden else message.tensors)
                    run.private[client] = one.keep or {}
    if others is not None:
        run.wire.note_mean(messages, module.weighting, clients)
    return run
