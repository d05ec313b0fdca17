"""FedCluster (Chen et al., 2020): groups of clients take turns within a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.clusters import ClusteredModule, Clusters, balanced
from fl_lightning.nets import FedNet
from fl_lightning.parties import LocalData, Me, Stage
from fl_lightning.wire import State

Groups = Literal["random", "dominant"]
#: The entry by which a client tells its dominant class.
DOMINANT = "dominant"


class FedCluster(ClusteredModule):
    """One model that visits Q groups of clients, one after the other, in every round.

    Groups are formed once and differ in size by one client at most. A round visits those that have clients in the
    cohort, in a random order; the clients of a group train from the model that the groups before it left and the server
    takes their mean. So a round is up to Q steps of the server, and the model is the same for everyone.

    Args:
        net: the network.
        clusters: number of groups Q, at most the number of clients; with one group this is FedAvg.
        groups: form groups at ``random``, or of clients with the same ``dominant`` class, as far as sizes allow; for
            the latter clients tell these classes when they join.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, clusters: Clusters = 5, groups: Groups = "random", **kwargs: Any) -> None:
        super().__init__(net, clusters, **kwargs)
        self.groups: Groups = groups
        if groups == "dominant":
            self.needs_classes = "forms groups='dominant' by the classes of clients"

    # client

    def introduce(self, me: Me) -> State:
        """The class that the client has most training samples of, if groups are formed by it."""
        return {DOMINANT: dominant_class(me.data)} if self.groups == "dominant" else {}

    # server

    def setup(self, stage: str) -> None:
        """Refuse more groups than there are clients, and groups by classes that some have not told."""
        super().setup(stage)
        clients = len(self.roster)
        if self.clusters > clients:
            raise FederationError(
                f"{clients} clients cannot form {self.clusters} groups: set clusters to {clients} or less."
            )
        if self.groups == "dominant" and any(DOMINANT not in client.told for client in self.roster):
            raise FederationError(
                "groups='dominant' divides clients by what they tell when they join, so that all have to join before "
                "the run begins: leave min_clients out, or take groups='random'."
            )

    def cluster_of(self, client: int) -> int:
        """The client's group."""
        return self.assignment()[client]

    def assignment(self) -> list[int]:
        """The group of every client: a pure function of the seed and of what the clients told."""
        clients = range(len(self.roster))
        if self.groups == "random":
            return balanced(seeding.stream(self.seed, "clusters"), len(clients), self.clusters)
        order = sorted(clients, key=lambda client: (int(self.roster[client].told[DOMINANT]), client))
        place = {client: i for i, client in enumerate(order)}
        return [place[client] * self.clusters // len(order) for client in clients]

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        """One stage per group, in a random order."""
        groups = self.assignment()
        order = seeding.stream(self.seed, "visits", round).permutation(self.clusters)
        return [Stage([client for client in cohort if groups[client] == q], f"group {q}") for q in order.tolist()]


def dominant_class(data: LocalData) -> Tensor:
    """The class that a client has most training samples of, in its own labelling; the first of equal ones."""
    return torch.bincount(data.labels()).argmax()
