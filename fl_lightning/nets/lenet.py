"""LeNet-5 in its modern form (ReLU, max pooling), with and without BatchNorm, in its original form, and a wide one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.base import FedNet
from fl_lightning.ranges import Count


class _LeNet(FedNet):
    """Base class of the family; a padding of 2 gives 28x28 images the same feature sizes as 32x32 ones."""

    #: Channels of the two convolutions and widths of the two hidden fully connected layers.
    widths = (6, 16, 120, 84)

    def __init__(self, in_channels: int, num_classes: int, padding: int, bias: bool) -> None:
        super().__init__()
        first, second, third, fourth = self.widths
        self.conv1 = nn.Conv2d(in_channels, first, 5, padding=padding, bias=bias)
        self.conv2 = nn.Conv2d(first, second, 5, bias=bias)
        self.fc1 = nn.Linear(second * 5 * 5, third, bias=bias)
        self.fc2 = nn.Linear(third, fourth, bias=bias)
        self.head = nn.Linear(fourth, num_classes, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        """Compute feature maps of shape (B, channels, 5, 5)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        return F.relu(F.max_pool2d(self.conv2(x), 2))

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for images of shape (B, in_channels, height, width)."""
        x = F.relu(self.fc1(self.features(x).flatten(1)))
        logits: Tensor = self.head(F.relu(self.fc2(x)))
        return logits


class LeNet5(_LeNet):
    """``lenet5`` for 28x28 images: 61,706 parameters for one channel and ten classes.

    Args:
        in_channels: channels of the images.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> LeNet5()(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """

    def __init__(self, in_channels: Count = 1, num_classes: Count = 10) -> None:
        super().__init__(in_channels, num_classes, padding=2, bias=True)


class LeNet5Classic(LeNet5):
    """``lenet5_classic``: LeNet-5 with hyperbolic tangents and mean pooling, as by LeCun et al.; 61,706 parameters.

    Activations are bounded, so SCAFFOLD and similar methods tolerate higher learning rates than with
    :class:`LeNet5`.

    Args:
        in_channels: channels of the images, which are 28x28.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> LeNet5Classic()(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """

    def features(self, x: Tensor) -> Tensor:
        """Compute feature maps of shape (B, 16, 5, 5)."""
        x = F.avg_pool2d(torch.tanh(self.conv1(x)), 2)
        return F.avg_pool2d(torch.tanh(self.conv2(x)), 2)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for images of shape (B, in_channels, 28, 28)."""
        x = torch.tanh(self.fc1(self.features(x).flatten(1)))
        logits: Tensor = self.head(torch.tanh(self.fc2(x)))
        return logits


class LeNetBN(LeNet5):
    """``lenet_bn``: LeNet-5 with BatchNorm after each convolution, 44 parameters more (61,750).

    Args:
        in_channels: channels of the images, which are 28x28.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> LeNetBN()(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """

    def __init__(self, in_channels: Count = 1, num_classes: Count = 10) -> None:
        super().__init__(in_channels, num_classes)
        self.bn1 = nn.BatchNorm2d(6)
        self.bn2 = nn.BatchNorm2d(16)

    def features(self, x: Tensor) -> Tensor:
        """Compute feature maps of shape (B, 16, 5, 5)."""
        x = F.relu(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        return F.relu(F.max_pool2d(self.bn2(self.conv2(x)), 2))


class LeNet5Cifar(_LeNet):
    """``lenet5_cifar``: LeNet-5 for 32x32 images, without biases, 61,770 parameters for three channels.

    Args:
        in_channels: channels of the images.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> LeNet5Cifar()(torch.zeros(3, 3, 32, 32)).shape
        torch.Size([3, 10])
    """

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10) -> None:
        super().__init__(in_channels, num_classes, padding=0, bias=False)


class WideLeNet(_LeNet):
    """``wide_lenet`` for 32x32 images: LeNet-5 with 64, 64, 384 and 192 instead of 6, 16, 120 and 84.

    797,962 parameters for three channels and ten classes.

    Args:
        in_channels: channels of the images.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> WideLeNet()(torch.zeros(3, 3, 32, 32)).shape
        torch.Size([3, 10])
    """

    widths = (64, 64, 384, 192)

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10) -> None:
        super().__init__(in_channels, num_classes, padding=0, bias=True)
