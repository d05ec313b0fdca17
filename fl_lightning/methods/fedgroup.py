"""FedGroup (Duan et al., 2020): groups of clients whose first updates point the same way."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from fl_lightning import seeding
from fl_lightning.engine import Stage
from fl_lightning.errors import FederationError
from fl_lightning.methods.adaptation import Fitting, fit_entries
from fl_lightning.methods.clusters import ClusterModels
from fl_lightning.methods.memo import ClientMemo
from fl_lightning.nets import FedNet
from fl_lightning.wire import Message, State, message_weights, weighted_mean

#: Clients, for each group, that groups are formed of.
PER_GROUP = 20
#: Names of the two stages that come before the first round.
COLD, JOIN = "cold start", "newcomers"
#: Singular values below this part of the largest, and digits of cosines beyond these, are rounding.
RANK, DIGITS = 1e-6, 9
#: Entries of an update that are worked on at once.
CHUNK = 1 << 18


class FedGroup(ClusterModels):
    """A cold start forms Q groups; then FedAvg inside each of them.

    Cold start: ``min(20 Q, K)`` clients each take a few SGD steps from the initial model w0, to w_k. Their updates
    dw_k = w_k - w0 are described by their cosines with the first Q right singular vectors of the matrix of all dw, and
    k-means (k-means++, ten restarts) divides the clients by these. A group's model becomes w0 + mean dw of its members,
    and mean dw is the group's reference. All other clients then take the same steps and join the group with the least
    (1 - cos(dw_k, reference)) / 2. Groups never change after that.

    The first round of the first fit begins with the cold start, of which the clients keep nothing. A group that has no
    client, because there are fewer different clients than groups, keeps w0 and is joined by nobody.

    Args:
        net: the network.
        clusters: number of groups Q; with one this is FedAvg, started from w0 + mean dw.
        cold_steps: SGD steps of the cold start.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, clusters: int = 4, cold_steps: int = 50, **kwargs: Any) -> None:
        super().__init__(net, clusters, **kwargs)
        self.make_models(independent=False)
        if cold_steps < 1:
            raise FederationError(f"cold_steps must be 1 or more, not {cold_steps}.")
        self.cold_steps = cold_steps
        self.groups: dict[int, int] = {}
        self.start: State = {}
        self.references: dict[int, State] = {}
        self._guests = ClientMemo[int]()

    # ---- rounds -----------------------------------------------------------------------------------------------

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        """The first round begins with the cold start, of some clients and then of the others.

        Groups that an earlier fit formed go on; those of a round that is resumed after its cold start are its own.
        """
        formed = self.references and not self.completed_stages
        if round or formed:
            return [Stage(cohort)]
        clients = self.federation.num_clients
        rng = seeding.stream(self.seed, "cold clients")
        picked: list[int] = rng.choice(clients, min(PER_GROUP * self.clusters, clients), replace=False).tolist()
        others = sorted(set(range(clients)) - set(picked))
        cold = Fitting(self, self.trainable_names, self.cold_steps, self.cold_steps, COLD)
        return [Stage(picked, COLD, cold, needed=True), Stage(others, JOIN, cold), Stage(cohort)]

    def message_down(self, client: int) -> State:
        """w0 in the cold start, else the model of the client's group."""
        if self.stage.training is None:
            return super().message_down(client)
        start = self.model_state(0) if self.stage.name == COLD else self.start
        return {name: start[name].to(self.device) for name in self.shared_names if self._sends(name)}

    def aggregate(self, messages: list[Message]) -> State:
        """Groups in the cold start, else the mean of every group."""
        if self.stage.name == COLD:
            self.form(messages)
            return {}
        if self.stage.name == JOIN:
            self.groups |= {message.client: self.join(message.tensors) for message in messages}
            return {}
        return super().aggregate(messages)

    # ---- groups -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def form(self, messages: list[Message]) -> None:
        """Form the groups of clients that were picked, and give them their models, whatever the server's optimizer."""
        self.start = {name: value.clone() for name, value in self.model_state(0).items()}
        updates = [self.update_of(message.tensors) for message in messages]
        features = cosine_features(gram_matrix(updates), self.clusters)
        rng = seeding.stream(self.seed, "k-means")
        labels = k_means(features, self.clusters, int(rng.integers(2**31)))
        self.groups = {message.client: label for message, label in zip(messages, labels, strict=True)}
        members = {q: [m for m in messages if self.groups[m.client] == q] for q in sorted(set(labels))}
        self.references = {}
        for group, own in members.items():
            mean = weighted_mean(own, message_weights(own, "uniform"), self.shared_names)
            model = self.model_state(group)
            for name, value in mean.items():
                model[name].copy_(value)
            self.references[group] = self.update_of(mean)

    def join(self, trained: State) -> int:
        """The group whose reference is nearest in direction to the update of a client that trained from w0."""
        update = self.update_of(trained)
        distances: dict[int, float] = {}
        for group, reference in self.references.items():
            products = gram_matrix([update, reference])
            cosine = float(products[0, 1] / np.sqrt(products[0, 0] * products[1, 1] or 1.0))
            distances[group] = (1 - cosine) / 2 if np.isfinite(cosine) else np.inf
        return min(distances, key=lambda group: distances[group])

    def update_of(self, trained: State) -> State:
        """w_k - w0, over trainable parameters that are shared."""
        names = [name for name in self.trainable_names if name in self.shared_names]
        return {name: trained[name] - self.start[name].to(trained[name]) for name in names}

    def cluster_of(self, client: int) -> int:
        """The client's group; before there are any, the first."""
        if client in self.groups or not self.references:
            return self.groups.get(client, 0)
        self.prepare_evaluation([client])
        return self._guests.of(self.federation, self.server)[client]

    def prepare_evaluation(self, clients: Sequence[int]) -> None:
        """Clients without a group take the steps of the cold start; nothing of it is kept."""
        if not self.references:
            return
        guests = self._guests.of(self.federation, self.server)
        missing = [client for client in clients if client not in self.groups and client not in guests]
        if missing:
            start = {name: value.to(self.device) for name, value in self.start.items()}
            if self.buffers_policy == "reset":
                start |= {name: value.to(start[name]) for name, value in self._initial_buffers.items()}
            cold = Fitting(self, self.trainable_names, self.cold_steps, self.cold_steps, COLD)
            fitted = fit_entries(cold, self.federation, missing, start)
            guests.update({client: self.join(trained) for client, trained in fitted.items()})

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def server_extras(self) -> dict[str, Any]:
        """The groups, w0 and the groups' references."""
        references = {group: dict(state) for group, state in self.references.items()}
        return {"groups": dict(self.groups), "start": dict(self.start), "references": references}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Bring them back."""
        self.groups, self.start = dict(extras["groups"]), dict(extras["start"])
        self.references = dict(extras["references"])


def gram_matrix(updates: Sequence[State]) -> np.ndarray[Any, Any]:
    """Inner products of updates over all of their entries, in float64, shape (K, K)."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in updates[0]:
        rows = torch.stack([update[name].flatten().to(updates[0][name]) for update in updates])
        for part in torch.split(rows, CHUNK, 1):
            double = part.double()
            total += (double @ double.T).cpu()
    return total.numpy()


def cosine_features(gram: np.ndarray[Any, Any], directions: int) -> np.ndarray[Any, Any]:
    """Cosines of updates with the first right singular vectors of the matrix of updates, shape (K, directions).

    With D = U S V^T the product of row k and direction q is (D V)_kq = (U S)_kq, and U and S^2 are eigenvectors and
    eigenvalues of the small matrix D D^T: exact, and without a matrix of clients by parameters. Signs of singular
    vectors are arbitrary; k-means does not see them. An update of length 0 has the cosines 0. What is within rounding
    is made equal, so that clients with the same data are never told apart.

    Args:
        gram: D D^T, shape (K, K).
        directions: number of directions; those beyond the rank have the cosines 0.
    """
    values, vectors = np.linalg.eigh(gram)
    lengths = np.sqrt(np.clip(np.diag(gram), 0, None))
    order = np.argsort(-values, kind="stable")[:directions]
    order = order[values[order] > RANK**2 * values[-1]]
    products = vectors[:, order] * np.sqrt(np.clip(values[order], 0, None))
    features = np.zeros((len(gram), directions))
    features[:, : len(order)] = np.divide(products, lengths[:, None], where=lengths[:, None] > 0, out=0 * products)
    return features.round(DIGITS)


def k_means(features: np.ndarray[Any, Any], clusters: int, seed: int) -> list[int]:
    """The cluster of every row; where there are fewer different rows than clusters some stay empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different rows than clusters
        means = KMeans(min(clusters, len(features)), init="k-means++", n_init=10, random_state=seed)
        labels: list[int] = means.fit_predict(features).tolist()
    return labels
