"""Data as large and as raw as the real data sets, filled with noise: speed does not depend on what is in it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.datamodules import TensorFederation
from fl_lightning.federation import Federation

#: Training samples of a client where MNIST's classes are dealt out in shards, two a client: between these.
SHARDS = (434, 539)


def images(
    shape: tuple[int, ...],
    clients: int = 100,
    sizes: tuple[int, int] = SHARDS,
    fraction: float = 0.1,
    classes: int = 10,
) -> TensorFederation:
    """A federation of byte images of noise.

    Args:
        shape: of an image: channels, height, width.
        clients: number of clients.
        sizes: a client's number of training samples lies between these; a fifth of all its samples are for testing.
        fraction: share of the clients in a round.
        classes: number of classes.
    """
    rng = np.random.default_rng(0)
    each = rng.integers(sizes[0], sizes[1] + 1, clients)
    tests = np.maximum(each // 4, 1)
    bounds = np.cumsum([0, *(each + tests)])
    train = [torch.arange(a, a + n) for a, n in zip(bounds[:-1], each, strict=True)]
    test = [torch.arange(a + n, b) for a, b, n in zip(bounds[:-1], bounds[1:], each, strict=True)]
    inputs = torch.from_numpy(rng.integers(0, 256, (int(bounds[-1]), *shape), dtype=np.uint8))
    targets = torch.from_numpy(rng.integers(0, classes, int(bounds[-1])))
    mean, std = torch.full((shape[0], 1, 1), 127.0), torch.full((shape[0], 1, 1), 74.0)
    return TensorFederation(
        inputs,
        targets,
        train=train,
        test=test,
        num_classes=classes,
        mean=mean,
        std=std,
        fraction=fraction,
        seed=0,
        val_fraction=0,
    )


def features(federation: Federation) -> Tensor:
    """All inputs, normalised once: the plain loops pay nothing for it."""
    return federation.features(federation.inputs, torch.float32)
