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
#: The entry with a client's dominant class.
DOMINANT = "dominant"


class FedCluster(ClusteredModule):
    """One shared model that visits Q groups of clients one after the other in every round.

    Groups are formed once and differ in size by at most one client. A round visits the groups with clients in the
    cohort, in random order; the clients of a group train from the model of the group before, and the server averages
    their models. A round has up to Q server steps, and all clients share the model.

    Args:
        net: the network.
        clusters: number of groups Q, at most the number of clients; with one group this is FedAvg.
        groups: form groups at ``random``, or of clients with the same ``dominant`` class, as far as sizes allow; in the
            latter case clients send their dominant class when they join.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, clusters: Clusters = 5, groups: Groups = "random", **kwargs: Any) -> None:
        super().__init__(net, clusters, **kwargs)
        self.groups: Groups = groups
        if groups == "dominant":
            self.needs_classes = "forms groups='dominant' by the classes of clients"

    # client

    def introduce(self, me: Me) -> State:
        """Return the client's dominant class if groups are formed by it."""
        return {DOMINANT: dominant_class(me.data)} if self.groups == "dominant" else {}

    # server

    def setup(self, stage: str) -> None:
        """Refuse more groups than clients, and groups by dominant class if some clients have not joined."""
        super().setup(stage)
        clients = len(self.roster)
        if self.clusters > clients:
            raise FederationError(
                f"{clients} clients cannot form {self.clusters} groups: set clusters to {clients} or less."
            )
        if self.groups == "dominant" and any(DOMINANT not in client.told for client in self.roster):
            raise FederationError(
                "groups='dominant' divides clients by the class they send when they join, so all must join before the "
                "run begins: leave min_clients out, or use groups='random'."
            )

    def cluster_of(self, client: int) -> int:
        """Return the client's group."""
        return self.assignment()[client]

    def assignment(self) -> list[int]:
        """Return every client's group: a pure function of the seed and the clients' dominant classes."""
        clients = range(len(self.roster))
        if self.groups == "random":
            return balanced(seeding.stream(self.seed, "clusters"), len(clients), self.clusters)
        order = sorted(clients, key=lambda client: (int(self.roster[client].told[DOMINANT]), client))
        place = {client: i for i, client in enumerate(order)}
        return [place[client] * self.clusters // len(order) for client in clients]

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        """Return one stage per group, in random order."""
        groups = self.assignment()
        order = seeding.stream(self.seed, "visits", round).permutation(self.clusters)
        return [Stage([client for client in cohort if groups[client] == q], f"group {q}") for q in order.tolist()]


def dominant_class(data: LocalData) -> Tensor:
    """Return a client's most frequent training class, in its own labelling; the first one among equals."""
    return torch.bincount(data.labels()).argmax()
