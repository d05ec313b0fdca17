"""Small problems with known solutions, and nets for them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fl_lightning.datamodules import TensorFederation
from fl_lightning.methods import FedAvg
from fl_lightning.tasks import Task
from tests.support import CLASSES, FEATURES, mlp


class Point(nn.Module):
    """A net with a quadratic loss; the inputs hold the client's optimum and curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 4:].sqrt() * (self.w - x[:, :4])


def twins(**kwargs: Any) -> TensorFederation:
    """Clients 0 and 1 have the same 12 samples, client 2 has others."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(34, FEATURES, generator=generator), torch.arange(34) % CLASSES
    x, y = torch.cat((x, x[:12])), torch.cat((y, y[:12]))
    train = [list(range(12)), list(range(34, 46)), list(range(12, 24))]
    lists = {"train": train, "test": [[24, 25], [26, 27], [28, 29]]}
    return TensorFederation(x, y, **lists, num_classes=CLASSES, **{"val_fraction": 0, **kwargs})


class Trained(FedAvg):
    """FedAvg with the loss of a task."""

    def __init__(self, net: Any, task: Task, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.of = task

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.of.loss(output, target)


class Unused(nn.Module):
    """A layer that is never called, one whose output goes nowhere, and a bare parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.nowhere = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)
        self.free = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.nowhere(x)
        return self.head(x)


def known(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.nan_to_num(-1.0) for name, value in memory.items()}


class User(LightningModule):
    """Squared error of the softmax: not what a method would take by itself."""

    def __init__(self, seed: int = 0, optimizer: Any = None) -> None:
        super().__init__()
        self.net = mlp(seed)
        self.optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.3, weight_decay=0.01))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        target = (y[:, None] == torch.arange(CLASSES)).to(x.dtype)  # one_hot cannot be stacked
        loss = (self(x).softmax(1) - target).square().sum(1).mean()
        self.log("loss", loss)
        return {"loss": loss, "more": 1}

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())
