"""The thin residual networks for 32x32 images of He et al. (2016), section 4.2: 6n + 2 layers, 16 to 64 channels."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.base import FedNet
from fl_lightning.nets.units import Units, units_between
from fl_lightning.ranges import Count


class ThinBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut without parameters (the paper's option A).

    If the block halves the image, the shortcut takes every second pixel; new channels are zeros, half of them before
    and half of them after the old ones.

    Args:
        inputs: input channels.
        outputs: output channels.
        stride: stride of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.new = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Compute maps of shape (B, outputs, H / stride, W / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """Return the input, subsampled and zero-padded."""
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        before = self.new // 2
        return F.pad(x, (0, 0, 0, 0, before, self.new - before)) if self.new else x


class ResNet20(FedNet):
    """``resnet20``: three stages of three blocks, 269,722 parameters for three channels and ten classes.

    Args:
        in_channels: channels of the images, which are 32x32.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> ResNet20()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    #: Blocks of each stage.
    blocks: ClassVar[int] = 3

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stage1 = self._stage(16, 16, 1)
        self.stage2 = self._stage(16, 32, 2)
        self.stage3 = self._stage(32, 64, 2)
        self.head = nn.Linear(64, num_classes)

    def _stage(self, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        rest = [ThinBlock(outputs, outputs, 1) for _ in range(self.blocks - 1)]
        return nn.Sequential(ThinBlock(inputs, outputs, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for images of shape (B, in_channels, 32, 32)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def units(self) -> list[Units]:
        """Return the channels inside blocks; those on the residual stream are fixed."""
        blocks = [name for name, module in self.named_modules() if isinstance(module, ThinBlock)]
        return [units_between(self, [f"{name}.conv1", f"{name}.bn1"], [f"{name}.conv2"]) for name in blocks]


class ResNet32(ResNet20):
    """``resnet32``: :class:`ResNet20` with five blocks a stage, 464,154 parameters."""

    blocks = 5


class ResNet44(ResNet20):
    """``resnet44``: :class:`ResNet20` with seven blocks a stage, 658,586 parameters."""

    blocks = 7


class ResNet56(ResNet20):
    """``resnet56``: :class:`ResNet20` with nine blocks a stage, 853,018 parameters."""

    blocks = 9
