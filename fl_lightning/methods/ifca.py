"""IFCA (Ghosh et al., 2020): every client trains the model that fits its data best."""

from __future__ import annotations

import math
from typing import Any

import torch

from fl_lightning.evaluation import mean_losses
from fl_lightning.methods.lib.clusters import CHOICE, ChosenClusters, Clusters
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me, Reply
from fl_lightning.ranges import CountOrZero
from fl_lightning.wire import Message, State, Weighting, under


class IFCA(ChosenClusters):
    """The server sends all Q models; a client trains the one with the lowest loss on its training data.

    The loss is computed in eval mode without augmentation; ties go to the first model. The client sends the trained
    model and its index; each model becomes the mean of its clients' models, or is unchanged without any. The models are
    initialised independently. All clients, including those that never trained, are evaluated with the model of lowest
    *training* loss; test data is not used for the choice.

    Args:
        net: the network.
        clusters: number of models Q; with one this is FedAvg with uniform weights.
        warmup: rounds in which clients choose at random, so that no model attracts all clients.
        weighting: weight clients uniformly or by their number of samples.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(
        self,
        net: FedNet,
        clusters: Clusters = 4,
        warmup: CountOrZero = 0,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, clusters, weighting=weighting, **kwargs)
        self.make_models(independent=True)
        self.warmup = warmup

    # client

    def choose(self, received: State, me: Me) -> int:
        """Return the model with the lowest loss on the client's training data."""

        def least() -> int:
            states = [{**self.at_first(), **under(f"{q}.", received), **me.private} for q in range(self.clusters)]
            losses = [math.inf if math.isnan(loss) else loss for loss in mean_losses(self, states, me.data).tolist()]
            return losses.index(min(losses))

        return me.memory.recall("choice", {**received, **me.private}, least)

    def enter(self, received: State, me: Me) -> State:
        """Start from the model with the lowest loss, or a random one in the warm-up."""
        early = me.round < self.warmup
        q = int(me.stream("choice").integers(self.clusters)) if early else self.choose(received, me)
        own = {name: value for name, value in under(f"{q}.", received).items() if not self.resets(name)}
        return super().enter(own, me) | {CHOICE: torch.tensor(q, device=self.device)}

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send the trained model and its index."""
        return super().leave(state, received, me).plus(up={CHOICE: state[CHOICE]})

    # server

    def knows(self, client: int) -> int | None:
        """Return None: every client chooses."""
        return None

    def message_down(self, client: int) -> State:
        """All models."""
        return self.all_models()

    def cluster_sending(self, message: Message) -> int:
        """Return the choice in the message."""
        return int(message.tensors[CHOICE])
