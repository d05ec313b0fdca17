"""Federations for an agent of interest, which weight the others by the distance of their updates from its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.ranges import CountOrZero
from fl_lightning.snapshots import moved
from fl_lightning.wire import Message, State

#: Prefix in the memory of the federations' server states, stacked, shape (agents, ...).
EACH = "each."
#: History of weights and distances, shape (rounds, agents of interest, clients), float64.
WEIGHTS, DISTANCES = "weights", "distances"


class AgentsOfInterest(FederatedModule, ABC):
    """Base of Weight Erosion and WAFFLEAvg: a model for one agent ("Alice"), or one for every agent in one run.

    A round trains all clients from the agent's model, measures d_i = ||y_i - y_agent|| over all trainable parameters in
    float64, and computes weights with :meth:`weigh`. The new model is the weighted mean of the clients' models.
    Subclasses implement :meth:`weigh`, and :meth:`may_count` to exclude agents that can no longer have a weight.

    With ``agent_of_interest="all"`` every agent has a federation, a model and a vector of weights. Clients train all
    models, stacked like clients: number (f + 1) N + i of the cohort is client i's training of agent f's model, on the
    same batches for every f. This equals one run per agent, but shares the first round, in which all models are equal
    and numbers are the clients'. The server's net holds the mean of all models.

    An agent whose update is excluded from a round (not finite) has no weight in it. If the update of the agent of
    interest is excluded, its model does not change and the weights of that round are 0.

    Args:
        net: the network.
        agent_of_interest: the agent to train a model for: a client's number, or ``all``.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    aggregates_by_mean = takes_rules = False  # the clients' updates decide the weights

    fixed: ClassVar[Mapping[str, str]] = {"weighting": "clients are weighted by distance, not by their samples"}
    #: Entries of the memory that another ``fit`` resets.
    of_the_run: tuple[str, ...] = (WEIGHTS, DISTANCES)

    def __init__(
        self,
        net: FedNet,
        agent_of_interest: CountOrZero | Literal["all"] = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        self.agent_of_interest = agent_of_interest
        #: State of the servers between rounds, by name: models, weights, distances.
        self.memory: State = {}
        self.everyone = agent_of_interest == "all"
        if self.everyone and self.server_optimizer is not None:
            raise FederationError("agent_of_interest=all has a server for every agent: leave server_optimizer out.")

    # server: hooks of the method

    @abstractmethod
    def weigh(self, distances: Tensor, moved: Tensor) -> Tensor:
        """Return aggregation weights of this round, shape (agents of interest, clients); rows sum to 1.

        Args:
            distances: d_i of every federation, NaN for excluded clients, same shape, float64.
            moved: length of the agents' own updates, shape (agents of interest,).
        """

    def may_count(self, round: int) -> Tensor:
        """Return which clients may have a weight from now on, shape (agents of interest, clients). Default: all."""
        return torch.ones(len(self.agents), self.clients_known, dtype=torch.bool)

    def combine(self, messages: Sequence[Message], weights: Sequence[float], before: State) -> State:
        """Return the state of one federation's server after a round. Default: the mean model."""
        return self.mean(messages, weights, self.shared_names)

    # server: checkpoints

    def server_extras(self) -> dict[str, Any]:
        """Return the state of the servers."""
        return dict(self.memory)

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Restore the state of the servers."""
        self.memory = dict(extras)

    def on_fit_start(self) -> None:
        """Move the memory to the module's device; models take its precision, weights keep theirs."""
        super().on_fit_start()
        self._check_models()
        self.memory = {
            name: moved(value, self.device, self.compute_dtype if name.startswith(EACH) else value.dtype)
            for name, value in self.memory.items()
        }

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def _check_models(self) -> None:
        """Refuse data with another number of clients than models; called after a checkpoint was loaded."""
        clients = len(self.roster)
        if self._apart and self._models != clients:
            raise FederationError(
                f"agent_of_interest=all has a model for each of {self._models} clients, but the data has {clients}: "
                "use the data it was trained on."
            )

    # server: numbers

    @property
    def agents(self) -> list[int]:
        """Agents of interest, one for each federation."""
        if isinstance(self.agent_of_interest, int):
            return [self.agent_of_interest]
        return list(range(self.clients_known))

    @property
    def clients_known(self) -> int:
        """Number of clients; for a model loaded without data, the number of models."""
        return self._models or len(self.roster)

    @property
    def this_round(self) -> int:
        """The current round, from 1."""
        return self.completed_rounds + 1

    def setup(self, stage: str) -> None:
        """Check that the agent exists, and reset the weights of an earlier run."""
        super().setup(stage)
        clients = self.clients_known
        if not self.everyone and self.agents[0] >= clients:
            raise FederationError(f"agent_of_interest must be one of 0 to {clients - 1} or all, not {self.agents[0]}.")
        if stage == "fit":
            self.memory = {name: value for name, value in self.memory.items() if name not in self.of_the_run}

    def cohort(self, round: int) -> list[int]:
        """Return all clients that may have a weight, the agent of interest first; ignores ``fraction``."""
        clients = self.clients_known
        if self.everyone and not self._apart:
            return list(range(clients))
        pairs = [(row, agent, client) for row, agent in enumerate(self.agents) for client in range(clients)]
        pairs.sort(key=lambda pair: (pair[0], pair[1] != pair[2]))
        counts = self.may_count(round)
        return [self._number(row, client) for row, agent, client in pairs if counts[row, client] or client == agent]

    def client_of(self, number: int) -> int:
        """Return the client of a number of the cohort."""
        return number % self.clients_known if self.everyone and self.clients_known else number

    def _number(self, row: int, client: int) -> int:
        """Return the number of a client in a federation, once federations have their own models."""
        return (row + 1) * self.clients_known + client if self.everyone else client

    def _row(self, number: int) -> int:
        """Return the federation of a number; its own for a plain client."""
        if not self.everyone:
            return 0
        return number // self.clients_known - 1 if number >= self.clients_known else number

    @property
    def _apart(self) -> bool:
        """Whether every agent has its own model already."""
        return self._models > 0

    @property
    def _models(self) -> int:
        """Number of models in addition to the server's own: one per client, or none."""
        return next((len(value) for name, value in self.memory.items() if name.startswith(EACH)), 0)

    def _server_of(self, row: int) -> State:
        """Return the state of a federation's own server; empty while all share it."""
        return {name.removeprefix(EACH): v[row] for name, v in self.memory.items() if name.startswith(EACH)}

    # server: a round

    def message_down(self, client: int) -> State:
        """Return the model of the number's federation."""
        sent = super().message_down(client)
        own = self._server_of(self._row(client))
        return {name: own.get(name, value) for name, value in sent.items()}

    def evaluation_down(self, client: int) -> State:
        """Return the model of the number's federation."""
        own = self._server_of(self._row(client))
        return {name: own.get(name, value) for name, value in super().evaluation_down(client).items()}

    def evaluated_as(self, client: int) -> int:
        """With ``all``, return the client's number in its own federation."""
        return self._number(client, client) if self.everyone and self._apart else client

    def aggregate(self, messages: list[Message]) -> State:
        """Weight the clients of every federation and combine their models."""
        rows = range(len(self.agents))
        sent = [self._messages_to(row, messages) for row in rows]
        before = [self.server_state() | self.message_down(self._number(row, 0)) | self._server_of(row) for row in rows]
        measured = [self._measure(*one) for one in zip(self.agents, sent, before, strict=True)]
        distances, moved = torch.stack([d for d, _ in measured]), torch.stack([m for _, m in measured])
        weights = self.weigh(distances, moved)
        weights = weights.where(distances.isfinite(), 0.0)
        weights = (weights / weights.sum(1, keepdim=True)).nan_to_num(0.0)
        after = [self._after(*one) for one in zip(self.agents, sent, weights, before, strict=True)]
        self._note(WEIGHTS, weights)
        self._note(DISTANCES, distances)
        if not self.everyone:
            return after[0]
        each = {name: torch.stack([state[name] for state in after]) for name in after[0]}
        self.memory |= {EACH + name: value for name, value in each.items()}
        return {n: v.double().mean(0).to(v) if v.is_floating_point() else v.amax(0) for n, v in each.items()}

    def _messages_to(self, row: int, messages: list[Message]) -> list[Message]:
        """Return the messages to one federation, under the clients' own numbers."""
        own = [m for m in messages if not self._apart or self._row(m.client) == row]
        return [Message(self.client_of(m.client), m.tensors, m.samples, m.loss) for m in own]

    def _measure(self, agent: int, messages: list[Message], before: State) -> tuple[Tensor, Tensor]:
        """Return the distance of every client's update from the agent's (NaN if missing) and the norm of the latter."""
        squares = torch.full((self.clients_known,), torch.nan, dtype=torch.float64)
        sent = {message.client: message.tensors for message in messages}
        if agent not in sent:
            return squares, torch.tensor(torch.nan, dtype=torch.float64)
        clients, length = list(sent), torch.zeros((), dtype=torch.float64)
        squares[clients] = 0.0
        for name in self.trainable_names:
            own = sent[agent][name].double()
            length += (own - before[name].double()).pow(2).sum().cpu()
            squares[clients] += torch.stack([(sent[c][name].double() - own).pow(2).sum() for c in clients]).cpu()
        return squares.sqrt(), length.sqrt()

    def _after(self, agent: int, messages: list[Message], weights: Tensor, before: State) -> State:
        if all(message.client != agent for message in messages):
            return {name: value.clone() for name, value in before.items() if name not in self.private_names}
        return self.combine(messages, [float(weights[message.client]) for message in messages], before)

    def _note(self, name: str, values: Tensor) -> None:
        """Add this round's row to a history."""
        earlier = [self.memory[name]] if name in self.memory else []
        self.memory[name] = torch.cat([*earlier, values[None].to(self.device)])

    # server: history

    def weight_history(self) -> Tensor:
        """Return the weights of every round so far, shape (rounds, agents of interest, clients)."""
        return self.memory.get(WEIGHTS, torch.zeros(0, 0, 0, dtype=torch.float64))

    def distance_history(self) -> Tensor:
        """Return the distances d_i of every round so far, NaN for clients that did not train, same shape."""
        return self.memory.get(DISTANCES, torch.zeros(0, 0, 0, dtype=torch.float64))


def one_hot(clients: int, agent: int) -> Tensor:
    """Return weights that are 1 for the agent of interest and 0 for all others, shape (clients,)."""
    return torch.nn.functional.one_hot(torch.tensor(agent), clients).double()
