"""The contract of a federated method: its client side, its server side, and what an adversary can infer.

The two sides share no state. A client has what it received, what it kept and its own data; a server has its model and
the messages. Hooks of :class:`ClientSide` use only their arguments, the structure of ``self.net`` and the method's
settings, so they can run wherever a client's data is: in a simulation one object plays all clients, in a federation
each client has its own. The defaults are FedAvg's.
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
    """Client half of a method; a method overrides only what differs from FedAvg.

    Everything between ``enter`` and ``leave`` is a pure function of named tensors, so an engine may train one client or
    a stack of fifty.

    =================  ========================================================================================
    ``is_private``     which entries of the net stay with the client
    ``introduce``      what a client sends when it joins
    ``enter``          the initial state of local training, from what the client received and what it kept
    ``client_loss``    the local objective
    ``correct``        the gradients passed to the local optimizer
    ``moves``          the steps on a minibatch
    ``phases``         which parameters are trained for how many epochs
    ``leave``          what the client sends up and what it keeps
    ``personal``       the model on which the client is evaluated
    =================  ========================================================================================
    """

    local: LocalTraining
    engine: Engine
    #: Why the method needs clients that use plain SGD; None if any local optimizer will do.
    plain_sgd: ClassVar[str | None] = None
    #: Why the method needs class labels as targets; None if any task will do.
    needs_classes: str | None = None
    seed: int

    # ---- joining ----------------------------------------------------------------------------------------------

    def introduce(self, me: Me) -> State:
        """Return entries that a client sends when it joins, besides its number of samples. Default: none."""
        return {}

    # ---- a round ----------------------------------------------------------------------------------------------

    def at_first(self) -> State:
        """Return the initial private entries, the same for all clients, and the frozen entries, which never change."""
        own = entries(self.net)
        return {name: own[name].detach() for name in (*self.frozen_names, *self.private_names)}

    def enter(self, received: State, me: Me) -> State:
        """Return the state that local training starts from: the received entries and the client's own."""
        own = {name: value for name, value in me.private.items() if not self.resets(name)}
        return {**self.at_first(), **self.fresh_buffers(), **received, **own}

    def fresh_buffers(self) -> State:
        """Return the initial buffers if the ``buffers`` policy resets them every round."""
        if self.buffers_policy != "reset":
            return {}
        now = entries(self.net)
        return {name: value.to(now[name]) for name, value in self.initial_buffers.items()}

    def plan(self, me: Me) -> LocalMethod:
        """Return the local method with which an engine trains the client in this stage. Default: the method itself."""
        return self

    def phases(self) -> Sequence[Phase]:
        """Return the phases of local training. Default: a single one that trains every trainable parameter."""
        return [Phase(self.local.epochs, self.trainable_names)]

    def moves(self, phase: Phase) -> Sequence[Move]:
        """Return the moves made on every minibatch. Default: one step of the local optimizer on ``client_loss``."""
        return [self.descend]

    def opening(self, phase: Phase) -> Sequence[Move]:
        """Return the moves made on the first minibatch of a phase. Default: the same as on the others."""
        return ()

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """Take one step on ``client_loss`` with the corrected gradient."""
        grads, loss, buffers = gradient(lambda s: self.client_loss(s, batch), state, phase.trainable)
        return Update(loss, self.correct(state, grads), buffers)

    def rate(self, batch: Batch) -> float | Tensor:
        """Return the learning rate of a step, for moves that do not use the local optimizer."""
        return batch.scalars.get("lr", self.local.lr)

    def correct(self, state: State, grads: State) -> State:
        """Return the gradients passed to the local optimizer. Default: unchanged."""
        return grads

    def client_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
        """Return the local objective on one minibatch, and the buffers changed by the forward pass."""
        return self.batch_loss(state, batch.x, batch.y, batch.noise)

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Draw noise for one epoch of a client, each tensor of shape (steps, ...), passed on as ``batch.noise``."""
        return {}

    def survey(self, states: Sequence[State], mes: Sequence[Me]) -> None:
        """Add entries for ``leave`` to the trained states of a stack of clients. Default: adds none."""

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Return a trained client's message and the private entries that it keeps."""
        up = {name: state[name] for name in self.shared_names}
        return Reply(up, {name: state[name] for name in self.private_names})

    # ---- evaluation -------------------------------------------------------------------------------------------

    def settle(self, received: Sequence[State], mes: Sequence[Me]) -> Sequence[State]:
        """Compute private entries needed for evaluation only, one dict per client; they are not kept.

        Called for several clients at once, so that clients that train for it can be stacked. Default: none.
        """
        return [{}] * len(mes)

    def personal(self, received: State, me: Me) -> State:
        """Return the model on which a client is evaluated, from the message for it and what the client keeps."""
        whole = {**self.at_first(), **received, **me.private}
        return {name: whole[name] for name in self.entry_names}

    def tell(self, received: State, me: Me) -> State:
        """Return entries that a client sends when it is evaluated, besides its scores. Default: none."""
        return {}


class ServerSide(NamedModel):
    """Server half of a method. It knows clients only by their introductions and their messages.

    ====================  =====================================================================================
    ``stages``            which clients train after which within a round
    ``message_down``      the message that a client trains from
    ``evaluation_down``   the message that a client is evaluated with
    ``aggregate``         the new server entries, computed from the messages
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
    #: True if the server uses only the mean of the messages; secure aggregation needs this and the above.
    aggregates_sums: ClassVar[bool] = True
    #: True if a robust rule may replace the mean of the messages.
    takes_rules: ClassVar[bool] = True
    #: True if the server's model may gain units during training.
    grows: bool = False

    # ---- rounds -----------------------------------------------------------------------------------------------

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        """Return the stages of a round, in order. Default: one, in which the whole cohort trains.

        The server aggregates after each stage. The result must depend only on the arguments, the method's settings and
        the roster: a resumed run calls this again and continues after the last completed stage.
        """
        return [Stage(cohort)]

    def client_of(self, number: int) -> int:
        """Return the client behind a number of the cohort. Default: the number itself.

        A method whose clients train several models in a round gives each of these trainings a number in ``cohort``;
        messages and hooks then use these numbers.
        """
        return number

    def evaluated_as(self, client: int) -> int:
        """Return the number under which a client is evaluated. Default: its own."""
        return client

    def message_down(self, client: int) -> State:
        """Return the message that a client trains from. Default: ``evaluation_down`` without buffers that are reset."""
        return {name: value for name, value in self.evaluation_down(client).items() if not self.resets(name)}

    def evaluation_down(self, client: int) -> State:
        """Return the message that a client is evaluated with. Default: the shared entries."""
        state = self.server_state()
        return {name: state[name] for name in self.shared_names}

    def aggregate(self, messages: list[Message]) -> State:
        """Return new values of entries of :attr:`server`; the server's optimizer steps towards them."""
        return self.mean(messages)

    def mean(
        self,
        messages: Sequence[Message],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        centre: State | None = None,
    ) -> State:
        """Return the weighted mean of messages, or the result of the ``aggregation`` rule, which ignores weights.

        Args:
            messages: at least one.
            weights: one per message; None derives them from ``weighting``.
            names: the entries to average; None means all.
            centre: the model that clients started from, for rules that look at changes; None means the server's.
        """
        if self.aggregation is not None:
            return self.aggregation(messages, self.server_state() if centre is None else centre, names)
        return weighted_mean(messages, message_weights(messages, self.weighting) if weights is None else weights, names)

    def round_metrics(self) -> dict[str, float]:
        """Return extra metrics of the last round. Default: none."""
        return {}

    # ---- state ------------------------------------------------------------------------------------------------

    @property
    def server(self) -> nn.Module:
        """The module stepped by the server's optimizer: the net, or the nets of a method with several."""
        return self.net

    def server_state(self) -> State:
        """Return all entries of the server's net by name; private ones have the common initial values."""
        return {name: value.detach() for name, value in entries(self.net).items()}

    def example(self) -> Tensor:
        """Return two synthetic inputs of the clients' shape, to trace the net with."""
        shape, dtype = self.roster[0].shape, self.roster[0].dtype
        if dtype is not None:
            return torch.zeros(2, *shape, dtype=dtype, device=self.device)  # tokens: 0 is valid in every vocabulary
        return seeding.normal(seeding.stream(0, "example"), (2, *shape), self.compute_dtype).to(self.device)

    def server_extras(self) -> dict[str, Any]:
        """Return server state that is not in its models, for a checkpoint: plain dicts of tensors and numbers."""
        return {}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Restore what :meth:`server_extras` returned."""

    def global_models(self) -> Sequence[tuple[float, State]]:
        """Return the models to score on the global test set, each with its weight in their mean."""
        return [] if self.private_names else [(1.0, self.server_state())]


class AdversarySide(ServerSide):
    """Adversary of a method, with what it can infer from messages; see :mod:`fl_lightning.privacy`."""

    def revealed(self, message: State) -> State:
        """Return the entries of the net that a message, up or down, reveals to its reader."""
        return {name: message[name] for name in self.shared_names if name in message}

    def private_start(self) -> State:
        """Return the initial private entries of the clients; an adversary may fit them to data of its own."""
        state = self.server_state()
        return {name: state[name] for name in self.trainable_names if self.stays(name)}

    def assumptions(self) -> dict[str, State]:
        """Return data-free guesses of the private entries, by name."""
        return {"initial": self.private_start()} if self.private_start() else {"seen": {}}

    def assume(self, state: State, private: State) -> State:
        """Return a client's model: the shared entries of ``state`` with these private ones."""
        return {**state, **{name: value for name, value in private.items() if name in state}}

    def betrayed(self, received: State, message: State) -> State:
        """Return private entries revealed by a client's change of the entries it received. Default: none.

        Override this if private entries influence the training of shared ones.

        Args:
            received: the message to the client.
            message: its reply.
        """
        return {}
