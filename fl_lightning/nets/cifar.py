"""Deep networks for 32x32 images: ResNet-18, DenseNet-121 and MobileNetV2 in their CIFAR forms.

They use torchvision's blocks but other stems and strides than its networks, which are made for 224x224 images. Weights
have PyTorch's default initialisation, not torchvision's.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.densenet import _DenseBlock, _Transition
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock
from torchvision.ops.misc import Conv2dNormActivation

from fl_lightning.nets.base import FedNet
from fl_lightning.ranges import Count


class _Pooled(FedNet):
    """A convolutional body, global average pooling, and a linear layer."""

    def __init__(self, body: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for images of shape (B, in_channels, 32, 32)."""
        logits: Tensor = self.head(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))
        return logits


class ResNet18(_Pooled):
    """``resnet18``: four stages of two basic blocks, 11,173,962 parameters and 4,800 normalised channels.

    Args:
        in_channels: channels of the images, which are 32x32.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> ResNet18()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10) -> None:
        body = nn.Sequential()
        body.add_module("stem", Conv2dNormActivation(in_channels, 64, 3))
        width = 64
        for i, (out, stride) in enumerate([(64, 1), (128, 2), (256, 2), (512, 2)]):
            down = _projection(width, out, stride) if stride > 1 else None
            body.add_module(f"stage{i + 1}", nn.Sequential(BasicBlock(width, out, stride, down), BasicBlock(out, out)))
            width = out
        super().__init__(body, width, num_classes)


class DenseNet121(_Pooled):
    """``densenet121``: blocks of 6, 12, 24 and 16 layers, 6,956,298 parameters and 41,760 normalised channels.

    Every layer adds 32 channels through a bottleneck of 128; transitions halve the number of channels.

    Args:
        in_channels: channels of the images, which are 32x32.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> DenseNet121()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10) -> None:
        body = nn.Sequential()
        body.add_module("stem", nn.Conv2d(in_channels, 64, 3, padding=1, bias=False))
        width, growth = 64, 32
        for i, layers in enumerate([6, 12, 24, 16]):
            if i:
                body.add_module(f"transition{i}", _Transition(width, width // 2))
                width //= 2
            body.add_module(f"block{i + 1}", _DenseBlock(layers, width, 4, growth, drop_rate=0.0))
            width += layers * growth
        body.add_module("norm", nn.BatchNorm2d(width))
        body.add_module("relu", nn.ReLU(inplace=True))
        super().__init__(body, width, num_classes)


class MobileNetV2(_Pooled):
    """``mobilenetv2``: seven groups of inverted residuals, 2,296,922 parameters and 17,544 normalised channels.

    Args:
        in_channels: channels of the images, which are 32x32.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> MobileNetV2()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    #: Expansion, channels, blocks, and stride of the first block of every group.
    groups = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10) -> None:
        body = nn.Sequential()
        body.add_module("stem", Conv2dNormActivation(in_channels, 32, 3, activation_layer=nn.ReLU6))
        width = 32
        for i, (expand, out, blocks, stride) in enumerate(self.groups):
            group = nn.Sequential()
            for j in range(blocks):
                group.append(_Inverted(width, out, stride if j == 0 else 1, expand))
                width = out
            body.add_module(f"group{i + 1}", group)
        body.add_module("last", Conv2dNormActivation(width, 1280, 1, activation_layer=nn.ReLU6))
        super().__init__(body, 1280, num_classes)


class _Inverted(InvertedResidual):  # type: ignore[misc]
    """torchvision's block with a projection shortcut if only the width changes, and expansion at ratio 1 too."""

    def __init__(self, width: int, out: int, stride: int, expand: int) -> None:
        super().__init__(width, out, stride, expand)
        if expand == 1:
            self.conv.insert(0, Conv2dNormActivation(width, width, 1, activation_layer=nn.ReLU6))
        self.shortcut = _projection(width, out) if stride == 1 and width != out else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out if self.shortcut is None else out + self.shortcut(x)


def _projection(width: int, out: int, stride: int = 1) -> nn.Sequential:
    """Return a 1x1 convolution with BatchNorm for the shortcut of a block."""
    return nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
