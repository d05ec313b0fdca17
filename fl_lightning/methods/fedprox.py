"""FedProx (Li et al., 2020): FedAvg whose clients are held near the model they received."""

from __future__ import annotations

from typing import Any

from fl_lightning.engine import Batch, Gradient, Phase, Update
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.wire import State


class FedProx(FederatedModule):
    """FedAvg with the local objective F_k(w') + (mu / 2) ||w' - w||^2, where w is the received model.

    The penalty covers trainable parameters, never buffers. Steps diverge when ``lr * mu >= 2``.

    Args:
        net: the network.
        mu: strength of the proximal term; 0 is FedAvg.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        if not mu >= 0:
            raise FederationError(f"mu must be 0 or more, not {mu}.")
        self.mu = mu

    def begin(self, client: int, message: State) -> State:
        """As FedAvg, and remember the received model."""
        state = super().begin(client, message)
        return state | {f"received.{name}": state[name] for name in self.trainable_names}

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One step with the gradient of the proximal term, mu (w' - w), added; written down, it needs no autograd."""
        update = super().descend(state, batch, phase, gradient)
        pull = {name: self.mu * (state[name] - state[f"received.{name}"]) for name in update.grads}
        return update._replace(grads={name: g + pull[name] for name, g in update.grads.items()})
