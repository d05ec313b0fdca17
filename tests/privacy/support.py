"""A federation that can only be learned by heart, and runs on it."""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.datamodules import IID, TensorFederation
from fl_lightning.nets import MLP

CLIENTS, SAMPLES = 4, 100


def noise(rows: int = 2400, clients: int = CLIENTS, **kwargs: Any) -> TensorFederation:
    """Random inputs with random labels; most rows are nobody's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 20, generator=generator)
    y = torch.randint(4, (rows,), generator=generator)
    scheme = IID(clients, train_samples=SAMPLES)
    return TensorFederation(x, y, num_classes=4, partition=scheme, **{"val_fraction": 0, **kwargs})


def net(width: int = 64, seed: int = 0) -> MLP:
    """An MLP wide enough to learn a client's samples by heart."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP(20, (width,), 4, bias=True)
