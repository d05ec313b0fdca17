"""FedCluster (Chen et al., 2020): groups of clients take turns within a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from fl_lightning import seeding
from fl_lightning.engine import Stage
from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation
from fl_lightning.methods.clusters import ClusteredModule, balanced
from fl_lightning.methods.factorized import choice
from fl_lightning.nets import FedNet

Groups = Literal["random", "dominant"]


class FedCluster(ClusteredModule):
    """One model that visits Q groups of clients, one after the other, in every round.

    Groups are formed once and differ in size by one client at most. A round visits those that have clients in the
    cohort, in a random order; the clients of a group train from the model that the groups before it left and the server
    takes their mean. So a round is up to Q steps of the server, and the model is the same for everyone.

    Args:
        net: the network.
        clusters: number of groups Q, at most the number of clients; with one group this is FedAvg.
        groups: form groups at ``random``, or of clients with the same ``dominant`` class, as far as sizes allow; for
            the latter the server has to know these classes.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, clusters: int = 5, groups: Groups = "random", **kwargs: Any) -> None:
        super().__init__(net, clusters, **kwargs)
        self.groups: Groups = choice("groups", groups, ("random", "dominant"))

    def setup(self, stage: str) -> None:
        """Refuse more groups than there are clients."""
        super().setup(stage)
        clients = self.federation.num_clients
        if self.clusters > clients:
            raise FederationError(
                f"{clients} clients cannot form {self.clusters} groups: set clusters to {clients} or less."
            )

    def cluster_of(self, client: int) -> int:
        """The client's group."""
        return self.assignment()[client]

    def assignment(self) -> list[int]:
        """The group of every client: a pure function of the seed and the data."""
        federation = self.federation
        if self.groups == "random":
            return balanced(seeding.stream(self.seed, "clusters"), federation.num_clients, self.clusters)
        order = sorted(range(federation.num_clients), key=lambda client: (dominant_class(federation, client), client))
        place = {client: i for i, client in enumerate(order)}
        return [place[client] * self.clusters // len(order) for client in range(len(order))]

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        """One stage per group, in a random order."""
        groups = self.assignment()
        order = seeding.stream(self.seed, "visits", round).permutation(self.clusters)
        return [Stage([client for client in cohort if groups[client] == q], f"group {q}") for q in order.tolist()]


def dominant_class(federation: Federation, client: int) -> int:
    """The class that a client has most training samples of, in its own labelling; the first of equal ones."""
    targets = federation.targets[federation.train[client]]
    if federation.label_maps is not None:
        targets = federation.label_maps[client][targets]
    return int(torch.bincount(targets, minlength=federation.num_classes).argmax())
