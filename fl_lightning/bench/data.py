"""Noise data with the sizes and types of real data sets; speed does not depend on the values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.datamodules import TensorFederation
from fl_lightning.federation import Federation

#: Range of a client's training samples when MNIST is split into shards by class, two per client.
SHARDS = (434, 539)


def images(
    shape: tuple[int, ...],
    clients: int = 100,
    sizes: tuple[int, int] = SHARDS,
    fraction: float = 0.1,
    classes: int = 10,
) -> TensorFederation:
    """Build a federation of noise images in uint8.

    Args:
        shape: shape of an image: channels, height, width.
        clients: number of clients.
        sizes: range of a client's number of training samples; a fifth of all its samples are for testing.
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
    """Normalise all inputs once, so that plain loops spend no time on it."""
    return federation.features(federation.inputs, torch.float32)
