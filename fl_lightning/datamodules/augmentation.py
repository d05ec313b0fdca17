"""Augmentations of raw training batches, drawn from the client's random stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class CropAndFlip:
    """Pad with zeros, crop at random to the original size and flip horizontally with probability one half.

    The usual augmentation of CIFAR-10. Every image has its own crop and flip; the batch is changed in one gather.

    Args:
        padding: pixels added on every side before the crop.
    """

    def __init__(self, padding: int = 4) -> None:
        self.padding = padding

    def __call__(self, inputs: Tensor, rng: np.random.Generator) -> Tensor:
        """Augment a batch of images, shape (B, C, H, W); keeps shape and type."""
        from torchvision.transforms.v2 import functional

        batch, _, height, width = inputs.shape
        shifts = rng.integers(0, 2 * self.padding + 1, (2, batch, 1))
        flips = rng.random((batch, 1)) < 0.5
        across = np.arange(width)
        rows = shifts[0] + np.arange(height)
        columns = shifts[1] + np.where(flips, across[::-1], across)
        padded: Tensor = functional.pad(inputs, [self.padding])
        down = torch.from_numpy(rows).to(inputs.device)[:, None, :, None]
        right = torch.from_numpy(columns).to(inputs.device)[:, None, None, :]
        images = torch.arange(batch, device=inputs.device)[:, None, None, None]
        channels = torch.arange(inputs.shape[1], device=inputs.device)[None, :, None, None]
        return padded[images, channels, down, right]


class Seeded:
    """Make a transform that uses torch's global generator depend on the client's random stream alone.

    Args:
        transform: applied to the whole batch, such as one of ``torchvision.transforms.v2``.
    """

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform = transform

    def __call__(self, inputs: Tensor, rng: np.random.Generator) -> Tensor:
        """Augment a batch, shape (B, ...); the state of the global generator is restored."""
        devices = [inputs.device] if inputs.is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(rng.integers(2**63)))
            return self.transform(inputs)
