"""Max and mean pooling of a stack's clients in one call.

PyTorch's kernels are vectorised for NHWC. Pooling treats channels and samples alike, so CHWN images become NHWC by
swapping the batch with the channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_lightning.layout.memory import Dims, has_channels_last, keep_layout, split_clients

aten = torch.ops.aten


def _pool(kernel: Callable[..., Any], x: Tensor, *others: Any) -> Any:
    """Call a kernel with NHWC images; CHWN images are passed with batch and channels swapped."""
    if has_channels_last(x):
        return kernel(*(_innermost(value) for value in (x, *others)))
    result = kernel(*(_innermost(value, exchanged=True) for value in (x, *others)))
    return result.transpose(0, 1) if isinstance(result, Tensor) else tuple(value.transpose(0, 1) for value in result)


def _innermost(value: Any, exchanged: bool = False) -> Any:
    """Return images as NHWC, without a copy if they are; other values are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return (value.transpose(0, 1) if exchanged else value).contiguous(memory_format=torch.channels_last)


class MaxPool(torch.autograd.Function):
    """Max pooling and the indices of the maxima."""

    @staticmethod
    def forward(x: Tensor, options: Any) -> Any:
        return _pool(aten.max_pool2d_with_indices, x, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.options = inputs
        ctx.save_for_backward(x, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, indices = ctx.saved_tensors
        return MaxPoolBackward.apply(grad, x, indices, ctx.options), None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, options: Any) -> Any:
        clients = info.batch_size
        pooled, indices = MaxPool.apply(keep_layout(x, in_dims[0], clients), options)
        return (split_clients(pooled, clients), split_clients(indices, clients)), (1, 1)


class MaxPoolBackward(torch.autograd.Function):
    """Gradient of max pooling."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, indices: Tensor, options: Any) -> Tensor:
        return _pool(aten.max_pool2d_with_indices_backward, grad, x, *options, indices)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, indices, _ = inputs
        ctx.save_for_backward(indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return grad.flatten(-2).gather(-1, indices.flatten(-2)).view(indices.shape), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, indices: Tensor, options: Any) -> Any:
        clients = info.batch_size
        images = (keep_layout(value, dim, clients) for value, dim in zip((grad, x, indices), in_dims, strict=False))
        return split_clients(MaxPoolBackward.apply(*images, options), clients), 1


class MeanPool(torch.autograd.Function):
    """Mean pooling."""

    @staticmethod
    def forward(x: Tensor, options: Any) -> Tensor:
        return _pool(aten.avg_pool2d, x, *options)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.options = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return MeanPoolBackward.apply(grad, x, ctx.options), None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, options: Any) -> Any:
        clients = info.batch_size
        return split_clients(MeanPool.apply(keep_layout(x, in_dims[0], clients), options), clients), 1


class MeanPoolBackward(torch.autograd.Function):
    """Gradient of mean pooling; only the shape of ``x`` matters."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, options: Any) -> Tensor:
        return _pool(aten.avg_pool2d_backward, grad, x, *options)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return MeanPool.apply(grad, ctx.options), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, options: Any) -> Any:
        clients = info.batch_size
        images = (keep_layout(value, dim, clients) for value, dim in zip((grad, x), in_dims, strict=False))
        return split_clients(MeanPoolBackward.apply(*images, options), clients), 1
