"""Ditto (Li et al., 2021) from scratch: FedAvg plus a personal model per client, kept near the shared one.

fl-lightning fit --config quickstart --use examples/ditto.py --model Ditto --model.lam 0.5
"""

from fl_lightning.module import FederatedModule
from fl_lightning.wire import prefixed, under


class Ditto(FederatedModule):
    """FedAvg for the shared w, and for each client's own v: v <- v - lr (grad F(v) + lam (v - w)).

    Args:
        net: the network.
        lam: strength of the pull of v towards the received w; 0 is Local.
        kwargs: see FederatedModule.
    """

    def __init__(self, net, lam: float = 0.1, **kwargs):
        super().__init__(net, **kwargs)
        self.lam = lam

    # client

    def enter(self, received, me):
        """Start from w and v."""
        state = super().enter(received, me)  # includes v if the client has one; otherwise v starts at w
        return prefixed("own.", state, self.trainable_names) | prefixed("received.", received) | state

    def descend(self, state, batch, phase, gradient):
        """One step on w and one on v."""
        update, names = super().descend(state, batch, phase, gradient), [f"own.{n}" for n in phase.trainable]
        grads, _, _ = gradient(lambda s: self.client_loss({**s, **under("own.", s)}, batch), state, names)
        near = {n: g + self.lam * (state[n] - state[n.replace("own", "received", 1)]) for n, g in grads.items()}
        return update._replace(grads=update.grads | near)

    def leave(self, state, received, me):
        """Send w and keep v."""
        return super().leave(state, received, me).plus(keep=prefixed("own.", under("own.", state)))

    def personal(self, received, me):
        """V, or w for a client that never trained."""
        return super().personal(received, me) | under("own.", me.private)
