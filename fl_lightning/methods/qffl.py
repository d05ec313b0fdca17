"""q-FFL (Li et al., 2020, "Fair Resource Allocation in Federated Learning"): clients with high loss weigh more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fl_lightning.errors import FederationError
from fl_lightning.evaluation import mean_loss
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me, Reply
from fl_lightning.ranges import NonNegative
from fl_lightning.wire import Message, State

#: The entry of the up message that carries F_k.
LOSS = "received.loss"
#: Added to F_k, so that powers are defined for zero loss.
EPSILON = 1e-10


class QFFL(FederatedModule):
    """FedAvg's clients under the objective sum_k F_k^(q+1) / (q+1), by q-FedAvg (Algorithm 2 of the paper).

    A client sends its trained model w_k and F_k, the loss of the *received* model w over all its training samples, in
    eval mode (:func:`~fl_lightning.evaluation.mean_loss`). With L = 1/lr the server computes

        dw_k    = L (w - w_k)
        Delta_k = F_k^q dw_k
        h_k     = q F_k^(q-1) ||dw_k||^2 + L F_k^q
        w      <- w - sum_k Delta_k / sum_k h_k

    Sample counts are not used. L ||w - w_k||^2 is large: at usual learning rates, q of 0.1 and more shortens the step
    by orders of magnitude.

    Args:
        net: the network.
        q: exponent of the losses in the weights; 0 is FedAvg with uniform weights.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`; ``lr`` must be positive.
    """

    plain_sgd = "estimates the Lipschitz constant as 1 / lr"

    aggregates_by_mean = takes_rules = False  # the clients' losses decide the weights

    fixed: ClassVar[Mapping[str, str]] = {"weighting": "clients are weighted by their loss, not by their samples"}

    def __init__(self, net: FedNet, q: NonNegative = 0.001, **kwargs: Any) -> None:
        super().__init__(net, weighting="uniform", **kwargs)
        if not self.local.lr > 0:
            raise FederationError("QFFL estimates the Lipschitz constant as 1 / lr: lr must be greater than 0.")
        self.q = q

    # client

    def enter(self, received: State, me: Me) -> State:
        """Compute F_k with the received model on the client's data; start from that model."""
        state = super().enter({name: value for name, value in received.items() if not self.resets(name)}, me)
        loss = mean_loss(self, {**state, **received, **me.private}, me.data)
        return state | {LOSS: loss.to(self.compute_dtype)}

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send the trained model and the loss of the received one."""
        return super().leave(state, received, me).plus(up={LOSS: state[LOSS]})

    # server

    def message_down(self, client: int) -> State:
        """Return the shared entries with the running statistics, which the loss needs even if training resets them."""
        return self.evaluation_down(client)

    def aggregate(self, messages: list[Message]) -> State:
        """Compute q-FedAvg's update, written as a weighted mean of the clients' models and the server's.

        Divided by L, h_k is a_k + b_k with a_k = F_k^q and b_k = q F_k^(q-1) L ||w - w_k||^2, and the new model is

            w - sum_k a_k (w - w_k) / H = sum_k (a_k / H) w_k + (sum_k b_k / H) w,    H = sum_k (a_k + b_k).

        At q = 0 every a_k is 1 and every b_k is 0: exactly the uniform mean.
        """
        server = self.server_state()
        losses = _losses(messages)
        a = [loss**self.q for loss in losses]
        b = [self.q * f ** (self.q - 1) * self._moved(m, server) for m, f in zip(messages, losses, strict=True)]
        total = math.fsum(a + b)
        own, weights = Message(-1, server, 0), [math.fsum(b) / total, *(x / total for x in a)]
        rest = [name for name in self.shared_names if name not in self.trainable_names]
        return self.mean(messages, names=rest) | self.mean([own, *messages], weights, self.trainable_names)

    def _moved(self, message: Message, server: State) -> float:
        """Return L ||w - w_k||^2 over all trainable parameters."""
        moved = (server[name].double() - message.tensors[name].double() for name in self.trainable_names)
        return sum(float(change.pow(2).sum()) for change in moved) / self.local.lr


def _losses(messages: Sequence[Message]) -> list[float]:
    """Return the clients' losses; negative ones, due to noise, are replaced by the smallest non-negative loss."""
    said = [float(message.tensors[LOSS]) for message in messages]
    least = min((loss for loss in said if loss >= 0), default=1.0)
    return [(loss if loss >= 0 else least) + EPSILON for loss in said]
