"""Clusters of clients: the one mechanism of FeSEM, IFCA, FedGroup and FedCluster."""

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

#: The entry by which a client tells the cluster that it chose.
CHOICE = "cluster"
#: Models that a server may hold; more of them are a slip.
Clusters = Annotated[Count, AtMost(10_000)]


class ClusteredModule(FederatedModule, ABC):
    """A federation whose clients belong to clusters.

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
        """The cluster of a client, from 0, also if it never trained."""

    def assignment(self) -> list[int]:
        """The cluster of every client."""
        return [self.cluster_of(client) for client in range(len(self.roster))]


class ClusterModels(ClusteredModule):
    """A model for each cluster; inside a cluster FedAvg.

    The first cluster's model is the net, so that with one cluster nothing differs from FedAvg. The server's optimizer
    steps all of them; the model of a cluster from which nothing came stays as it is. Entries of model q are called
    ``q.name`` where those of several models meet.

    Args:
        net: the network.
        clusters: number of clusters Q.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    aggregates_by_mean = False  # the clients' data decides whom they are averaged with

    others: nn.ModuleList

    def make_models(self, independent: bool) -> None:
        """Make the models of all clusters but the first; a subclass's constructor calls it.

        Args:
            independent: draw the weights of every model for itself; else all begin as the net.
        """
        streams = [seeding.stream(self.seed, "init", client=q) for q in range(1, self.clusters)]
        made = (redrawn(self.net, rng) if independent else copy.deepcopy(self.net) for rng in streams)
        self.others = nn.ModuleList(made)

    # server

    @property
    def server(self) -> nn.Module:
        """The models of all clusters."""
        return nn.ModuleList([self.net, *self.others])

    def model_state(self, cluster: int) -> State:
        """All entries of a cluster's model by name."""
        net = self.net if cluster == 0 else self.others[cluster - 1]
        return {name: value.detach() for name, value in entries(net).items()}

    def cluster_sent(self, client: int) -> int:
        """The cluster whose model a client is sent to train."""
        return self.cluster_of(client)

    def cluster_sending(self, message: Message) -> int:
        """The cluster that a message belongs to."""
        return self.cluster_of(message.client)

    def message_down(self, client: int) -> State:
        """The model of the cluster that the client is to train."""
        state = self.model_state(self.cluster_sent(client))
        return {name: state[name] for name in self.shared_names if not self.resets(name)}

    def evaluation_down(self, client: int) -> State:
        """The model of the client's cluster."""
        state = self.model_state(self.cluster_of(client))
        return {name: state[name] for name in self.shared_names}

    def aggregate(self, messages: list[Message]) -> State:
        """The mean of every cluster from which something came."""
        members: dict[int, list[Message]] = {}
        for message in messages:
            members.setdefault(self.cluster_sending(message), []).append(message)
        return self.cluster_means(members)

    def cluster_means(self, members: dict[int, list[Message]]) -> State:
        """The weighted mean of each cluster's messages, as entries of :attr:`server`."""
        target: State = {}
        for cluster, own in sorted(members.items()):
            target |= prefixed(f"{cluster}.", self.mean(own, names=self.shared_names, centre=self.model_state(cluster)))
        return target

    def global_models(self) -> Sequence[tuple[float, State]]:
        """The model of every cluster that has clients, all of the same weight."""
        if self.private_names:
            return []
        used = sorted(set(self.assignment()))
        return [(1 / len(used), self.model_state(cluster)) for cluster in used]


class ChosenClusters(ClusterModels):
    """Clusters that clients choose for themselves, out of all models, unless the server knows theirs.

    A client that chooses receives every model, and tells which one it chose when it is asked.
    """

    # client

    @abstractmethod
    def choose(self, received: State, me: Me) -> int:
        """The cluster that fits the client, out of all models."""

    def chooses(self, received: State) -> bool:
        """Whether a message holds all models for the client to choose from."""
        return all(f"0.{name}" in received for name in self.shared_names)

    def personal(self, received: State, me: Me) -> State:
        """The model of the client's cluster, as it was received or chosen."""
        chosen = under(f"{self.choose(received, me)}.", received) if self.chooses(received) else received
        return super().personal(chosen, me)

    def tell(self, received: State, me: Me) -> State:
        """The cluster that was chosen."""
        return {CHOICE: torch.tensor(self.choose(received, me))} if self.chooses(received) else {}

    # server

    @abstractmethod
    def knows(self, client: int) -> int | None:
        """The cluster of a client; None if the client has to be asked."""

    def evaluation_down(self, client: int) -> State:
        """The model of the client's cluster, or all models to choose from."""
        return self.all_models() if self.knows(client) is None else super().evaluation_down(client)

    def all_models(self) -> State:
        """All models, with the running statistics that a choice needs."""
        found: State = {}
        for q in range(self.clusters):
            found |= prefixed(f"{q}.", self.model_state(q), self.shared_names)
        return found

    def cluster_of(self, client: int) -> int:
        """The cluster that the server knows of, or that the client would choose now."""
        return self.ask([client])[client]

    def assignment(self) -> list[int]:
        """The cluster of every client."""
        found = self.ask(range(len(self.roster)))
        return [found[client] for client in range(len(self.roster))]

    def ask(self, clients: Iterable[int]) -> dict[int, int]:
        """The clusters of several clients."""
        known = {client: self.knows(client) for client in clients}
        unknown = {client: self.evaluation_down(client) for client, cluster in known.items() if cluster is None}
        told = self.exchange.tell(self.setting(EVALUATION), unknown) if unknown else {}
        # One that is absent, or tells no cluster, is sent nothing either.
        chosen = {client: int(said[CHOICE]) for client, said in told.items() if self._is_choice(said.get(CHOICE))}
        return {client: chosen.get(client, 0) if q is None else q for client, q in known.items()}

    def _is_choice(self, told: Tensor | None) -> bool:
        return told is not None and told.numel() == 1 and 0 <= float(told) < self.clusters


def balanced(rng: np.random.Generator, clients: int, clusters: int) -> list[int]:
    """A random cluster for every client; sizes differ by one at most.

    Example:
        >>> sorted(balanced(np.random.default_rng(0), 5, 2))
        [0, 0, 0, 1, 1]
    """
    drawn: list[int] = (rng.permutation(clients) % clusters).tolist()
    return drawn


def redrawn(net: nn.Module, rng: np.random.Generator) -> nn.Module:
    """A copy of a net with weights drawn anew, each layer as PyTorch draws it.

    Raises:
        FederationError: if no layer knows how to.
    """
    made = copy.deepcopy(net)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**63)))
        for module in reversed(list(made.modules())):  # a net that draws its weights itself comes after its layers
            for name in ("reset_parameters", "_reset_parameters"):
                if callable(reset := getattr(module, name, None)):
                    reset()
                    break
    if all(torch.equal(new, old) for new, old in zip(made.parameters(), net.parameters(), strict=True)):
        raise FederationError(
            f"{type(net).__name__} cannot draw its weights anew, so all clusters would begin alike: give it, or its "
            "layers, a method reset_parameters()."
        )
    return made


def squared_distances(models: Sequence[State], centres: Sequence[State], names: Sequence[str]) -> torch.Tensor:
    """Squared Euclidean distances between models and centres over the named entries, in float64, shape (K, Q)."""
    total = torch.zeros(len(models), len(centres), dtype=torch.float64)
    for name in names:
        points = [centre[name].double() for centre in centres]
        for k, model in enumerate(models):
            own = model[name].to(points[0])
            total[k] += torch.stack([(own - point).square().sum() for point in points]).cpu()
    return total
