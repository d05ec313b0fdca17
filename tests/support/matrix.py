"""Every method with every task and every local optimizer, on small nets: it runs or raises a clear error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning import methods
from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.local_optim import SGD, Adam, AdamW, LocalOptimizer, RMSprop
from fl_lightning.module import FederatedModule
from fl_lightning.nets.units import Units, units_between
from tests.support import fit

#: Training samples of every client; four more each are tested on.
SIZES, TESTED = (11, 7, 9), 4
TOTAL = sum(SIZES) + TESTED * len(SIZES)

OPTIMIZERS: dict[str, LocalOptimizer] = {
    "SGD": SGD(),
    "Nesterov": SGD(0.9, nesterov=True),
    "Adam": Adam(),
    "AdamW": AdamW(),
    "RMSprop": RMSprop(),
}
#: Methods that require plain SGD.
PLAIN = ("SCAFFOLD", "WAFFLEAvg", "QFFL", "PFedMe")
#: Options that methods need on such a small federation.
OPTIONS: dict[str, dict[str, Any]] = {
    "FedGN": {"groups": 2},
    "FedPer": {"personal": ["head"]},
    "LGFedAvg": {"shared": ["head"]},
    "PFedMe": {"inner_steps": 2},
    "WAFFLe": {"factors": {"fc1": 4}, "epochs": 2},
    "WAFFLeL1": {"factors": {"fc1": 4}},
    "FedBPS": {"p": 0.5},
    "FedDAF": {"warmup": 0, "inference": {"steps": 5}},
    "FeSEM": {"clusters": 2},
    "IFCA": {"clusters": 2},
    "FedGroup": {"clusters": 2, "cold_steps": 2},
    "FedCluster": {"clusters": 2},
}


class Dense(nn.Sequential):
    """A perceptron, with BatchNorm or without."""

    def __init__(self, outputs: int, norm: bool) -> None:
        super().__init__()
        for name, layer in {"fc1": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6), "head": nn.Linear(6, outputs)}.items():
            if norm or name != "norm":
                self.add_module(name, layer)


class Pixels(nn.Sequential):
    """Two convolutions that keep the size of an image."""

    def __init__(self, outputs: int, norm: bool) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(2, 4, 3, padding=1)
        if norm:
            self.norm = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, outputs, 1)


class Tokens(nn.Module):
    """Scores for every token of a sequence."""

    def __init__(self, outputs: int, norm: bool) -> None:
        super().__init__()
        self.embed, self.fc1, self.head = nn.Embedding(outputs, 4), nn.Linear(4, 6), nn.Linear(6, outputs)

    def units(self) -> list[Units]:
        """Return the hidden units, for FedMA: they cannot be derived with an embedding."""
        return [units_between(self, ["fc1"], ["head"])]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc1(self.embed(x))))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(top: int, *shape: int) -> Tensor:
    return torch.randint(top, shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass(frozen=True)
class Problem:
    """Data of a task, and a net for it.

    Args:
        kind: class of the net.
        outputs: of the net.
        inputs: of all clients' samples.
        targets: of all clients' samples.
    """

    kind: type[nn.Module]
    outputs: int
    inputs: Tensor
    targets: Tensor

    def net(self, norm: bool) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made: Any = self.kind
            return made(self.outputs, norm)  # type: ignore[no-any-return]

    def data(self) -> TensorFederation:
        ends = torch.tensor([size + TESTED for size in SIZES]).cumsum(0).tolist()
        train = [list(range(end - TESTED - size, end - TESTED)) for end, size in zip(ends, SIZES, strict=True)]
        test = [list(range(end - TESTED, end)) for end in ends]
        return TensorFederation(self.inputs, self.targets, train=train, test=test, val_fraction=0, seed=0)


PROBLEMS = {
    "Classification": Problem(Dense, 3, numbers(TOTAL, 4), whole(3, TOTAL)),
    "MultiLabel": Problem(Dense, 3, numbers(TOTAL, 4), whole(2, TOTAL, 3)),
    "Regression": Problem(Dense, 1, numbers(TOTAL, 4), numbers(TOTAL)),
    "Segmentation": Problem(Pixels, 3, numbers(TOTAL, 2, 5, 4), whole(3, TOTAL, 5, 4)),
    "NextToken": Problem(Tokens, 6, whole(6, TOTAL, 5), whole(6, TOTAL, 5)),
}
METHODS: Sequence[str] = sorted(methods.__all__)


def attempt(method: str, task: str, optimizer: str, **more: Any) -> FederatedModule | str:
    """Return the method after two rounds, or the error message."""
    kind, problem = getattr(methods, method), PROBLEMS[task]
    options = {"lr": 0.01, "batch_size": 5, "engine": "sequential", "seed": 0, **OPTIONS.get(method, {}), **more}
    try:
        module = kind(problem.net(method == "FedGN"), task=task, optimizer=OPTIMIZERS[optimizer], **options)
        fit(module, problem.data(), 2)
    except FederationError as refusal:
        return str(refusal)
    return module  # type: ignore[no-any-return]
