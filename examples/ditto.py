"""Ditto (Li et al., 2021) from scratch: FedAvg, and for each client a model of its own, held near the shared one.

fl-lightning fit --config quickstart --use examples/ditto.py --model Ditto --model.lam 0.5
"""

from fl_lightning.module import FederatedModule
from fl_lightning.wire import prefixed, under


class Ditto(FederatedModule):
    """Clients train the shared w as FedAvg does, and besides it v <- v - lr (grad F(v) + lam (v - w)).

    Args:
        net: the network.
        lam: how strongly v is held near the w that was received; 0 is Local.
        kwargs: see FederatedModule.
    """

    def __init__(self, net, lam: float = 0.1, **kwargs):
        super().__init__(net, **kwargs)
        self.lam = lam

    # client

    def enter(self, received, me):
        """Begin with w and v."""
        state = super().enter(received, me)  # with v, if the client has one; else v begins at w
        return prefixed("own.", state, self.trainable_names) | prefixed("received.", received) | state

    def descend(self, state, batch, phase, gradient):
        """One step of w and one of v."""
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
