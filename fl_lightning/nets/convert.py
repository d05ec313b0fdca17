"""Replacement of a network's layers, and conversion of BatchNorm to GroupNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.errors import FederationError

Net = TypeVar("Net", bound=nn.Module)


def replace_modules(net: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace modules within ``net`` in place; a module under several names is replaced once.

    Args:
        net: the network to change.
        make: returns the replacement of a module, or None to keep it.

    Returns:
        The same network, or a new module if ``net`` itself is replaced.
    """
    made: dict[nn.Module, nn.Module] = {}
    for module in net.modules():
        new = make(module)
        if new is not None:
            made[module] = new.train(module.training)
    for parent in list(net.modules()):
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
    return made.get(net, net)


def group_count(channels: int, groups: int = 32) -> int:
    """Return the largest divisor of ``channels`` up to ``groups`` that leaves at least two channels per group.

    Example:
        >>> [group_count(channels) for channels in (64, 24, 16, 6, 1)]
        [32, 12, 8, 3, 1]
    """
    return max([g for g in range(1, min(groups, channels // 2) + 1) if channels % g == 0], default=1)


def group_norm(net: Net, groups: int = 32) -> Net:
    """Return a copy of ``net`` with GroupNorm instead of BatchNorm, with the same scale, shift and eps.

    A sample's output is then independent of the rest of its batch, and the net has no running statistics.

    Args:
        net: any network.
        groups: maximum number of groups of a layer; see :func:`group_count`.

    Example:
        >>> from fl_lightning.nets import LeNetBN
        >>> group_norm(LeNetBN()).bn2.num_groups
        8
    """
    if groups < 1:
        raise FederationError(f"groups must be 1 or more, not {groups}.")

    def make(module: nn.Module) -> nn.Module | None:
        if not isinstance(module, _BatchNorm):
            return None
        return _group_norm(module, groups)

    return replace_modules(copy.deepcopy(net), make)  # type: ignore[return-value]


def _group_norm(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    made = nn.GroupNorm(group_count(channels, groups), channels, layer.eps)
    if layer.affine:
        with torch.no_grad():
            made.weight.copy_(layer.weight)
            made.bias.copy_(layer.bias)
        made.to(layer.weight)
        made.weight.requires_grad_(layer.weight.requires_grad)
        made.bias.requires_grad_(layer.bias.requires_grad)
    return made
