"""SCAFFOLD (Karimireddy et al., 2020): local steps corrected for what tells a client from the rest."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.engine import Batch, Gradient, Phase, Update
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.wire import Message, State

#: Prefixes of the server's control variate c, a client's c_i and its change.
SERVER, OWN, CHANGE = "control.server.", "control.own.", "control.change."
#: Prefixes of the correction c - c_i, the model that a client starts from, and the sum of its raw gradients.
CORRECTION, START, SUM = "control.correction.", "control.start.", "control.sum."
STEPS = "control.steps"


class SCAFFOLD(FederatedModule):
    """Clients take the steps y <- y - lr (g(y) - c_i + c); control variates estimate the gradients g.

    After its K steps a client sets c_i to the mean of its raw gradients, weight decay included and the correction not.
    Without momentum that is option II of the paper, c_i - c + (x - y) / (K lr), and nothing is added up on the way;
    with momentum or clipping that would be wrong. It sends y and the change of c_i. The server averages the models,
    all clients the same, and adds (1/N) sum_S (change of c_i) to c, so that c stays the mean of all N clients' c_i.

    Control variates are of trainable parameters, never of buffers, and start at 0.

    Args:
        net: the network.
        weighting: ``uniform``, as the theory has it.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`; a server SGD with another learning rate is eta_g.
    """

    def __init__(self, net: FedNet, weighting: Literal["uniform"] = "uniform", **kwargs: Any) -> None:
        super().__init__(net, weighting=weighting, **kwargs)
        if weighting != "uniform":
            raise FederationError("SCAFFOLD weighs all clients the same: leave weighting out.")
        self.control = nn.Module()
        for name, parameter in self.net.named_parameters():
            if parameter.requires_grad:
                self.control.register_buffer(name.replace(".", "/"), torch.zeros_like(parameter.detach()))

    def server_control(self) -> State:
        """The server's control variate c by the parameters' names."""
        return {name.replace("/", "."): value for name, value in self.control.named_buffers()}

    def message_down(self, client: int) -> State:
        """The model and c."""
        return super().message_down(client) | {SERVER + name: c for name, c in self.server_control().items()}

    @property
    def adds_up(self) -> bool:
        """Whether raw gradients are added up: steps that are not -lr times the corrected one do not tell them."""
        return self.local.momentum > 0 or self.local.clip_norm is not None or self.local.lr == 0

    def begin(self, client: int, message: State) -> State:
        """As FedAvg, with c_i, the correction c - c_i of every step, and what the mean raw gradient is found from."""
        state = super().begin(client, message)
        for name in self.trainable_names:
            own = state.setdefault(OWN + name, torch.zeros_like(state[name]))
            state[CORRECTION + name] = state.pop(SERVER + name) - own
            if self.adds_up:
                state[SUM + name] = torch.zeros_like(state[name])
            else:
                state[START + name] = state[name]
        return state | {STEPS: torch.zeros((), device=self.device, dtype=torch.float32)}  # half a float cannot count

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One corrected step; the raw gradient is added up if need be."""
        update = super().descend(state, batch, phase, gradient)
        decay, raw, seen = self.local.weight_decay, update.grads, {STEPS: torch.ones_like(state[STEPS])}
        if self.adds_up:
            seen |= {SUM + name: g + decay * state[name] if decay else g for name, g in raw.items()}
        return update._replace(grads={name: g + state[CORRECTION + name] for name, g in raw.items()}, add=seen)

    def mean_gradient(self, state: State, name: str, steps: float) -> Tensor:
        """The mean of a client's raw gradients by one parameter."""
        if self.adds_up:
            return state[SUM + name] / steps
        return (state[START + name] - state[name]) / (steps * self.local.lr) - state[CORRECTION + name]

    def finish(self, client: int, state: State, message: State) -> tuple[State, State]:
        """The model and the change of c_i go up; c_i stays."""
        sent, kept = super().finish(client, state, message)
        steps = float(state[STEPS])
        own = {n: self.mean_gradient(state, n, steps) if steps else state[OWN + n] for n in self.trainable_names}
        change = {CHANGE + name: value - state[OWN + name] for name, value in own.items()}
        return sent | change, kept | {OWN + name: value for name, value in own.items()}

    def aggregate(self, messages: list[Message]) -> State:
        """The mean model; c moves by the clients' changes over the number of all clients."""
        for name, control in self.server_control().items():
            control += self.control_change(messages, name).to(control.dtype)
        models = [
            Message(m.client, {k: v for k, v in m.tensors.items() if not k.startswith(CHANGE)}, m.samples)
            for m in messages
        ]
        return super().aggregate(models)

    def control_change(self, messages: list[Message], name: str) -> Tensor:
        """How much one entry of c moves in this round, in float64."""
        changes = [message.tensors[CHANGE + name].double() for message in messages]
        return torch.stack(changes).sum(0) / self.federation.num_clients

    def personal_state(self, client: int) -> State:
        """The server's model for everyone, with the buffers that a client keeps."""
        kept = self.snapshots[client].private
        return {name: kept.get(name, value) for name, value in self.server_state().items()}
