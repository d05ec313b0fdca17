"""Clusters of clients, for FeSEM, IFCA, FedGroup and FedCluster."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.engine import entries
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.parties import EVALUATION, Me
from fl_lightning.ranges import AtMost, Count
from fl_lightning.wire import Message, State, prefixed, under

#: The entry with the cluster that a client chose.
CHOICE = "cluster"
#: Maximum number of models on a server; more are taken for a mistake.
Clusters = Annotated[Count, AtMost(10_000)]


class ClusteredModule(FederatedModule, ABC):
    """Base class of methods whose clients belong to clusters.

    Args:
        net: the network.
        clusters: number of clusters Q.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, clusters: Clusters, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.clusters = clusters

    @abstractmethod
    def cluster_of(self, client: int) -> int:
        """Return the cluster of a client, from 0, even if it never trained."""

    def assignment(self) -> list[int]:
        """Return the cluster of every client."""
        return [self.cluster_of(client) for client in range(len(self.roster))]


class ClusterModels(ClusteredModule):
    """One model per cluster; FedAvg within clusters.

    The first cluster's model is the net, so that one cluster is exactly FedAvg. The server's optimizer steps all
    models; the model of a cluster without messages does not change. Entries of model q are named ``q.name`` if several
    models are combined.

    Args:
        net: the network.
        clusters: number of clusters Q.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    aggregates_by_mean = False  # cluster membership depends on the clients' data

    others: nn.ModuleList

    def make_models(self, independent: bool) -> None:
        """Create the models of all clusters but the first; called by a subclass's constructor.

        Args:
            independent: initialise every model independently; otherwise all start as copies of the net.
        """
        streams = [seeding.stream(self.seed, "init", client=q) for q in range(1, self.clusters)]
        made = (redrawn(self.net, rng) if independent else copy.deepcopy(self.net) for rng in streams)
        self.others = nn.ModuleList(made)

    # server

    @property
    def server(self) -> nn.Module:
        """Models of all clusters."""
        return nn.ModuleList([self.net, *self.others])

    def model_state(self, cluster: int) -> State:
        """Return all entries of a cluster's model by name."""
        net = self.net if cluster == 0 else self.others[cluster - 1]
        return {name: value.detach() for name, value in entries(net).items()}

    def cluster_sent(self, client: int) -> int:
        """Return the cluster whose model a client trains."""
        return self.cluster_of(client)

    def cluster_sending(self, message: Message) -> int:
        """Return the cluster of a message."""
        return self.cluster_of(message.client)

    def message_down(self, client: int) -> State:
        """Return the model of the cluster that the client trains."""
        state = self.model_state(self.cluster_sent(client))
        return {name: state[name] for name in self.shared_names if not self.resets(name)}

    def evaluation_down(self, client: int) -> State:
        """Return the model of the client's cluster."""
        state = self.model_state(self.cluster_of(client))
        return {name: state[name] for name in self.shared_names}

    def aggregate(self, messages: list[Message]) -> State:
        """Average the models of every cluster with messages."""
        members: dict[int, list[Message]] = {}
        for message in messages:
            members.setdefault(self.cluster_sending(message), []).append(message)
        return self.cluster_means(members)

    def cluster_means(self, members: dict[int, list[Message]]) -> State:
        """Return the weighted mean of each cluster's messages, as entries of :attr:`server`."""
        target: State = {}
        for cluster, own in sorted(members.items()):
            target |= prefixed(f"{cluster}.", self.mean(own, names=self.shared_names, centre=self.model_state(cluster)))
        return target

    def global_models(self) -> Sequence[tuple[float, State]]:
        """Return the models of all clusters with clients, equally weighted."""
        if self.private_names:
            return []
        used = sorted(set(self.assignment()))
        return [(1 / len(used), self.model_state(cluster)) for cluster in used]


class ChosenClusters(ClusterModels):
    """Clusters that clients choose themselves unless the server knows them.

    A client that chooses receives all models and reports its choice on request.
    """

    # client

    @abstractmethod
    def choose(self, received: State, me: Me) -> int:
        """Choose the client's cluster, given all models."""

    def chooses(self, received: State) -> bool:
        """Whether a message contains all models to choose from."""
        return all(f"0.{name}" in received for name in self.shared_names)

    def personal(self, received: State, me: Me) -> State:
        """Return the model of the client's cluster, received or chosen."""
        chosen = under(f"{self.choose(received, me)}.", received) if self.chooses(received) else received
        return super().personal(chosen, me)

    def tell(self, received: State, me: Me) -> State:
        """Return the chosen cluster."""
        return {CHOICE: torch.tensor(self.choose(received, me))} if self.chooses(received) else {}

    # server

    @abstractmethod
    def knows(self, client: int) -> int | None:
        """Return the cluster of a client; None if the client chooses."""

    def evaluation_down(self, client: int) -> State:
        """Return the model of the client's cluster, or all models to choose from."""
        return self.all_models() if self.knows(client) is None else super().evaluation_down(client)

    def all_models(self) -> State:
        """Return all models, with the running statistics needed for a choice."""
        found: State = {}
        for q in range(self.clusters):
            found |= prefixed(f"{q}.", self.model_state(q), self.shared_names)
        return found

    def cluster_of(self, client: int) -> int:
        """Return the known cluster, or the client's current choice."""
        return self.ask([client])[client]

    def assignment(self) -> list[int]:
        """Return the cluster of every client."""
        found = self.ask(range(len(self.roster)))
        return [found[client] for client in range(len(self.roster))]

    def ask(self, clients: Iterable[int]) -> dict[int, int]:
        """Request the clusters of several clients."""
        known = {client: self.knows(client) for client in clients}
        unknown = {client: self.evaluation_down(client) for client, cluster in known.items() if cluster is None}
        told = self.exchange.tell(self.setting(EVALUATION), unknown) if unknown else {}
        # Clients that are absent or report no cluster are sent nothing.
        chosen = {client: int(said[CHOICE]) for client, said in told.items() if self._is_choice(said.get(CHOICE))}
        return {client: chosen.get(client, 0) if q is None else q for client, q in known.items()}

    def _is_choice(self, told: Tensor | None) -> bool:
        return told is not None and told.numel() == 1 and 0 <= float(told) < self.clusters


def balanced(rng: np.random.Generator, clients: int, clusters: int) -> list[int]:
    """Assign every client to a random cluster; sizes differ by at most one.

    Example:
        >>> sorted(balanced(np.random.default_rng(0), 5, 2))
        [0, 0, 0, 1, 1]
    """
    drawn: list[int] = (rng.permutation(clients) % clusters).tolist()
    return drawn


def redrawn(net: nn.Module, rng: np.random.Generator) -> nn.Module:
    """Copy a net and reinitialise its weights with each layer's ``reset_parameters``.

    Raises:
        FederationError: if no layer has one.
    """
    made = copy.deepcopy(net)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**63)))
        for module in reversed(list(made.modules())):  # a net's own initialisation comes after its layers'
            for name in ("reset_parameters", "_reset_parameters"):
                if callable(reset := getattr(module, name, None)):
                    reset()
                    break
    if all(torch.equal(new, old) for new, old in zip(made.parameters(), net.parameters(), strict=True)):
        raise FederationError(
            f"{type(net).__name__} cannot be reinitialised, so all clusters would start equal: give it, or its layers, "
            "a method reset_parameters()."
        )
    return made


def squared_distances(models: Sequence[State], centres: Sequence[State], names: Sequence[str]) -> torch.Tensor:
    """Return squared Euclidean distances of models to centres over the named entries, float64, shape (K, Q)."""
    total = torch.zeros(len(models), len(centres), dtype=torch.float64)
    for name in names:
        points = [centre[name].double() for centre in centres]
        for k, model in enumerate(models):
            own = model[name].to(points[0])
            total[k] += torch.stack([(own - point).square().sum() for point in points]).cpu()
    return total
