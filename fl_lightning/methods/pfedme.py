"""pFedMe (Dinh et al., 2020): personal models as the proximal points of a shared one (Moreau envelopes)."""

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
    """Each client has a personal model theta_k that is held near the shared one (Algorithm 1 of the paper).

    In a round a client starts both from the received w. On every minibatch it takes K steps

        theta <- theta - personal_lr (grad F_k(theta) + lam (theta - w_k))

    towards the minimiser of F_k(theta) + (lam / 2) ||theta - w_k||^2 and then one step along the gradient of that
    minimum, the Moreau envelope of F_k, in w_k,

        w_k <- w_k - lr lam (w_k - theta).

    It sends w_k and keeps theta, with which it is evaluated; one that never trained is evaluated with w. The server
    mixes, w <- (1 - beta) w + beta sum_k p_k w_k. ``momentum``, ``weight_decay`` and ``clip_norm`` act on the step of
    w_k. Running statistics come from theta, the only model that sees data: the server averages them, theta keeps its
    own.

    Args:
        net: the network.
        lam: strength of the pull between theta and w; ``lr * lam`` may be 1 at most.
        inner_steps: K, the steps of theta on each minibatch.
        personal_lr: learning rate of theta.
        beta: share of the clients' mean in the server's new model; 1 is the plain mean.
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
        """W and theta at the received model."""
        state = super().enter(received, replace(me, private=without(THETA, me.private)))
        return state | prefixed(THETA, state, self.trainable_names)

    def moves(self, phase: Phase) -> Sequence[Move]:
        """K moves of theta, then one of w."""
        return [self.personalise] * self.inner_steps + [self.follow]

    def personalise(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One step of theta on the loss and the pull of w, towards the proximal point."""
        names = [THETA + name for name in phase.trainable]
        grads, loss, buffers = gradient(lambda s: self.client_loss(s | under(THETA, s), batch), state, names)
        pull = {n: self.lam * (state[n.removeprefix(THETA)] - state[n]) for n in names}
        return Update(loss, {}, buffers, {n: self.personal_lr * (pull[n] - grads[n]) for n in names})

    def follow(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One SGD step of w on (lam / 2) ||w - theta||^2, the gradient of the Moreau envelope."""
        return Update(batch.x.new_zeros(()), {n: self.lam * (state[n] - state[THETA + n]) for n in phase.trainable})

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """W goes up; theta stays, with the running statistics that belong to it."""
        theta = prefixed(THETA, state | under(THETA, state), (*self.initial_buffers, *self.trainable_names))
        return super().leave(state, received, me).plus(keep=theta)

    def personal(self, received: State, me: Me) -> State:
        """Theta, or w for a client that never trained."""
        return super().personal(received, me) | under(THETA, me.private)

    # server

    def aggregate(self, messages: list[Message]) -> State:
        """The mean of the clients' models mixed with the server's; running statistics are averaged."""
        own, rest = Message(-1, self.server_state(), 0), [n for n in self.shared_names if n not in self.trainable_names]
        if self.aggregation is not None:  # of the clients' models alone
            return {n: v if n in rest else own.tensors[n].lerp(v, self.beta) for n, v in self.mean(messages).items()}
        mixing = [1 - self.beta, *(self.beta * weight for weight in message_weights(messages, self.weighting))]
        return self.mean(messages, names=rest) | self.mean([own, *messages], mixing, self.trainable_names)
