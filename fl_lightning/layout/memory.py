"""Memory layouts of a stack's images: CHWN (batch innermost) or NHWC (channels innermost).

The shape is (batch, clients * channels, height, width) in both. With CHWN, operations on pixels work on contiguous runs
of the whole batch: im2col copies long runs, its products are plain GEMMs, and flattening for a linear layer copies
nothing. With NHWC, PyTorch's ``channels_last``, its grouped convolutions are faster for some numbers of channels.
Convolutions choose (:func:`~fl_lightning.layout.convolution.suits_groups`); pooling and normalisation keep the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

Dims = tuple[int | None, ...]


def batch_last(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """Convert a stack of images with clients along ``dim`` to (batch, clients * channels, height, width) as CHWN."""
    return from_chwn(_first(x, dim, clients).permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous())


def channels_last(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """Convert a stack of images with clients along ``dim`` to (batch, clients * channels, height, width) as NHWC."""
    together = _first(x, dim, clients).permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)
    return together.contiguous(memory_format=torch.channels_last)


def keep_layout(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """Convert a stack of images with :func:`channels_last` if they are NHWC already, else with :func:`batch_last`."""
    apart = _first(x, dim, clients)
    innermost = apart.stride(2) == 1 and apart.stride(4) > 1
    return (channels_last if innermost else batch_last)(apart, 0, clients)


def has_channels_last(x: Tensor) -> bool:
    """Return whether images of shape (batch, channels, height, width) are NHWC in memory."""
    return x.is_contiguous(memory_format=torch.channels_last)


def to_chwn(x: Tensor) -> Tensor:
    """Permute (batch, channels, height, width) to (channels, height, width, batch), contiguous."""
    return x.permute(1, 2, 3, 0).contiguous()


def from_chwn(x: Tensor) -> Tensor:
    """Permute (channels, height, width, batch) to (batch, channels, height, width), without a copy."""
    return x.permute(3, 0, 1, 2)


def split_clients(x: Tensor, clients: int) -> Tensor:
    """Split the channels of a stack's images into (clients, channels), without a copy."""
    return x.unflatten(1, (clients, -1))  # type: ignore[no-any-return, no-untyped-call]


def fold_clients(value: Tensor, dim: int | None, clients: int) -> Tensor:
    """Concatenate a stack of weights with clients along ``dim`` into the weight of a grouped operation."""
    return _first(value, dim, clients).flatten(0, 1)


def _first(value: Tensor, dim: int | None, clients: int) -> Tensor:
    """Move the clients to the first dimension, or expand a tensor that all clients share."""
    return value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)
