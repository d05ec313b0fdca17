"""Multilayer perceptrons, down to softmax regression."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.base import FedNet
from fl_lightning.ranges import Count


class MLP(FedNet):
    """Fully connected layers with ReLU between them.

    The default is the papers' ``mlp_mnist``: 784-200-10 without biases, 158,800 parameters. With ``hidden=()`` it is
    softmax regression.

    Args:
        in_features: numbers per sample; inputs of shape (B, ...) are flattened to (B, in_features).
        hidden: widths of the hidden layers, named ``fc1``, ``fc2`` and so on.
        num_classes: outputs of the last layer, ``head``.
        bias: whether the layers have biases.

    Example:
        >>> import torch
        >>> MLP()(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self, in_features: Count = 784, hidden: Sequence[Count] = (200,), num_classes: Count = 10, bias: bool = False
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        self.depth = len(hidden)
        for i in range(self.depth):
            self.add_module(f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1], bias=bias))
        self.head = nn.Linear(widths[-1], num_classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for inputs of shape (B, ...)."""
        x = x.flatten(1)
        for i in range(self.depth):
            x = F.relu(self.get_submodule(f"fc{i + 1}")(x))
        logits: Tensor = self.head(x)
        return logits
