"""How a stack's images lie: (clients, channels, height, width, batch), the batch innermost.

Whatever is done to places of images is then done to runs of the whole batch: pooling and the columns of a convolution
are copies and sums of long contiguous runs, a convolution's products are matrix products as BLAS likes them, and
flattening images for a linear layer copies nothing.
"""

from __future__ import annotations

from torch import Tensor

Dims = tuple[int | None, ...]


def last(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack of images, clients along ``dim``, as (batch, clients * channels, height, width), the batch innermost."""
    x = x.expand(clients, *x.shape) if dim is None else x.movedim(dim, 0)
    return outward(x.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous())


def inward(x: Tensor) -> Tensor:
    """Images of shape (batch, channels, height, width) as (channels, height, width, batch), contiguous."""
    return x.permute(1, 2, 3, 0).contiguous()


def outward(x: Tensor) -> Tensor:
    """Images of shape (channels, height, width, batch) as (batch, channels, height, width), as they lie."""
    return x.permute(3, 0, 1, 2)


def apart(x: Tensor, clients: int) -> Tensor:
    """The images of :func:`last` with clients along dimension 1, as they lie."""
    return x.unflatten(1, (clients, -1))  # type: ignore[no-any-return, no-untyped-call]


def joined(value: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack of weights, its clients along ``dim``, as groups of one weight."""
    return (value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)).flatten(0, 1)
