"""SCAFFOLD (Karimireddy et al., 2020): local steps corrected by control variates. Lines are those of Algorithm 1."""

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
#: Relative error of (x - y) / lr that is let pass: rounding of the weights over the learning rate.
ROUNDING = 1e-5


class SCAFFOLD(FederatedModule):
    """Clients take the steps y <- y - lr (g(y) - c_i + c); control variates estimate the gradients g.

    After its K steps a client sets c_i to the mean of its raw gradients, weight decay included and the correction not.
    That is option II of the paper, c_i - c + (x - y) / (K lr), where steps are plain and the difference x - y has
    digits enough; with momentum, clipping, a small ``lr`` or low precision gradients are added up on the way instead.
    A client sends y and the change of c_i. The server averages the models, all clients the same, and adds
    (1/N) sum_S (change of c_i) to c, so that c stays the mean of all N clients' c_i.

    Control variates are of trainable parameters, never of buffers, and start at 0.

    Args:
        net: the network.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`; a server SGD with another learning rate is eta_g.
    """

    fixed: ClassVar[Mapping[str, str]] = {"weighting": "all clients weigh the same, as the theory has it"}
    plain_sgd = "takes a client's change for the sum of its corrected gradients"

    def __init__(self, net: FedNet, **kwargs: Any) -> None:
        super().__init__(net, weighting="uniform", **kwargs)
        self.hold("control", {name: torch.zeros_like(value) for name, value in self.trainable.items()})

    # client

    @property
    def adds_up(self) -> bool:
        """Whether raw gradients are added up, as x - y does not give them, or not with enough digits."""
        plain = not self.local.momentum and self.local.clip_norm is None
        return not plain or torch.finfo(self.compute_dtype).eps > ROUNDING * self.local.lr

    def enter(self, received: State, me: Me) -> State:
        """Line 7, with the correction c - c_i of every step."""
        state = super().enter(received, me)
        zeros = {name: torch.zeros_like(state[name]) for name in self.trainable_names}
        state = prefixed(OWN, zeros) | (prefixed(SUM, zeros) if self.adds_up else {}) | state
        return state | {CORRECTION + name: state.pop(SERVER + name) - state[OWN + name] for name in zeros}

    def correct(self, state: State, grads: State) -> State:
        """Line 10: g(y) - c_i + c."""
        return {name: g + state[CORRECTION + name] for name, g in grads.items()}

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One corrected step; the raw gradient is added to the sum if there is one."""
        raw, loss, buffers = gradient(lambda s: self.client_loss(s, batch), state, phase.trainable)
        decay, summed = self.local.weight_decay, raw if self.adds_up else {}
        seen = {SUM + name: g + decay * state[name] if decay else g for name, g in summed.items()}
        return Update(loss, self.correct(state, raw), buffers, add=seen)

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Lines 12 to 14: c_i becomes the mean raw gradient, by option II if steps are plain; its change goes up."""
        before, k = under(OWN, state), me.steps
        if self.adds_up or not k:
            own = {name: state[SUM + name] / k for name in before} if k else before
        else:
            own = {n: (received[n] - state[n]) / (k * self.local.lr) - state[CORRECTION + n] for n in before}
        change = {CHANGE + name: value - before[name] for name, value in own.items()}
        return super().leave(state, received, me).plus(up=change, keep=prefixed(OWN, own))

    # server

    def server_control(self) -> State:
        """The server's control variate c by the parameters' names."""
        return self.held("control")

    def message_down(self, client: int) -> State:
        """Line 5: the model and c."""
        return super().message_down(client) | prefixed(SERVER, self.server_control())

    def aggregate(self, messages: list[Message]) -> State:
        """Lines 16 and 17: the mean model; c moves by the clients' changes over the number of all clients."""
        for name, control in self.server_control().items():
            changes = [message.tensors[CHANGE + name].double() for message in messages]
            if self.aggregation is not None:
                changes = [self.aggregation(messages, {}, [CHANGE + name])[CHANGE + name].double() * len(messages)]
            control += (torch.stack(changes).sum(0) / len(self.roster)).to(control.dtype)
        return self.mean(messages, names=self.shared_names)
