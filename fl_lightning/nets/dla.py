"""Deep layer aggregation (Yu et al., 2018) for 32x32 images: trees of residual blocks, joined by 1x1 convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.base import FedNet
from fl_lightning.nets.units import Units, units_between
from fl_lightning.ranges import Count


def _conv(in_channels: int, out_channels: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    """Return a convolution that keeps the image size, or divides it by the stride, and BatchNorm."""
    conv = nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.first = _conv(in_channels, out_channels, stride)
        self.second = _conv(out_channels, out_channels)
        same = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same else _conv(in_channels, out_channels, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class _Tree(nn.Module):
    """Blocks whose outputs are all concatenated in a root, a 1x1 convolution.

    A tree of level 1 is two blocks and their root. The root of a higher one also takes the outputs of a block parallel
    to the tree and of a subtree of every lower level.
    """

    def __init__(self, in_channels: int, out_channels: int, level: int, stride: int) -> None:
        super().__init__()
        self.beside = _Block(in_channels, out_channels, stride) if level > 1 else None
        widths = [in_channels] + [out_channels] * level
        strides = [stride] + [1] * level
        self.subtrees = nn.ModuleList(
            _Tree(widths[i], out_channels, level - 1 - i, strides[i]) for i in range(level - 1)
        )
        self.left = _Block(widths[level - 1], out_channels, strides[level - 1])
        self.right = _Block(out_channels, out_channels)
        self.root = _conv((level + 2 if level > 1 else 2) * out_channels, out_channels, size=1)

    def forward(self, x: Tensor) -> Tensor:
        seen = [] if self.beside is None else [self.beside(x)]
        for part in (*self.subtrees, self.left, self.right):
            x = part(x)
            seen.append(x)
        return F.relu(self.root(torch.cat(seen, 1)))


class _BinaryTree(nn.Module):
    """Two halves, blocks or trees of the level below, that are concatenated in a root."""

    def __init__(self, in_channels: int, out_channels: int, level: int, stride: int) -> None:
        super().__init__()
        self.left = self._half(in_channels, out_channels, level, stride)
        self.right = self._half(out_channels, out_channels, level, 1)
        self.root = _conv(2 * out_channels, out_channels, size=1)

    @staticmethod
    def _half(in_channels: int, out_channels: int, level: int, stride: int) -> nn.Module:
        if level == 1:
            return _Block(in_channels, out_channels, stride)
        return _BinaryTree(in_channels, out_channels, level - 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        return F.relu(self.root(torch.cat((left, self.right(left)), 1)))


class _DLA(FedNet):
    """Three convolutions, four trees, global average pooling, and a linear layer."""

    def __init__(self, tree: type[_Tree | _BinaryTree], in_channels: int, num_classes: int, base: int) -> None:
        super().__init__()
        widths = [base, base, 2 * base]
        self.stem = nn.Sequential()
        for before, after in zip([in_channels, *widths], widths, strict=False):
            self.stem.extend([_conv(before, after), nn.ReLU()])
        self.tree1 = tree(2 * base, 4 * base, level=1, stride=1)
        self.tree2 = tree(4 * base, 8 * base, level=2, stride=2)
        self.tree3 = tree(8 * base, 16 * base, level=2, stride=2)
        self.tree4 = tree(16 * base, 32 * base, level=1, stride=2)
        self.head = nn.Linear(32 * base, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for images of shape (B, in_channels, 32, 32)."""
        x = self.tree4(self.tree3(self.tree2(self.tree1(self.stem(x)))))
        logits: Tensor = self.head(F.avg_pool2d(x, 4).flatten(1))
        return logits

    def units(self) -> list[Units]:
        """Return the channels inside blocks; inputs of shortcuts and roots are fixed."""
        blocks = [name for name, module in self.named_modules() if isinstance(module, _Block)]
        return [units_between(self, [f"{name}.first.0", f"{name}.first.1"], [f"{name}.second.0"]) for name in blocks]


class DLA(_DLA):
    """``dla``: 16,291,386 parameters for three channels and ten classes.

    Args:
        in_channels: channels of the images, which are 32x32.
        num_classes: outputs of the last layer, ``head``.
        base: channels of the first layers; the others have 2, 4, 8, 16 and 32 times as many.
    """

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10, base: Count = 16) -> None:
        super().__init__(_Tree, in_channels, num_classes, base)


class DLASimple(_DLA):
    """``dla_simple``: binary trees instead of DLA's, 15,142,970 parameters.

    Args:
        in_channels: channels of the images, which are 32x32.
        num_classes: outputs of the last layer, ``head``.
        base: channels of the first layers, as in :class:`DLA`.
    """

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10, base: Count = 16) -> None:
        super().__init__(_BinaryTree, in_channels, num_classes, base)


class DLATiny(DLA):
    """``dla_tiny``: DLA with an eighth of the channels, for CPUs.

    Args:
        in_channels: channels of the images, which are 32x32.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> DLATiny()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10) -> None:
        super().__init__(in_channels, num_classes, base=2)
