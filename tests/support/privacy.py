"""A federation that can only be memorised, and runs on it."""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.datamodules import IID, ConceptShift, TensorFederation
from fl_lightning.nets import MLP

CLIENTS, SAMPLES = 4, 100
#: Methods whose server needs more than one mean.
REFUSED = {"QFFL", "FedDAF", "FedMA", "WeightErosion", "WAFFLEAvg", "IFCA", "FeSEM", "FedGroup", "FedBPS"}


def noise(rows: int = 2400, clients: int = CLIENTS, **kwargs: Any) -> TensorFederation:
    """Random inputs with random labels; most rows belong to no client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 20, generator=generator)
    y = torch.randint(4, (rows,), generator=generator)
    scheme = IID(clients, train_samples=SAMPLES)
    return TensorFederation(x, y, num_classes=4, partition=scheme, **{"val_fraction": 0, **kwargs})


def net(width: int = 64, seed: int = 0) -> MLP:
    """An MLP wide enough to memorise a client's samples."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP(20, (width,), 4, bias=True)


SIDE = 12


def stripes(rows: int = 240, maps: bool = False) -> TensorFederation:
    """Images as bytes: class 0 is bright above, class 1 bright below, class 2 bright on the left."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(rows) % 3
    x = torch.full((rows, 1, SIDE, SIDE), 40.0)
    x[y == 0, :, : SIDE // 2] += 150
    x[y == 1, :, SIDE // 2 :] += 150
    x[y == 2, :, :, : SIDE // 2] += 150
    x = (x + 10 * torch.randn(x.shape, generator=generator)).clamp(0, 255).to(torch.uint8)
    scheme = IID(2, train_samples=60)
    mean, std = torch.tensor(100.0), torch.tensor(80.0)
    return TensorFederation(
        x, y, partition=ConceptShift(scheme) if maps else scheme, mean=mean, std=std, val_fraction=0
    )


def spots() -> TensorFederation:
    """Images that have black and white pixels, more black ones."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(240, 1, SIDE, SIDE, generator=generator) * 700 - 400).clamp(0, 255).to(torch.uint8)
    mean, std = torch.tensor(50.0), torch.tensor(80.0)
    return TensorFederation(x, torch.arange(240) % 3, partition=IID(2, train_samples=60), mean=mean, std=std)
