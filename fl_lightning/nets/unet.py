"""A small U-Net."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import FederationError
from fl_lightning.nets.base import FedNet
from fl_lightning.nets.convert import group_count
from fl_lightning.ranges import Count


class Twice(nn.Module):
    """Two 3 x 3 convolutions, each with GroupNorm and ReLU.

    Args:
        channels: input channels.
        width: output channels.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = (nn.GroupNorm(group_count(width, 8), width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Compute feature maps of the same size."""
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(FedNet):
    """Segmentation: features at ever coarser scales, upsampled and concatenated with the finer ones, ``head``.

    It uses GroupNorm, because small batches of images give poor batch statistics.

    Args:
        channels: channels of the images.
        num_classes: outputs for every pixel.
        widths: channels of the scales, each half as fine as the one before, so image sizes must be divisible by
            2 ** (len(widths) - 1).

    Example:
        >>> UNet(1, 2)(torch.zeros(2, 1, 16, 16)).shape
        torch.Size([2, 2, 16, 16])
    """

    def __init__(self, channels: Count = 3, num_classes: Count = 2, widths: Sequence[Count] = (16, 32, 64)) -> None:
        super().__init__()
        if not widths:
            raise FederationError("A U-Net needs one scale at least: give widths.")
        before = [channels, *widths]
        self.down = nn.ModuleList(Twice(before[i], width) for i, width in enumerate(widths))
        self.up = nn.ModuleList(
            Twice(coarse + fine, fine) for fine, coarse in zip(widths[-2::-1], widths[::-1], strict=False)
        )
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores of shape (B, classes, height, width) for images of shape (B, channels, height, width)."""
        times = 2 ** len(self.up)
        if x.shape[-1] % times or x.shape[-2] % times:
            raise FederationError(f"A U-Net with {len(self.down)} widths takes images divisible by {times}.")
        scales = list[Tensor]()
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            scales.append(x)
        for block, finer in zip(self.up, scales[-2::-1], strict=True):
            x = block(torch.cat((F.interpolate(x, scale_factor=2.0, mode="nearest"), finer), dim=1))
        scores: Tensor = self.head(x)
        return scores
