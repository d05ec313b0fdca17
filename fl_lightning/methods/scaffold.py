"""SCAFFOLD (Karimireddy et al., 2020): local steps corrected by control variates. Lines refer to Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fl_lightning.engine import Batch, Gradient, Phase, Update
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me, Reply
from fl_lightning.wire import Message, State, prefixed, under

#: Prefixes of the server's control variate c, a client's c_i and its change.
SERVER, OWN, CHANGE = "control.server.", "control.own.", "control.change."
#: Prefixes of the correction c - c_i and of the sum of raw gradients.
CORRECTION, SUM = "control.correction.", "control.sum."
#: Tolerated relative error of (x - y) / lr: rounding error of the weights over the learning rate.
ROUNDING = 1e-5


class SCAFFOLD(FederatedModule):
    """Clients take the steps y <- y - lr (g(y) - c_i + c); control variates estimate the gradients g.

    After its K steps a client sets c_i to the mean of its raw gradients, with weight decay but without the correction.
    This equals option II of the paper, c_i - c + (x - y) / (K lr), for plain steps and an accurate difference x - y;
    with momentum, clipping, a small ``lr`` or low precision, gradients are accumulated instead. A client sends y and
    the change of c_i. The server averages the models with uniform weights and adds (1/N) sum_S (change of c_i) to c, so
    that c stays the mean of all N clients' c_i.

    Only trainable parameters have control variates, not buffers; they start at 0.

    Args:
        net: the network.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`; eta_g is the learning rate of a server SGD.
    """

    fixed: ClassVar[Mapping[str, str]] = {"weighting": "all clients have the same weight, as in the theory"}
    plain_sgd = "takes a client's change for the sum of its corrected gradients"

    def __init__(self, net: FedNet, **kwargs: Any) -> None:
        super().__init__(net, weighting="uniform", **kwargs)
        self.hold("control", {name: torch.zeros_like(value) for name, value in self.trainable.items()})

    # client

    @property
    def adds_up(self) -> bool:
        """Whether raw gradients are accumulated because x - y does not determine them accurately."""
        plain = not self.local.momentum and self.local.clip_norm is None
        return not plain or torch.finfo(self.compute_dtype).eps > ROUNDING * self.local.lr

    def enter(self, received: State, me: Me) -> State:
        """Line 7: start from the received model; compute the correction c - c_i of every step."""
        state = super().enter(received, me)
        zeros = {name: torch.zeros_like(state[name]) for name in self.trainable_names}
        state = prefixed(OWN, zeros) | (prefixed(SUM, zeros) if self.adds_up else {}) | state
        return state | {CORRECTION + name: state.pop(SERVER + name) - state[OWN + name] for name in zeros}

    def correct(self, state: State, grads: State) -> State:
        """Line 10: return g(y) - c_i + c."""
        return {name: g + state[CORRECTION + name] for name, g in grads.items()}

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """Take one corrected step; accumulate the raw gradient if needed."""
        raw, loss, buffers = gradient(lambda s: self.client_loss(s, batch), state, phase.trainable)
        decay, summed = self.local.weight_decay, raw if self.adds_up else {}
        seen = {SUM + name: g + decay * state[name] if decay else g for name, g in summed.items()}
        return Update(loss, self.correct(state, raw), buffers, add=seen)

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Lines 12 to 14: set c_i to the mean raw gradient, by option II if steps are plain; send its change."""
        before, k = under(OWN, state), me.steps
        if self.adds_up or not k:
            own = {name: state[SUM + name] / k for name in before} if k else before
        else:
            own = {n: (received[n] - state[n]) / (k * self.local.lr) - state[CORRECTION + n] for n in before}
        change = {CHANGE + name: value - before[name] for name, value in own.items()}
        return super().leave(state, received, me).plus(up=change, keep=prefixed(OWN, own))

    # server

    def server_control(self) -> State:
        """Return the server's control variate c by parameter name."""
        return self.held("control")

    def message_down(self, client: int) -> State:
        """Line 5: return the model and c."""
        return super().message_down(client) | prefixed(SERVER, self.server_control())

    def aggregate(self, messages: list[Message]) -> State:
        """Lines 16 and 17: average the models; add the sum of the clients' changes over N to c."""
        for name, control in self.server_control().items():
            changes = [message.tensors[CHANGE + name].double() for message in messages]
            if self.aggregation is not None:
                changes = [self.aggregation(messages, {}, [CHANGE + name])[CHANGE + name].double() * len(messages)]
            control += (torch.stack(changes).sum(0) / len(self.roster)).to(control.dtype)
        return self.mean(messages, names=self.shared_names)
