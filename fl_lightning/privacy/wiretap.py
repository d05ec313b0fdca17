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
#: What a client does to a message before it leaves, given what it received.
Protection = Callable[[State, Message], None]


@dataclass
class Wire:
    """The last messages of the clients that were heard last: the fresher a message, the stronger an attack.

    Args:
        clients: of how many clients messages are kept; None means all.
        memory: how many messages are kept of each.
    """

    clients: int | None = None
    memory: int = 3
    #: Up messages by client, the last one at the end, and the client heard last at the end.
    sent: dict[int, deque[State]] = field(default_factory=dict)
    #: What the client had received before each of them; empty where that was not heard.
    received: dict[int, deque[State]] = field(default_factory=dict)
    #: Weighted means of the rounds, the last one at the end; noted if they are asked for.
    means: deque[State] = field(default_factory=deque)
    #: What is left of a mean if all messages but the client's are taken off, by client, the last one at the end.
    left: dict[int, deque[State]] = field(default_factory=dict)
    _down: dict[int, State] = field(default_factory=dict)

    def hand(self, client: int, message: State) -> None:
        """Hear a down message, which the client's next up message answers."""
        self._down[client] = message

    def note(self, client: int, message: State) -> None:
        """Keep a copy of an up message, and forget the client that was silent for longest if there are too many."""
        for kept, heard in ((self.sent, message), (self.received, self._down.pop(client, {}))):
            messages = kept.pop(client, deque(maxlen=self.memory))
            messages.append({name: value.detach().clone() for name, value in heard.items()})
            kept[client] = messages
            if self.clients is not None and len(kept) > self.clients:
                gone = next(iter(kept))
                del kept[gone]
                self.left.pop(gone, None)

    def note_mean(self, messages: Sequence[Message], weighting: Weighting, apart: Sequence[int] = ()) -> None:
        """Keep the mean of a stage's messages, and what clients that collude with the server leave of it.

        Args:
            messages: all of the stage.
            weighting: of the mean.
            apart: clients whose messages are to be found by taking all others off the mean.
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
        """Messages to a client and its answers, where it answered at all, the last at the end."""
        both = zip(self.received[client], self.sent[client], strict=True)
        return [(received, sent) for received, sent in both if sent]


@dataclass
class Run:
    """A federated run as an attack finds it.

    Args:
        module: the method, with the server's model.
        wire: what crossed.
        private: what the clients keep; the insider's view alone looks at it.
    """

    module: FederatedModule
    wire: Wire
    private: dict[int, State]
    #: Private entries that were guessed, by client; made once for all views.
    guesses: dict[tuple[str, int], State] = field(default_factory=dict)
    #: Told how many targets of how many an attack is through with.
    watch: Callable[[int, int], None] | None = None
    #: For messages that clients are asked for.
    protect: Protection | None = None

    def each(self, targets: Sequence[T]) -> Iterator[T]:
        """The targets of an attack, one after the other, with whoever watches kept informed."""
        for done, target in enumerate(targets):
            if self.watch is not None:
                self.watch(done, len(targets))
            yield target
        if self.watch is not None:
            self.watch(len(targets), len(targets))

    @property
    def clients(self) -> list[int]:
        """The clients of which a message was seen."""
        return sorted(self.wire.sent)


class Wiretap(Callback):
    """Listens to the messages of a run.

    Args:
        wire: where they are kept.
        sums: whether the means of rounds are kept, too, and what is left of them for each client.
    """

    def __init__(self, wire: Wire, sums: bool = False) -> None:
        self.wire, self.sums = wire, sums

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Hear what a client is given."""
        self.wire.hand(client, message)

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Keep what crosses."""
        self.wire.note(client, message.tensors)

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Keep the mean."""
        if self.sums:
            assert isinstance(pl_module, FederatedModule)
            self.wire.note_mean(messages, pl_module.weighting, [m.client for m in messages])


def finished(module: FederatedModule, wire: Wire) -> Run:
    """A run that was listened to, with what its clients keep now."""
    return Run(module, wire, {client: dict(module.snapshots[client].private) for client in wire.sent})


def intercept(
    module: FederatedModule,
    clients: Sequence[int],
    protect: Protection | None = None,
    others: Sequence[int] | None = None,
    hidden: bool = False,
) -> Run:
    """Messages of the next round, for a run of which nothing was recorded, as from a checkpoint.

    Nothing of the round is kept: server and snapshots stay as they are.

    Args:
        module: a trained method under a Trainer with its data.
        clients: the clients to listen to.
        protect: what clients do to a message before it leaves, given what they received.
        others: clients that train beside them, for the mean of all messages; None asks for no mean.
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
