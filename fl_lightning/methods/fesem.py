"""FeSEM (Xie et al., 2020, "Multi-Center Federated Learning"): clients join the centre nearest to their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.methods.lib.clusters import ClusterModels, Clusters, balanced, squared_distances
from fl_lightning.nets import FedNet
from fl_lightning.wire import Message, State

Centres = Literal["independent", "same"]


class FeSEM(ClusterModels):
    """K-means on the clients' weights, one step after every round.

    The server keeps the last model w_k of each client. After a round, every client with a known w_k is assigned to the
    nearest centre (E-step), by all trainable parameters but no buffers, and each centre becomes the unweighted mean of
    its members' w_k (M-step), buffers included. Ties keep the client's current centre, and a centre without members
    does not change. Neither step increases the sum of squared distances to the centres. Clients then train from their
    centre.

    The first assignment is balanced and random, because distances to random initial weights are meaningless. A client
    that never trained is evaluated with the centre of most members.

    Args:
        net: the network.
        clusters: number of centres Q; with one, and all clients in every round, this is FedAvg with uniform weights.
        centres: initial weights of the centres: ``independent`` draws, as in the paper, or the ``same``. Independent
            centres are so far apart that clients hardly ever leave their first one.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    fixed: ClassVar[Mapping[str, str]] = {"weighting": "all members of a cluster count the same"}

    def __init__(
        self,
        net: FedNet,
        clusters: Clusters = 4,
        centres: Centres = "independent",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, clusters, weighting="uniform", **kwargs)
        self.make_models(independent=centres == "independent")
        self.known: dict[int, State] = {}
        self.labels: dict[int, int] = {}

    # server

    def cluster_of(self, client: int) -> int:
        """Return the client's own cluster, else the one with most members."""
        if client in self.labels or not self.labels:
            return self.labels.get(client, 0)
        sizes = Counter(self.labels.values())
        return max(sorted(sizes), key=lambda cluster: sizes[cluster])

    def cluster_sent(self, client: int) -> int:
        """Return the client's own cluster; before its first round, the randomly assigned one."""
        if client in self.labels:
            return self.labels[client]
        rng = seeding.stream(self.seed, "clusters")
        return balanced(rng, len(self.roster), self.clusters)[client]

    def aggregate(self, messages: list[Message]) -> State:
        """Take one E-step and one M-step over all clients with a known model."""
        self.known |= {m.client: {name: v.clone() for name, v in m.tensors.items()} for m in messages}
        # Models restored from a checkpoint may be on another device.
        self.known = {c: {name: v.to(self.device) for name, v in own.items()} for c, own in self.known.items()}
        self.labels = self.nearest()
        members: dict[int, list[Message]] = {}
        for client, cluster in self.labels.items():
            members.setdefault(cluster, []).append(Message(client, self.known[client], 1))
        return self.cluster_means(members)

    def nearest(self) -> dict[int, int]:
        """Take the E-step: return the nearest centre of every client with a known model."""
        clients, centres = sorted(self.known), [self.model_state(q) for q in range(self.clusters)]
        names = [name for name in self.trainable_names if name in self.shared_names]
        distances = squared_distances([self.known[c] for c in clients], centres, names)
        current = torch.tensor([self.cluster_sent(client) for client in clients])
        return dict(zip(clients, assign(distances, current).tolist(), strict=True))

    def server_extras(self) -> dict[str, Any]:
        """Return the clients' last models and clusters."""
        return {"known": {c: dict(state) for c, state in self.known.items()}, "labels": dict(self.labels)}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Restore the server's state."""
        self.known, self.labels = dict(extras["known"]), dict(extras["labels"])


def assign(distances: Tensor, current: Tensor) -> Tensor:
    """Return the nearest centre of every client; ties keep the current centre.

    Args:
        distances: shape (K, Q).
        current: current centres, shape (K,).

    Example:
        >>> assign(torch.tensor([[1.0, 1.0, 2.0], [3.0, 0.5, 0.5]]), torch.tensor([1, 0]))
        tensor([1, 1])
    """
    least, nearest = distances.min(1)
    return torch.where(distances.gather(1, current[:, None])[:, 0] <= least, current, nearest)
