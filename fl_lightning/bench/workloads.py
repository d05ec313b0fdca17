"""The workloads of ``fl-lightning bench``, each with its plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.bench import plain
from fl_lightning.bench.data import images
from fl_lightning.datamodules import TensorFederation
from fl_lightning.engine import Job
from fl_lightning.federation import Federation
from fl_lightning.methods import FedAvg, WAFFLe
from fl_lightning.module import FederatedModule
from fl_lightning.nets import MLP, CNNFashion, LeNet5, ResNet18

#: ``loop(method, federation, inputs, cohort)`` trains a cohort with plain PyTorch and returns the number of steps.
Loop = Callable[[Any, Federation, Tensor, Sequence[int]], int]


class Workload(NamedTuple):
    """A workload of the benchmark.

    Args:
        data: builds the federation.
        method: builds the method, given further options.
        loop: the plain loop.
        rounds: rounds timed in each repeat.
        warm_up: rounds before these, in which engines are chosen and steps are traced.
        validate_every: interval between validations in rounds.
    """

    data: Callable[[], TensorFederation]
    method: Callable[..., FederatedModule]
    loop: Loop
    rounds: int = 2
    warm_up: int = 1
    validate_every: int = 1


def _mnist() -> TensorFederation:
    return images((1, 28, 28))


def _fedavg(net: Callable[[], Any], lr: float, epochs: int, batch_size: int) -> Callable[..., FederatedModule]:
    return lambda **options: FedAvg(net(), lr=lr, epochs=epochs, batch_size=batch_size, **options)


def _waffle(**options: Any) -> FederatedModule:
    return WAFFLe(MLP(), {"fc1": 120}, lr=0.04, epochs=5, batch_size=10, **options)


WORKLOADS = {
    "mnist-mlp": Workload(_mnist, _fedavg(MLP, 0.04, 5, 10), plain.sgd, rounds=4, warm_up=6),
    "waffle-mlp": Workload(_mnist, _waffle, plain.waffle, warm_up=14, validate_every=2),
    "fmnist-cnn": Workload(_mnist, _fedavg(CNNFashion, 0.02, 3, 10), plain.sgd, rounds=1),
    "lenet5": Workload(_mnist, _fedavg(LeNet5, 0.1, 5, 32), plain.sgd, rounds=1),
    "resnet18": Workload(
        lambda: images((3, 32, 32), clients=4, sizes=(96, 96), fraction=0.5),
        _fedavg(ResNet18, 0.01, 1, 32),
        plain.sgd,
        rounds=1,
    ),
}


def own_loop(method: FederatedModule, federation: Federation, x: Tensor, cohort: Sequence[int]) -> int:
    """Run the plain loop of any method: its own moves with autograd, one client after the other."""
    mes = [method.simulation.me(client, method.setting()) for client in cohort]
    jobs = [Job(me.client, method.enter(method.message_down(me.client), me)) for me in mes]
    return plain.moves(method, federation, jobs)


def of_method(make: Callable[..., FederatedModule], shape: tuple[int, ...] = (1, 28, 28)) -> Workload:
    """Return the workload of one method: a perceptron on ten of a hundred clients."""
    return Workload(lambda: images(shape), make, own_loop, warm_up=4)


def seeded(make: Callable[[], Any]) -> Any:
    """Build a net with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()
