"""APFL (Deng et al., 2020): each client mixes its own model with the shared one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fl_lightning.engine import Batch, Gradient, Move, Phase, Update
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me, Reply
from fl_lightning.ranges import NonNegative, Share
from fl_lightning.wire import State, prefixed, under

#: Prefixes of the client's own model v_i and the mixture m, and the name of the mixing weight.
OWN, MIXED, ALPHA = "own.", "mixed.", "own_share"


class APFL(FederatedModule):
    """Clients train the shared model w as in FedAvg and their own v_i, and use the mixture m = a v_i + (1 - a) w.

    On every minibatch, with all right-hand sides evaluated before the step,

        w   <- w   - lr grad f(w)
        v_i <- v_i - lr a grad f(m)

    (the chain rule gives the factor a), and once per round, on its first minibatch, the mixing weight takes a gradient
    step, a <- clip(a - lr (<v_i - w, grad f(m)> + alpha_reg a), 0, 1). Weights are mixed, not outputs. The shared model
    is FedAvg's for every a. A client is evaluated with its v_i (the initial model if it never trained) mixed with the
    server's current model. Running statistics are those of w.

    Args:
        net: the network.
        alpha: initial mixing weight; 0 is FedAvg, 1 trains v_i alone.
        adaptive: whether clients adapt the mixing weight.
        alpha_reg: L2 regularisation of the mixing weight; the authors' code uses 0.02.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(
        self, net: FedNet, alpha: Share = 0.5, adaptive: bool = True, alpha_reg: NonNegative = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(net, **kwargs)
        self.alpha, self.adaptive, self.alpha_reg = alpha, adaptive, alpha_reg
        self.hold("initial", self.trainable)  # clients start from this one in any round

    # client

    def first(self) -> State:
        """Return the initial own model and mixing weight of every client."""
        alpha = torch.tensor(self.alpha, dtype=self.compute_dtype, device=self.device)
        return prefixed(OWN, self.held("initial")) | {ALPHA: alpha}

    def enter(self, received: State, me: Me) -> State:
        """Return the received model, the client's own one and its mixing weight."""
        return {**self.first(), **super().enter(received, me)}

    def opening(self, phase: Phase) -> Sequence[Move]:
        """On the first minibatch, also update the mixing weight."""
        return [self.descend_and_mix] if self.adaptive else ()

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """Take one step of w and one of v_i."""
        return self.both(state, batch, phase, gradient)[0]

    def descend_and_mix(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """Take one step of w, v_i and the mixing weight."""
        update, at_mixed = self.both(state, batch, phase, gradient)
        slope = sum(((state[OWN + n] - state[n]) * at_mixed[MIXED + n]).sum() for n in phase.trainable)
        moved = (state[ALPHA] - self.rate(batch) * (slope + self.alpha_reg * state[ALPHA])).clamp(0, 1)
        return update._replace(replace={**update.replace, ALPHA: moved})

    def both(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> tuple[Update, State]:
        """Take one step of w and v_i; also return the gradient at the mixture."""
        alpha, names = state[ALPHA], phase.trainable
        update = super().descend(state, batch, phase, gradient)
        mixed = {MIXED + n: torch.lerp(state[n], state[OWN + n], alpha) for n in names}
        at_mixed, _, _ = gradient(lambda s: self.client_loss(s | under(MIXED, s), batch), state | mixed, list(mixed))
        own = {OWN + n: alpha * at_mixed[MIXED + n] for n in names}
        return update._replace(grads={**update.grads, **own}), at_mixed

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send the shared model; keep v_i and the mixing weight."""
        return super().leave(state, received, me).plus(keep={name: state[name] for name in self.first()})

    def personal(self, received: State, me: Me) -> State:
        """Return the client's own model mixed with the server's current one."""
        server, own = super().personal(received, me), {**self.first(), **me.private}
        a = own[ALPHA]
        return server | {n: a * own[OWN + n] + (1 - a) * server[n] for n in self.trainable_names}
