"""pFedMe (Dinh et al., 2020): personal models as the proximal points of a shared one (Moreau envelopes)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fl_lightning.engine import Batch, Gradient, Move, Phase, Update
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.wire import Message, State, message_weights, weighted_mean

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

    def __init__(
        self,
        net: FedNet,
        lam: float = 15.0,
        inner_steps: int = 5,
        personal_lr: float = 0.02,
        beta: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        for name, value in (("lam", lam), ("personal_lr", personal_lr), ("beta", beta)):
            if not 0 <= value < math.inf:
                raise FederationError(f"{name} must be 0 or more, not {value}.")
        if inner_steps < 1:
            raise FederationError(f"inner_steps must be 1 or more, not {inner_steps}.")
        if self.local.lr * lam > 1 + 1e-9:
            raise FederationError(
                f"lr * lam must be 1 at most, not {self.local.lr * lam:g}: a step of w would go past theta."
            )
        self.lam, self.inner_steps, self.personal_lr, self.beta = lam, inner_steps, personal_lr, beta

    def begin(self, client: int, message: State) -> State:
        """As FedAvg, and theta at the received model."""
        state = {name: value for name, value in super().begin(client, message).items() if not name.startswith(THETA)}
        return state | {THETA + name: state[name] for name in self.trainable_names}

    def moves(self, phase: Phase) -> Sequence[Move]:
        """K moves of theta, then one of w."""
        return [self.personalise] * self.inner_steps + [self.follow]

    def personalise(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One step of theta on the loss and the pull of w."""
        names = [THETA + name for name in phase.trainable]
        grads, loss, buffers = gradient(lambda s: self.client_loss(s | _personal(s), batch), state, names)
        back = {n: self.lam * (state[n.removeprefix(THETA)] - state[n]) for n in names}
        return Update(loss, {}, buffers, {n: self.personal_lr * (back[n] - grads[n]) for n in names})

    def follow(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One SGD step of w on (lam / 2) ||w - theta||^2."""
        pull = {name: self.lam * (state[name] - state[THETA + name]) for name in phase.trainable}
        return Update(batch.x.new_zeros(()), pull)

    def finish(self, client: int, state: State, message: State) -> tuple[State, State]:
        """W goes up; theta stays, with the running statistics that belong to it."""
        sent, kept = super().finish(client, state, message)
        buffers = {THETA + name: state[name] for name in self._initial_buffers}
        return sent, kept | buffers | {THETA + name: state[THETA + name] for name in self.trainable_names}

    def aggregate(self, messages: list[Message]) -> State:
        """The mean of the clients' models mixed with the server's; running statistics are averaged."""
        weights = message_weights(messages, self.weighting)
        own, mixing = Message(-1, self.server_state(), 0), [1 - self.beta, *(self.beta * w for w in weights)]
        rest = [name for name in self.shared_names if name not in self.trainable_names]
        return weighted_mean(messages, weights, rest) | weighted_mean([own, *messages], mixing, self.trainable_names)

    def personal_state(self, client: int) -> State:
        """Theta, or w for a client that never trained."""
        return self.server_state() | _personal(self.snapshots[client].private)

    def model_key(self, client: int) -> int:
        """Clients that never trained share w."""
        return client if client in self.snapshots else -1


def _personal(state: State) -> State:
    """Theta under the names of the net."""
    return {name.removeprefix(THETA): value for name, value in state.items() if name.startswith(THETA)}
