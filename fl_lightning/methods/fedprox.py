"""FedProx (Li et al., 2020): FedAvg with a proximal term that keeps clients near the received model."""

from __future__ import annotations

from typing import Any

from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me
from fl_lightning.ranges import NonNegative
from fl_lightning.wire import State, prefixed


class FedProx(FederatedModule):
    """FedAvg with the local objective F_k(w') + (mu / 2) ||w' - w||^2, where w is the received model.

    The penalty covers trainable parameters, never buffers. Steps diverge when ``lr * mu >= 2``.

    Args:
        net: the network.
        mu: strength of the proximal term; 0 is FedAvg.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, mu: NonNegative = 0.01, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mu = mu

    # client

    def enter(self, received: State, me: Me) -> State:
        """Start from the received model w and keep a copy of it."""
        state = super().enter(received, me)
        return state | prefixed("received.", state, self.trainable_names)

    def correct(self, state: State, grads: State) -> State:
        """Add the gradient of the proximal term, mu (w' - w); Algorithm 2, line 6."""
        return {name: g + self.mu * (state[name] - state[f"received.{name}"]) for name, g in grads.items()}
