"""The small convolutional networks of the weight-factorisation papers; they have no biases.

Pooling comes before ReLU: the same function, bit for bit, on a quarter of the values.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.base import FedNet
from fl_lightning.ranges import Count


class CNNFashion(FedNet):
    """``cnn_fmnist``: two 5x5 convolutions and one fully connected layer, 28,880 parameters for ten classes.

    Args:
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> CNNFashion()(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """

    def __init__(self, num_classes: Count = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2, bias=False)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2, bias=False)
        self.head = nn.Linear(32 * 7 * 7, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for images of shape (B, 1, 28, 28)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.head(x.flatten(1))
        return logits


class CNNCifar(FedNet):
    """``cnn_cifar``: two 3x3 convolutions and three fully connected layers, 54,216 parameters for ten classes.

    Args:
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> import torch
        >>> CNNCifar()(torch.zeros(3, 3, 32, 32)).shape
        torch.Size([3, 10])
    """

    def __init__(self, num_classes: Count = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, bias=False)
        self.conv2 = nn.Conv2d(16, 16, 3, bias=False)
        self.fc1 = nn.Linear(16 * 6 * 6, 80, bias=False)
        self.fc2 = nn.Linear(80, 60, bias=False)
        self.head = nn.Linear(60, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for images of shape (B, 3, 32, 32)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.head(F.relu(self.fc2(x)))
        return logits
