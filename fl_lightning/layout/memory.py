"""How a stack's images lie: with the batch innermost, or with the channels innermost.

Their shape is (batch, clients * channels, height, width) in both cases. With the *batch innermost*, in the order
clients, channels, height, width, batch, whatever is done to places of images is done to runs of the whole batch: the
columns of a convolution are copies of long contiguous runs, its products are matrix products as BLAS likes them, and
flattening images for a linear layer copies nothing. With the *channels innermost*, which PyTorch calls channels last,
its own kernels for convolutions in groups are the faster ones, if the numbers of channels suit them. A convolution says
which it is (:func:`~fl_lightning.layout.convolution.suits_groups`); pooling and normalisation leave images as they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

Dims = tuple[int | None, ...]


def batch_last(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack of images, clients along ``dim``, as (batch, clients * channels, height, width), the batch innermost."""
    return outward(_first(x, dim, clients).permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous())


def channels_last(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack of images, clients along ``dim``, as (batch, clients * channels, height, width), channels innermost."""
    together = _first(x, dim, clients).permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)
    return together.contiguous(memory_format=torch.channels_last)


def as_it_lies(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """Memory order of :func:`channels_last` if channels are innermost already, and of :func:`batch_last` if not."""
    apart = _first(x, dim, clients)
    innermost = apart.stride(2) == 1 and apart.stride(4) > 1
    return (channels_last if innermost else batch_last)(apart, 0, clients)


def has_channels_last(x: Tensor) -> bool:
    """Whether images of shape (batch, channels, height, width) have their channels innermost."""
    return x.is_contiguous(memory_format=torch.channels_last)


def inward(x: Tensor) -> Tensor:
    """Images of shape (batch, channels, height, width) as (channels, height, width, batch), contiguous."""
    return x.permute(1, 2, 3, 0).contiguous()


def outward(x: Tensor) -> Tensor:
    """Images of shape (channels, height, width, batch) as (batch, channels, height, width), as they lie."""
    return x.permute(3, 0, 1, 2)


def apart(x: Tensor, clients: int) -> Tensor:
    """A stack's images with clients along dimension 1, as they lie."""
    return x.unflatten(1, (clients, -1))  # type: ignore[no-any-return, no-untyped-call]


def joined(value: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack of weights, its clients along ``dim``, as groups of one weight."""
    return _first(value, dim, clients).flatten(0, 1)


def _first(value: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack with its clients along the first dimension; what all clients share is repeated."""
    return value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)
