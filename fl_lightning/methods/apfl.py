"""APFL (Deng et al., 2020): each client mixes a model of its own with the shared one."""

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

#: Prefixes of the client's own model v_i and of the mixture m, and the name of the mixing weight.
OWN, MIXED, ALPHA = "own.", "mixed.", "own_share"


class APFL(FederatedModule):
    """Clients train the shared model w as FedAvg does, and their own v_i, used in the mixture m = a v_i + (1 - a) w.

    On every minibatch, all right-hand sides before the step,

        w   <- w   - lr grad f(w)
        v_i <- v_i - lr a grad f(m)

    (the chain rule gives the factor a), and once a round, on its first minibatch, the mixing weight follows its own
    gradient, a <- clip(a - lr (<v_i - w, grad f(m)> + alpha_reg a), 0, 1). Weights are mixed, not outputs. The shared
    model does not notice: it is FedAvg's for every a. A client is evaluated with its v_i mixed with the server's
    present model; one that never trained has the initial model for its v_i. Running statistics are those of w.

    Args:
        net: the network.
        alpha: the mixing weight that clients start with; 0 is FedAvg, 1 trains v_i alone.
        adaptive: whether clients adapt it.
        alpha_reg: how strongly it is drawn to 0 as they do; the authors' code has 0.02.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(
        self, net: FedNet, alpha: Share = 0.5, adaptive: bool = True, alpha_reg: NonNegative = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(net, **kwargs)
        self.alpha, self.adaptive, self.alpha_reg = alpha, adaptive, alpha_reg
        self.hold("initial", self.trainable)  # the server's model moves on, clients still begin with this one

    # client

    def first(self) -> State:
        """The own model and mixing weight that every client begins with."""
        alpha = torch.tensor(self.alpha, dtype=self.compute_dtype, device=self.device)
        return prefixed(OWN, self.held("initial")) | {ALPHA: alpha}

    def enter(self, received: State, me: Me) -> State:
        """The received model, with the client's own one and its mixing weight."""
        return {**self.first(), **super().enter(received, me)}

    def opening(self, phase: Phase) -> Sequence[Move]:
        """On the first minibatch the mixing weight moves, too."""
        return [self.descend_and_mix] if self.adaptive else ()

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One step of w and one of v_i."""
        return self.both(state, batch, phase, gradient)[0]

    def descend_and_mix(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One step of w, one of v_i and one of the mixing weight."""
        update, at_mixed = self.both(state, batch, phase, gradient)
        slope = sum(((state[OWN + n] - state[n]) * at_mixed[MIXED + n]).sum() for n in phase.trainable)
        moved = (state[ALPHA] - self.rate(batch) * (slope + self.alpha_reg * state[ALPHA])).clamp(0, 1)
        return update._replace(replace={**update.replace, ALPHA: moved})

    def both(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> tuple[Update, State]:
        """One step of w and one of v_i, and the gradient at the mixture."""
        alpha, names = state[ALPHA], phase.trainable
        update = super().descend(state, batch, phase, gradient)
        mixed = {MIXED + n: torch.lerp(state[n], state[OWN + n], alpha) for n in names}
        at_mixed, _, _ = gradient(lambda s: self.client_loss(s | under(MIXED, s), batch), state | mixed, list(mixed))
        own = {OWN + n: alpha * at_mixed[MIXED + n] for n in names}
        return update._replace(grads={**update.grads, **own}), at_mixed

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """The shared model goes up; v_i and the mixing weight stay."""
        return super().leave(state, received, me).plus(keep={name: state[name] for name in self.first()})

    def personal(self, received: State, me: Me) -> State:
        """The client's own model mixed with the server's present one."""
        server, own = super().personal(received, me), {**self.first(), **me.private}
        a = own[ALPHA]
        return server | {n: a * own[OWN + n] + (1 - a) * server[n] for n in self.trainable_names}
