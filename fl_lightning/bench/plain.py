"""Training as a plain PyTorch loop: one client after the other, autograd and ``torch.optim.SGD``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import distributions as dist
from fl_lightning.engine import Batch, Job, LocalTraining, Update
from fl_lightning.engine.base import moves_of
from fl_lightning.engine.gradient import eager_gradient
from fl_lightning.engine.schedule import ClientSchedule, epoch_noise, scalars
from fl_lightning.federation import Federation
from fl_lightning.methods import WAFFLe
from fl_lightning.module import FederatedModule
from fl_lightning.wire import State


def batches(index: Tensor, epochs: int, size: int) -> Iterator[Tensor]:
    """Yield shuffled minibatches for ``epochs`` epochs."""
    for _ in range(epochs):
        yield from torch.split(index[torch.randperm(len(index))], size)


def sgd(method: FederatedModule, federation: Federation, x: Tensor, cohort: Sequence[int]) -> int:
    """Run FedAvg's local training; return the number of steps."""
    net, steps = copy.deepcopy(method.net), 0
    start, local = copy.deepcopy(net.state_dict()), method.local
    for client in cohort:
        net.load_state_dict(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=local.lr)
        for part in batches(federation.train[client], local.epochs, local.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(net(x[part]), federation.targets[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
    return steps


class _FactorizedMLP(nn.Module):
    """W = Wa diag(r b) Wb with a relaxed Bernoulli b, one hidden layer, and the KL divergence of the selection."""

    def __init__(self, method: WAFFLe) -> None:
        super().__init__()
        state, own = method.server_state(), method.initial("fc1", method.factors["fc1"])
        self.wa, self.wb = nn.Parameter(state["fc1.wa"].clone()), nn.Parameter(state["fc1.wb"].clone())
        self.r, self.head = nn.Parameter(state["fc1.r"].clone()), nn.Parameter(state["head.weight"].clone())
        self.logits, self.c, self.d = (nn.Parameter(own[kind].clone()) for kind in ("logits", "c", "d"))
        self.alpha = method.alpha["fc1"]

    def forward(self, x: Tensor) -> Tensor:
        u = torch.rand_like(self.logits).clamp(1e-6, 1 - 1e-6)
        b = torch.sigmoid((self.logits + u.log() - (1 - u).log()) / (2 / 3))
        weight = (self.wa * (self.r * b)) @ self.wb
        return F.linear(F.relu(F.linear(x.flatten(1), weight)), self.head)

    def divergence(self) -> Tensor:
        c, d = F.softplus(self.c) + 1e-3, F.softplus(self.d) + 1e-3
        log_u = torch.rand_like(c).clamp(1e-6, 1 - 1e-6).log()
        log_p = dist.log_sticks(dist.log_kumaraswamy(c, d, log_u))
        return dist.kl_bernoulli(self.logits, log_p).sum() + dist.kl_kumaraswamy_beta(c, d, self.alpha).sum()


def waffle(method: WAFFLe, federation: Federation, x: Tensor, cohort: Sequence[int]) -> int:
    """Run WAFFLe's local training of a perceptron: epochs of the selection, then of the factors."""
    net, local, steps = _FactorizedMLP(method), method.local, 0
    start = copy.deepcopy(net.state_dict())
    for client in cohort:
        net.load_state_dict(start)
        index = federation.train[client]
        groups: list[dict[str, Any]] = [{"params": [net.c, net.d]}]
        groups.append({"params": [net.logits], "lr": local.lr * method.vi_lr_mult})
        selection = torch.optim.SGD(groups, lr=local.lr)
        factors = torch.optim.SGD([net.wa, net.wb, net.r, net.head], lr=local.lr)
        chosen = method.selection_epochs
        for optimizer, epochs in ((selection, chosen), (factors, local.epochs - chosen)):
            for part in batches(index, epochs, local.batch_size):
                net.zero_grad()
                loss = F.cross_entropy(net(x[part]), federation.targets[part])
                if optimizer is selection:
                    loss = loss + net.divergence() / len(index)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if optimizer is selection:
                    with torch.no_grad():
                        net.logits.clamp_(-method.posterior.logit_bound, method.posterior.logit_bound)
                steps += 1
    return steps


def moves(method: FederatedModule, federation: Federation, jobs: Sequence[Job]) -> int:
    """Run any method's local training with autograd, one client and one minibatch at a time."""
    steps = 0
    for job in jobs:
        schedule = ClientSchedule.of(method, federation, job.client, 0)
        state = {name: value.clone() for name, value in job.state.items()}
        velocity = {name: torch.zeros_like(value) for name, value in state.items()}
        numbers = scalars(torch.tensor(schedule.size), 0, method.compute_dtype)
        for phase in method.phases():
            (opening, others), begun = moves_of(method, phase), steps
            for _ in range(phase.epochs):
                parts = torch.split(schedule.order(), method.local.batch_size)
                noise, _ = epoch_noise(method, schedule, len(parts), federation.inputs[:1])
                for step, part in enumerate(parts):
                    x, y = federation.gather([job.client], part[None], method.compute_dtype)
                    batch = Batch(x[0], y[0], {name: value[step] for name, value in noise.items()}, numbers)
                    for move in opening if steps == begun else others:
                        _apply(method.local, move(state, batch, phase, eager_gradient), state, velocity)
                    steps += 1
    return steps


@torch.no_grad()
def _apply(local: LocalTraining, update: Update, state: State, velocity: State) -> None:
    for name, grad in update.grads.items():
        step = grad + local.weight_decay * state[name] if local.weight_decay else grad
        if local.momentum:
            step = velocity[name].mul_(local.momentum).add_(step)
        state[name].sub_(local.lr * step)
    for name, value in update.replace.items():
        state[name].copy_(value)
    for name, value in update.add.items():
        state[name].add_(value)
