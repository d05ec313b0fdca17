"""pFedMe (Dinh et al., 2020): personal models as proximal points of a shared one (Moreau envelopes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fl_lightning.engine import Batch, Gradient, Move, Phase, Update
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me, Reply
from fl_lightning.ranges import Count, NonNegative
from fl_lightning.wire import Message, State, message_weights, prefixed, under, without

#: Prefix of the personal model's entries.
THETA = "theta."


class PFedMe(FederatedModule):
    """Each client has a personal model theta_k, regularised towards the shared one (Algorithm 1 of the paper).

    In a round, both start from the received w. On every minibatch, a client takes K steps

        theta <- theta - personal_lr (grad F_k(theta) + lam (theta - w_k))

    towards the minimiser of F_k(theta) + (lam / 2) ||theta - w_k||^2, and then one step of w_k along the gradient of
    the minimum, the Moreau envelope of F_k,

        w_k <- w_k - lr lam (w_k - theta).

    It sends w_k and keeps theta, with which it is evaluated; a client that never trained is evaluated with w. The
    server sets w <- (1 - beta) w + beta sum_k p_k w_k. ``momentum``, ``weight_decay`` and ``clip_norm`` apply to the
    step of w_k. Running statistics are those of theta, the only model applied to data: the server averages them, theta
    keeps its own.

    Args:
        net: the network.
        lam: strength of the proximal term; ``lr * lam`` must be at most 1.
        inner_steps: number of steps of theta on each minibatch, K.
        personal_lr: learning rate of theta.
        beta: weight of the clients' mean in the server's new model; 1 is the plain mean.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    plain_sgd = "moves w towards theta by lr * lam of the way"

    def __init__(
        self,
        net: FedNet,
        lam: NonNegative = 15.0,
        inner_steps: Count = 5,
        personal_lr: NonNegative = 0.02,
        beta: NonNegative = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        if self.local.lr * lam > 1 + 1e-9:
            raise FederationError(f"lr * lam must be 1 at most, not {self.local.lr * lam:g}: w would go past theta.")
        self.lam, self.inner_steps, self.personal_lr, self.beta = lam, inner_steps, personal_lr, beta

    # client

    def enter(self, received: State, me: Me) -> State:
        """Start w and theta from the received model."""
        state = super().enter(received, replace(me, private=without(THETA, me.private)))
        return state | prefixed(THETA, state, self.trainable_names)

    def moves(self, phase: Phase) -> Sequence[Move]:
        """Return K moves of theta, then one of w."""
        return [self.personalise] * self.inner_steps + [self.follow]

    def personalise(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """Take one step of theta on the loss with the proximal term."""
        names = [THETA + name for name in phase.trainable]
        grads, loss, buffers = gradient(lambda s: self.client_loss(s | under(THETA, s), batch), state, names)
        pull = {n: self.lam * (state[n.removeprefix(THETA)] - state[n]) for n in names}
        return Update(loss, {}, buffers, {n: self.personal_lr * (pull[n] - grads[n]) for n in names})

    def follow(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """Take one SGD step of w on (lam / 2) ||w - theta||^2, whose gradient is the Moreau envelope's."""
        return Update(batch.x.new_zeros(()), {n: self.lam * (state[n] - state[THETA + n]) for n in phase.trainable})

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send w; keep theta and its running statistics."""
        theta = prefixed(THETA, state | under(THETA, state), (*self.initial_buffers, *self.trainable_names))
        return super().leave(state, received, me).plus(keep=theta)

    def personal(self, received: State, me: Me) -> State:
        """Return theta, or w for a client that never trained."""
        return super().personal(received, me) | under(THETA, me.private)

    # server

    def aggregate(self, messages: list[Message]) -> State:
        """Mix the mean of the clients' models with the server's; average running statistics."""
        own, rest = Message(-1, self.server_state(), 0), [n for n in self.shared_names if n not in self.trainable_names]
        if self.aggregation is not None:  # of the clients' models alone
            return {n: v if n in rest else own.tensors[n].lerp(v, self.beta) for n, v in self.mean(messages).items()}
        mixing = [1 - self.beta, *(self.beta * weight for weight in message_weights(messages, self.weighting))]
        return self.mean(messages, names=rest) | self.mean([own, *messages], mixing, self.trainable_names)
