"""FedGroup (Duan et al., 2020): groups of clients with first updates of similar direction."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from fl_lightning import seeding
from fl_lightning.engine import LocalMethod, Plan
from fl_lightning.methods.lib.adaptation import fit_entries, fitting
from fl_lightning.methods.lib.clusters import ChosenClusters, Clusters
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me, Reply, Stage
from fl_lightning.ranges import Count
from fl_lightning.wire import Message, State, message_weights, prefixed, under

#: Number of clients per group in the cold start.
PER_GROUP = 20
#: Names of the two stages before the first round.
COLD, JOIN = "cold start", "newcomers"
#: Prefixes of w0, of the groups' references (sent to clients without a group) and of trained entries.
START, REFERENCE, TRAINED = "start.", "reference.", "trained."
#: Singular values below this fraction of the largest and further digits of cosines are rounding errors.
RANK, DIGITS = 1e-6, 9
#: Number of entries of an update processed at once.
CHUNK = 1 << 18


class FedGroup(ChosenClusters):
    """Form Q groups in a cold start, then run FedAvg in each of them.

    Cold start: ``min(20 Q, K)`` clients each take a few SGD steps from the initial model w0, to w_k. Their updates
    dw_k = w_k - w0 are described by their cosines with the first Q right singular vectors of the matrix of all dw, and
    k-means (k-means++, ten restarts) clusters the clients by these. A group's model becomes w0 + mean dw of its
    members, and mean dw is the group's reference. All other clients then take the same steps and join the group with
    the smallest (1 - cos(dw_k, reference)) / 2. Groups do not change afterwards.

    The first round of the first fit begins with the cold start; clients keep no state from it. A group without clients,
    if there are fewer different clients than groups, keeps w0 and stays empty.

    Args:
        net: the network.
        clusters: number of groups Q; with one this is FedAvg, started from w0 + mean dw.
        cold_steps: SGD steps of the cold start.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, clusters: Clusters = 4, cold_steps: Count = 50, **kwargs: Any) -> None:
        super().__init__(net, clusters, **kwargs)
        self.make_models(independent=False)
        self.cold_steps = cold_steps
        self.groups: dict[int, int] = {}
        self.start: State = {}
        self.references: dict[int, State] = {}

    # client

    @property
    def cold(self) -> Plan:
        """Plan of the cold start: a few SGD steps."""
        return fitting(self, self.trainable_names, self.cold_steps, self.cold_steps, COLD)

    def plan(self, me: Me) -> LocalMethod:
        """Return the cold start's plan in its stages, else a round of FedAvg."""
        return self.cold if me.stage in (COLD, JOIN) else super().plan(me)

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send the trained model; keep nothing of the cold start."""
        reply = super().leave(state, received, me)
        return reply._replace(keep=None) if me.stage in (COLD, JOIN) else reply

    def settle(self, received: Sequence[State], mes: Sequence[Me]) -> Sequence[State]:
        """Let clients without a group take the steps of the cold start to choose theirs."""
        starts = {i: under(START, message) for i, message in enumerate(received) if self.chooses(message)}
        new = [i for i, start in starts.items() if mes[i].memory.get(JOIN, start) is None]
        if new:
            states = [{**self.at_first(), **starts[i], **self.fresh_buffers()} for i in new]
            for i, trained in zip(new, fit_entries(self, self.cold, [mes[i].data for i in new], states), strict=True):
                mes[i].memory.put(JOIN, starts[i], prefixed(TRAINED, trained))
        return [(i in starts and mes[i].memory.get(JOIN, starts[i])) or {} for i in range(len(mes))]

    def choose(self, received: State, me: Me) -> int:
        """Return the group whose reference is nearest in direction to the client's update."""
        references = {q: under(f"{REFERENCE}{q}.", received) for q in range(self.clusters)}
        update = update_of(under(TRAINED, me.private), under(START, received))
        return nearest(update, {q: reference for q, reference in references.items() if reference})

    # server

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        """Return the round's stages; the first round begins with the cold start, in two stages.

        Groups of an earlier fit, or of a round resumed after its cold start, are kept.
        """
        formed = self.references and not self.completed_stages
        if round or formed:
            return [Stage(cohort)]
        clients = len(self.roster)
        rng = seeding.stream(self.seed, "cold clients")
        picked: list[int] = rng.choice(clients, min(PER_GROUP * self.clusters, clients), replace=False).tolist()
        others = sorted(set(range(clients)) - set(picked))
        return [
            Stage(picked, COLD, lambda client: self.first_model(self.model_state(0)), self.form, needed=True),
            Stage(others, JOIN, lambda client: self.first_model(self.start), self.admit),
            Stage(cohort),
        ]

    def first_model(self, start: State) -> State:
        """Return the shared entries of w0."""
        return {name: start[name].to(self.device) for name in self.shared_names if not self.resets(name)}

    def knows(self, client: int) -> int | None:
        """Return the client's group; the first one before groups are formed."""
        return self.groups.get(client) if self.references else 0

    def all_models(self) -> State:
        """Return all models, w0 and the references, from which a client without a group chooses."""
        start = prefixed(START, {name: value.to(self.device) for name, value in self.start.items()}, self.shared_names)
        references = {f"{REFERENCE}{q}.{n}": v for q, state in self.references.items() for n, v in state.items()}
        return super().all_models() | start | references

    @torch.no_grad()
    def form(self, messages: list[Message]) -> State:
        """Form groups of the cold start's clients and set their models, regardless of the server's optimizer."""
        self.start = {name: value.clone() for name, value in self.model_state(0).items()}
        updates = [self.update_of(message.tensors) for message in messages]
        features = cosine_features(gram_matrix(updates), self.clusters)
        rng = seeding.stream(self.seed, "k-means")
        labels = k_means(features, self.clusters, int(rng.integers(2**31)))
        self.groups = {message.client: label for message, label in zip(messages, labels, strict=True)}
        members = {q: [m for m in messages if self.groups[m.client] == q] for q in sorted(set(labels))}
        self.references = {}
        for group, own in members.items():
            mean = self.mean(own, message_weights(own, "uniform"), self.shared_names)
            model = self.model_state(group)
            for name, value in mean.items():
                model[name].copy_(value)
            self.references[group] = self.update_of(mean)
        return {}

    def admit(self, messages: list[Message]) -> State:
        """Assign the other clients to their nearest groups."""
        self.groups |= {m.client: nearest(self.update_of(m.tensors), self.references) for m in messages}
        return {}

    def update_of(self, trained: State) -> State:
        """Return w_k - w0 over shared trainable parameters."""
        names = [name for name in self.trainable_names if name in self.shared_names]
        return update_of({name: trained[name] for name in names}, self.start)

    def server_extras(self) -> dict[str, Any]:
        """Return the groups, w0 and the groups' references."""
        references = {group: dict(state) for group, state in self.references.items()}
        return {"groups": dict(self.groups), "start": dict(self.start), "references": references}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Restore the server's state."""
        self.groups, self.start = dict(extras["groups"]), dict(extras["start"])
        self.references = dict(extras["references"])


def update_of(trained: State, start: State) -> State:
    """Return w_k - w0 over common entries."""
    return {name: value - start[name].to(value) for name, value in trained.items() if name in start}


def nearest(update: State, references: Mapping[int, State]) -> int:
    """Return the group whose reference is nearest in direction to an update."""
    distances: dict[int, float] = {}
    for group, reference in references.items():
        products = gram_matrix([update, reference])
        cosine = float(products[0, 1] / np.sqrt(products[0, 0] * products[1, 1] or 1.0))
        distances[group] = (1 - cosine) / 2 if np.isfinite(cosine) else np.inf
    return min(distances, key=lambda group: distances[group])


def gram_matrix(updates: Sequence[State]) -> np.ndarray[Any, Any]:
    """Return inner products of updates over all entries, float64, shape (K, K)."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in updates[0]:
        rows = torch.stack([update[name].flatten().to(updates[0][name]) for update in updates])
        for part in torch.split(rows, CHUNK, 1):
            double = part.double()
            total += (double @ double.T).cpu()
    return total.numpy()


def cosine_features(gram: np.ndarray[Any, Any], directions: int) -> np.ndarray[Any, Any]:
    """Return cosines of updates with the first right singular vectors of the update matrix, shape (K, directions).

    With D = U S V^T, the product of row k and direction q is (D V)_kq = (U S)_kq, and U and S^2 are eigenvectors and
    eigenvalues of the small matrix D D^T: exact, and without a matrix of clients by parameters. The arbitrary signs of
    singular vectors do not affect k-means. An update of length 0 has cosines 0. Differences within rounding are
    removed, so that clients with the same data stay together.

    Args:
        gram: D D^T, shape (K, K).
        directions: number of directions; those beyond the rank have cosines 0.
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
    """Return the cluster of every row; some stay empty if there are fewer different rows than clusters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different rows than clusters
        means = KMeans(min(clusters, len(features)), init="k-means++", n_init=10, random_state=seed)
        labels: list[int] = means.fit_predict(features).tolist()
    return labels
