"""IFCA (Ghosh et al., 2020): every client trains the model that fits its data best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.methods.clusters import ClusterModels
from fl_lightning.methods.memo import ClientMemo
from fl_lightning.nets import FedNet
from fl_lightning.wire import Message, State, Weighting

#: The entry of the up message that says which model was trained.
CHOICE = "cluster"


class IFCA(ClusterModels):
    """The server sends all Q models; a client trains the one with the least loss on all of its training data.

    The loss is that of the model in eval mode, without augmentation; of equal ones the first is taken. The client sends
    what it trained and which model that was, and each model becomes the mean of what was sent for it; one that nobody
    chose stays as it is. All models are drawn for themselves. Clients are evaluated with the model of least *training*
    loss, also those that never trained; test data plays no part in the choice.

    Args:
        net: the network.
        clusters: number of models Q; with one this is FedAvg with uniform weights.
        warmup: rounds in which clients choose at random, against one model that wins everything.
        weighting: weigh clients all the same, or by their number of samples.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(
        self, net: FedNet, clusters: int = 4, warmup: int = 0, weighting: Weighting = "uniform", **kwargs: Any
    ) -> None:
        super().__init__(net, clusters, weighting=weighting, **kwargs)
        self.make_models(independent=True)
        if warmup < 0:
            raise FederationError(f"warmup must be 0 or more rounds, not {warmup}.")
        self.warmup = warmup
        self._chosen = ClientMemo[int]()

    def message_down(self, client: int) -> State:
        """All models, with the running statistics that the choice needs."""
        models = [self.model_state(cluster) for cluster in range(self.clusters)]
        return {f"{q}.{name}": model[name] for q, model in enumerate(models) for name in self.shared_names}

    def begin(self, client: int, message: State) -> State:
        """As FedAvg, from the chosen model."""
        models = [{name: message[f"{q}.{name}"] for name in self.shared_names} for q in range(self.clusters)]
        if self.completed_rounds < self.warmup:
            chosen = int(seeding.stream(self.seed, "choice", self.completed_rounds, client).integers(self.clusters))
        elif not self.private_names and all(_equal(model, self.model_state(q)) for q, model in enumerate(models)):
            chosen = self.cluster_of(client)  # known since the evaluation
        else:
            chosen = self.choose(client, models)
        received = {name: value for name, value in models[chosen].items() if self._sends(name)}
        return super().begin(client, received) | {CHOICE: torch.tensor(chosen, device=self.device)}

    def finish(self, client: int, state: State, message: State) -> tuple[State, State]:
        """The trained model and which one it is."""
        sent, kept = super().finish(client, state, message)
        return sent | {CHOICE: state[CHOICE]}, kept

    def cluster_sending(self, message: Message) -> int:
        """What the message says."""
        return int(message.tensors[CHOICE])

    def choose(self, client: int, models: Sequence[State]) -> int:
        """The model with the least loss on the client's training data."""
        server, private = self.server_state(), self.snapshots[client].private
        states = [{**server, **model, **private} for model in models]
        losses = self.evaluator.losses(self, states, client).tolist()
        return min(range(len(losses)), key=lambda q: math.inf if math.isnan(losses[q]) else losses[q])

    def cluster_of(self, client: int) -> int:
        """What the client would choose of the present models."""
        chosen = self._chosen.of(self.federation, self.server)
        if client not in chosen:
            chosen[client] = self.choose(client, [self.model_state(q) for q in range(self.clusters)])
        return chosen[client]


def _equal(sent: State, held: State) -> bool:
    return all(torch.equal(value, held[name]) for name, value in sent.items())
