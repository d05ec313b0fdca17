"""BatchNorm and GroupNorm of a stack's clients in one call.

NHWC images use PyTorch's kernels, which would copy CHWN images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.layout.memory import (
    Dims,
    fold_clients,
    from_chwn,
    has_channels_last,
    keep_layout,
    split_clients,
    to_chwn,
)

aten = torch.ops.aten


class BatchNorm(torch.autograd.Function):
    """Batch normalisation in training; also returns the mean and the inverse standard deviation."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        if has_channels_last(x):
            return aten.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        images = to_chwn(x)
        rows = images.flatten(1)
        mean = rows.mean(1, keepdim=True)
        centred = rows - mean
        length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)  # sums squares without storing them
        inverse_std = (length.square() / rows.shape[1] + eps).rsqrt()
        result = torch.addcmul(bias[:, None], centred, weight[:, None] * inverse_std)
        return from_chwn(result.view(images.shape)), mean.flatten(), inverse_std.flatten()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, _ = inputs
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return *BatchNormBackward.apply(grad, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        clients = info.batch_size
        own = (fold_clients(value, dim, clients) for value, dim in zip((weight, bias), in_dims[1:], strict=False))
        result, *statistics = BatchNorm.apply(keep_layout(x, in_dims[0], clients), *own, eps)
        return (split_clients(result, clients), *(s.unflatten(0, (clients, -1)) for s in statistics)), (1, 0, 0)


class BatchNormBackward(torch.autograd.Function):
    """Gradients of BatchNorm with respect to input, weight and bias."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse_std: Tensor) -> Any:
        if has_channels_last(x):
            statistics = (None, None, mean, inverse_std, True, 0.0)  # running statistics and epsilon are unused
            return aten.native_batch_norm_backward(grad, x, weight, *statistics, [True, True, True])
        images, given = to_chwn(x), to_chwn(grad).flatten(1)
        count, scale = given.shape[1], (weight * inverse_std)[:, None]
        centred = images.flatten(1) - mean[:, None]
        total, along = given.sum(1, keepdim=True), (given * centred).sum(1, keepdim=True)
        moved = torch.addcmul(-scale * total / count, given, scale)
        by_x = torch.addcmul(moved, centred, -scale * inverse_std[:, None].square() * along / count)
        return from_chwn(by_x.view(images.shape)), along.flatten() * inverse_std, total.flatten()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise FederationError("Second derivatives of BatchNorm cannot be stacked: use the engine 'sequential'.")

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, *others: Tensor) -> Any:
        clients = info.batch_size
        images = (keep_layout(value, dim, clients) for value, dim in zip((grad, x), in_dims, strict=False))
        own = (fold_clients(value, dim, clients) for value, dim in zip(others, in_dims[2:], strict=False))
        result, *grads = BatchNormBackward.apply(*images, *own)
        return (split_clients(result, clients), *(g.unflatten(0, (clients, -1)) for g in grads)), (1, 0, 0)


class GroupNorm(torch.autograd.Function):
    """Group normalisation; also returns the statistics."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Any:
        if has_channels_last(x):
            return aten.native_group_norm(x, weight, bias, *_sizes(x), groups, eps)
        images = to_chwn(x)
        blocks = _blocks(images, groups)
        mean = blocks.mean(1, keepdim=True)
        centred = blocks - mean
        inverse_std = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
        result = torch.addcmul(_each(bias), (centred * inverse_std).view(images.shape), _each(weight))
        return from_chwn(result), mean.squeeze(1).T, inverse_std.squeeze(1).T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.groups, _ = inputs
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return *GroupNormBackward.apply(grad, *ctx.saved_tensors, ctx.groups), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Any:
        clients = info.batch_size
        own = (fold_clients(value, dim, clients) for value, dim in zip((weight, bias), in_dims[1:], strict=False))
        results = GroupNorm.apply(keep_layout(x, in_dims[0], clients), *own, clients * groups, eps)
        return tuple(split_clients(result, clients) for result in results), (1, 1, 1)


class GroupNormBackward(torch.autograd.Function):
    """Gradients of GroupNorm with respect to input, weight and bias."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse_std: Tensor, groups: int) -> Any:
        if has_channels_last(x):
            given = grad.contiguous(memory_format=torch.channels_last)
            sizes = (*_sizes(x), groups)
            return aten.native_group_norm_backward(given, x, mean, inverse_std, weight, *sizes, [True, True, True])
        images, given = to_chwn(x), to_chwn(grad)
        means, scales = (value.T.unsqueeze(1) for value in (mean, inverse_std))
        normal = (_blocks(images, groups) - means) * scales
        weighted = _blocks(given * _each(weight), groups)
        along = (weighted * normal).mean(1, keepdim=True)
        by_x = (weighted - weighted.mean(1, keepdim=True) - normal * along) * scales
        by_weight = (given * normal.view(images.shape)).flatten(1).sum(1)
        return from_chwn(by_x.view(images.shape)), by_weight, given.flatten(1).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise FederationError("Second derivatives of GroupNorm cannot be stacked: use the engine 'sequential'.")

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> Any:
        clients, (*statistics, groups) = info.batch_size, others
        images = (keep_layout(value, dim, clients) for value, dim in zip((grad, x), in_dims, strict=False))
        stack = (_concatenated(value, dim, clients) for value, dim in zip(statistics, in_dims[3:], strict=False))
        weights = fold_clients(weight, in_dims[2], clients)
        result, *grads = GroupNormBackward.apply(*images, weights, *stack, clients * groups)
        return (split_clients(result, clients), *(g.unflatten(0, (clients, -1)) for g in grads)), (1, 0, 0)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the numbers of samples, channels and pixels."""
    return x.shape[0], x.shape[1], x.shape[2] * x.shape[3]


def _blocks(images: Tensor, groups: int) -> Tensor:
    """Reshape images (channels, height, width, batch) to (groups, values per group, batch)."""
    return images.view(groups, -1, images.shape[3])


def _each(value: Tensor) -> Tensor:
    """Reshape one number per channel to broadcast over images (channels, height, width, batch)."""
    return value[:, None, None, None]


def _concatenated(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """Concatenate the groups of a stack of (batch, groups) with clients along ``dim``."""
    x = x.expand(clients, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.transpose(0, 1).flatten(1)
