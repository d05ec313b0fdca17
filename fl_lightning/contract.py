"""The contract of a federated method: what its clients do, what its server does, what an adversary may make of it.

Nobody sees both sides. A client is what it received, what it kept and its own data; a server is what it holds and the
messages. Hooks of :class:`ClientSide` use their arguments, the structure of ``self.net`` and the method's settings, so
that they run where a client's data is: in a simulation all clients share one object, in a federation each has its own.
The defaults are FedAvg's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.engine import Batch, Engine, Gradient, LocalMethod, LocalTraining, Move, Phase, Update, entries
from fl_lightning.model import NamedModel
from fl_lightning.parties import Introduction, Me, Reply, Stage
from fl_lightning.robust import Aggregation
from fl_lightning.wire import Message, State, Weighting, message_weights, weighted_mean

if TYPE_CHECKING:
    from fl_lightning.exchange import Clients


class ClientSide(NamedModel):
    """The client's half of a method, of which a method overrides what differs from FedAvg.

    Everything between ``enter`` and ``leave`` is a pure function of named tensors, so an engine may train one client or
    stack fifty.

    =================  ========================================================================================
    ``is_private``     which entries of the net stay with the client
    ``introduce``      what a client tells when it joins
    ``enter``          the state it trains from, made of what it received and what it kept
    ``client_loss``    the local objective
    ``correct``        the gradients that the local optimizer gets
    ``moves``          the steps on a minibatch
    ``phases``         what is trained for how many epochs
    ``leave``          what it sends up and what it keeps
    ``personal``       the model that it is evaluated with
    =================  ========================================================================================
    """

    local: LocalTraining
    engine: Engine
    #: Why the method needs clients that step by plain SGD; None if any local optimizer will do.
    plain_sgd: ClassVar[str | None] = None
    #: Why the method needs targets that are classes; None if any task will do.
    needs_classes: str | None = None
    seed: int

    # ---- joining ----------------------------------------------------------------------------------------------

    def introduce(self, me: Me) -> State:
        """Entries that a client sends when it joins, besides its number of samples. Default: none."""
        return {}

    # ---- a round ----------------------------------------------------------------------------------------------

    def at_first(self) -> State:
        """The private entries of the net that every client begins with, and the frozen ones, which stay as they are."""
        own = entries(self.net)
        return {name: own[name].detach() for name in (*self.frozen_names, *self.private_names)}

    def enter(self, received: State, me: Me) -> State:
        """The state a client trains from: the entries it received and its own."""
        own = {name: value for name, value in me.private.items() if not self.resets(name)}
        return {**self.at_first(), **self.fresh_buffers(), **received, **own}

    def fresh_buffers(self) -> State:
        """The buffers that begin anew in every round."""
        if self.buffers_policy != "reset":
            return {}
        now = entries(self.net)
        return {name: value.to(now[name]) for name, value in self.initial_buffers.items()}

    def plan(self, me: Me) -> LocalMethod:
        """The local method that an engine trains the client by in this round and stage. Default: the method itself."""
        return self

    def phases(self) -> Sequence[Phase]:
        """The phases of local training. Default: one in which every trainable parameter is trained."""
        return [Phase(self.local.epochs, self.trainable_names)]

    def moves(self, phase: Phase) -> Sequence[Move]:
        """The moves made on every minibatch. Default: one step of the local optimizer on ``client_loss``."""
        return [self.descend]

    def opening(self, phase: Phase) -> Sequence[Move]:
        """The moves made on a client's first minibatch of a phase instead. Default: the same as on the others."""
        return ()

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One step on ``client_loss`` with the corrected gradient."""
        grads, loss, buffers = gradient(lambda s: self.client_loss(s, batch), state, phase.trainable)
        return Update(loss, self.correct(state, grads), buffers)

    def rate(self, batch: Batch) -> float | Tensor:
        """The learning rate of a step, for moves that step by themselves."""
        return batch.scalars.get("lr", self.local.lr)

    def correct(self, state: State, grads: State) -> State:
        """The gradients that the local optimizer gets. Default: as they are."""
        return grads

    def client_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
        """The local objective on one minibatch, and the buffers that the forward pass changed."""
        return self.batch_loss(state, batch.x, batch.y, batch.noise)

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Noise for one client's epoch, each tensor of shape (steps, ...); it enters as ``batch.noise``."""
        return {}

    def survey(self, states: Sequence[State], mes: Sequence[Me]) -> None:
        """Add entries for ``leave`` to the trained states of a stack of clients. Default: adds none."""

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Make a trained client's message, and the private entries that it keeps."""
        up = {name: state[name] for name in self.shared_names}
        return Reply(up, {name: state[name] for name in self.private_names})

    # ---- evaluation -------------------------------------------------------------------------------------------

    def settle(self, received: Sequence[State], mes: Sequence[Me]) -> Sequence[State]:
        """Private entries that clients work out before they are evaluated and do not keep, one dict for each client.

        Called for several clients at once, so that those which have to train for it can be stacked. Default: none.
        """
        return [{}] * len(mes)

    def personal(self, received: State, me: Me) -> State:
        """The model that a client is evaluated with, made of what it received for that and what it keeps."""
        whole = {**self.at_first(), **received, **me.private}
        return {name: whole[name] for name in self.entry_names}

    def tell(self, received: State, me: Me) -> State:
        """Entries that a client sends when it is evaluated, besides its scores. Default: none."""
        return {}


class ServerSide(NamedModel):
    """The server's half of a method. It knows of its clients what they told when they joined, and their messages.

    ====================  =====================================================================================
    ``stages``            who trains after whom within a round
    ``message_down``      what a client is sent to train from
    ``evaluation_down``   what it is sent to be evaluated with
    ``aggregate``         what the server makes of the messages
    ====================  =====================================================================================
    """

    weighting: Weighting
    aggregation: Aggregation | None
    roster: Sequence[Introduction]
    exchange: Clients
    completed_rounds: int
    completed_stages: int
    device: torch.device

    #: True if the aggregate is a mean with data-independent weights; central noise needs this.
    aggregates_by_mean: ClassVar[bool] = True
    #: True if the server needs nothing of the messages but their mean; secure aggregation needs this and the above.
    aggregates_sums: ClassVar[bool] = True
    #: True if a robust rule may stand for the mean of what clients send.
    takes_rules: ClassVar[bool] = True
    #: True if the server's model may get units that it did not begin with.
    grows: bool = False

    # ---- rounds -----------------------------------------------------------------------------------------------

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        """The stages of a round, one after the other. Default: one, in which the cohort trains.

        The server aggregates after each of them. Must depend on nothing but its arguments, the method's settings and
        the roster: a resumed run asks again and goes on after the last stage that was completed.
        """
        return [Stage(cohort)]

    def client_of(self, number: int) -> int:
        """The client that a number of the cohort stands for. Default: itself.

        A method whose clients train several models in a round numbers all these trainings in ``cohort``; messages and
        hooks then go by these numbers.
        """
        return number

    def evaluated_as(self, client: int) -> int:
        """The number under which a client is evaluated. Default: its own."""
        return client

    def message_down(self, client: int) -> State:
        """The message that a client trains from. Default: what it is evaluated with, less buffers that begin anew."""
        return {name: value for name, value in self.evaluation_down(client).items() if not self.resets(name)}

    def evaluation_down(self, client: int) -> State:
        """The message that a client is evaluated with. Default: the shared entries."""
        state = self.server_state()
        return {name: state[name] for name in self.shared_names}

    def aggregate(self, messages: list[Message]) -> State:
        """New values of entries of :attr:`server`; the server's optimizer steps towards them, the others stay."""
        return self.mean(messages)

    def mean(
        self,
        messages: Sequence[Message],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        centre: State | None = None,
    ) -> State:
        """The weighted mean of messages, or what the ``aggregation`` rule makes of them, which leaves weights out.

        Args:
            messages: at least one.
            weights: one for each message; None weighs them as ``weighting`` says.
            names: the entries to average; None means all.
            centre: the model that clients began with, for rules that measure changes; None means the server's.
        """
        if self.aggregation is not None:
            return self.aggregation(messages, self.server_state() if centre is None else centre, names)
        return weighted_mean(messages, message_weights(messages, self.weighting) if weights is None else weights, names)

    def round_metrics(self) -> dict[str, float]:
        """Extra metrics of the last round. Default: none."""
        return {}

    # ---- what it holds ----------------------------------------------------------------------------------------

    @property
    def server(self) -> nn.Module:
        """The module that the server's optimizer steps: the net, or the nets of a method that has several."""
        return self.net

    def server_state(self) -> State:
        """All entries of the server's net by name; private ones hold the common initial values."""
        return {name: value.detach() for name, value in entries(self.net).items()}

    def example(self) -> Tensor:
        """Two made-up inputs of the clients' shape, for a look at what the net does with inputs."""
        shape, dtype = self.roster[0].shape, self.roster[0].dtype
        if dtype is not None:
            return torch.zeros(2, *shape, dtype=dtype, device=self.device)  # tokens: a net has one that is 0
        return seeding.normal(seeding.stream(0, "example"), (2, *shape), self.compute_dtype).to(self.device)

    def server_extras(self) -> dict[str, Any]:
        """The server's state besides its models, for a checkpoint: plain dicts of tensors and numbers."""
        return {}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Bring back what :meth:`server_extras` gave."""

    def global_models(self) -> Sequence[tuple[float, State]]:
        """Models scored on a test set that belongs to nobody, each with its weight in their mean."""
        return [] if self.private_names else [(1.0, self.server_state())]


class AdversarySide(ServerSide):
    """Conclusions of an adversary from a method's messages; see :mod:`fl_lightning.privacy`."""

    def revealed(self, message: State) -> State:
        """The entries of the net that a message, up or down, gives away to a reader."""
        return {name: message[name] for name in self.shared_names if name in message}

    def private_start(self) -> State:
        """Private entries as clients have them at first; an adversary may fit them to data of its own."""
        state = self.server_state()
        return {name: state[name] for name in self.trainable_names if self.stays(name)}

    def assumptions(self) -> dict[str, State]:
        """Data-free guesses of the private entries, by name."""
        return {"initial": self.private_start()} if self.private_start() else {"seen": {}}

    def assume(self, state: State, private: State) -> State:
        """The model of a client with the shared entries of ``state`` and these private ones."""
        return {**state, **{name: value for name, value in private.items() if name in state}}

    def betrayed(self, received: State, message: State) -> State:
        """Private entries that show in how a client changed the entries it received. Default: none.

        Override this if private entries influence the training of shared ones: return what the difference of the two
        messages gives away.

        Args:
            received: the message to the client.
            message: its answer.
        """
        return {}
