"""Changes to a raw training batch, drawn from the stream of the client whose batch it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class CropAndFlip:
    """Pad with zeros, crop at random back to size, flip left to right with probability one half.

    The usual augmentation of CIFAR-10, with draws of its own for every image, and the whole batch in one gather.

    Args:
        padding: pixels added on every side before the crop.
    """

    def __init__(self, padding: int = 4) -> None:
        self.padding = padding

    def __call__(self, inputs: Tensor, rng: np.random.Generator) -> Tensor:
        """Change a batch of images, shape (B, C, H, W); same shape and type."""
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
    """Any transform that draws from torch's global generator, made to depend on the client's stream alone.

    Args:
        transform: such as one of ``torchvision.transforms.v2``; it sees the whole batch.
    """

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform = transform

    def __call__(self, inputs: Tensor, rng: np.random.Generator) -> Tensor:
        """Change a batch, shape (B, ...); the global generator is left as it was."""
        devices = [inputs.device] if inputs.is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(rng.integers(2**63)))
            return self.transform(inputs)
