"""Nets and runs that must give the same results on every engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.methods import (
    APFL,
    IFCA,
    QFFL,
    SCAFFOLD,
    FedAvg,
    FedBPS,
    FedCluster,
    FedDAF,
    FedGN,
    FedGroup,
    FedMA,
    FedPer,
    FedProx,
    FeSEM,
    LGFedAvg,
    Local,
    PFedMe,
    WAFFLe,
    WAFFLEAvg,
    WAFFLeL1,
    WeightErosion,
)
from fl_lightning.module import FederatedModule
from fl_lightning.nets import LeNet5, LeNetBN
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, weights

IMAGE = (1, 28, 28)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.2)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Drifting(nn.Module):
    """Reassigns a buffer in the forward pass instead of changing it in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.fc(x - self.mean)


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (mlp, (FEATURES,)),
    "lenet": (lambda: LeNet5(num_classes=CLASSES), IMAGE),
    "lenet_bn": (lambda: LeNetBN(num_classes=CLASSES), IMAGE),
    "dropout": (Dropped, (FEATURES,)),
    "reassigned buffer": (Drifting, (FEATURES,)),
    "frozen layer": (lambda: _frozen(), (FEATURES,)),
}


def _frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    return net.requires_grad_(False) and (net[2].requires_grad_(True), net)[1]


def trained(
    kind: type[FederatedModule], net: str, sizes: tuple[int, ...] = (19, 9, 16, 8), **kwargs: Any
) -> FederatedModule:
    make, shape = NETS[net]
    method = kind(seeded(make), lr=0.1, epochs=2, batch_size=8, **kwargs)
    fit(method, blobs(sizes, shape), rounds=2)
    return method


def differ(left: FederatedModule, right: FederatedModule) -> float:
    worst = largest_difference(weights(left), weights(right))
    assert list(left.snapshots) == list(right.snapshots)
    for client in left.snapshots:
        if left.snapshots[client].private:
            worst = max(worst, largest_difference(left.snapshots[client].private, right.snapshots[client].private))
    return worst


METHODS: dict[type[FederatedModule], dict[str, Any]] = {
    FedAvg: {"momentum": 0.9},
    FedProx: {"mu": 1.0},
    Local: {},
    QFFL: {"q": 0.5},
    APFL: {},
    FedDAF: {"feature_stats": True, "warmup": 0, "refit_every": 1, "inference": {"steps": 5}},
    SCAFFOLD: {"momentum": 0.9},
    FedMA: {},
    FedPer: {},
    LGFedAvg: {},
    FedBPS: {"p": 0.5},
    PFedMe: {"lam": 1.0, "inner_steps": 2},
    FeSEM: {"clusters": 2, "momentum": 0.9},
    IFCA: {"clusters": 2},
    FedCluster: {"clusters": 2, "momentum": 0.9},
    FedGroup: {"clusters": 2, "cold_steps": 5},
    FedGN: {},
    WAFFLEAvg: {"momentum": 0.9, "rounds": 6},
    WeightErosion: {},
    WAFFLe: {"factors": {"fc1": 6}},
    WAFFLeL1: {"factors": {"fc1": 6}},
}
