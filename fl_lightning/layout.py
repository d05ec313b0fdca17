"""Convolutions, pooling, BatchNorm and GroupNorm of a stack in one call, on memory in which channels lie together.

``torch.vmap`` maps a convolution over clients by making groups of their channels, and max pooling by making samples of
them. Both then work on small maps that lie apart, with copies in between. With the stack kept as (batch, height, width,
clients, channels), what convolutions return is what pooling and the next convolution take, as it lies, and PyTorch's
kernels vectorise over the channels of all clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from fl_lightning.errors import FederationError

aten = torch.ops.aten
Dims = tuple[int | None, ...]


class ChannelsLast(TorchFunctionMode):
    """Within it, convolutions, pooling and normalisation of mapped images are done for all clients at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the calls that there is a better way for."""
        kwargs = kwargs or {}
        better = BETTER.get(func)
        image = args[0] if args else kwargs.get("input")
        if better is not None and is_functorch_wrapped_tensor(image) and image.dim() == 4:
            return better(func, *args, **kwargs)
        return func(*args, **kwargs)


def _conv2d(
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str):
        return func(input, weight, bias, stride, padding, dilation, groups)
    return _Convolution.apply(input, weight, bias, (_pair(stride), _pair(padding), _pair(dilation), groups))  # type: ignore[no-any-return]


def _max_pool2d(
    func: Callable[..., Tensor],
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    if return_indices:
        return func(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    size = _pair(kernel_size)
    options = (size, _pair(stride or size), _pair(padding), _pair(dilation), ceil_mode)
    return _MaxPool.apply(input, options)[0]  # type: ignore[no-any-return]


def _avg_pool2d(
    func: Callable[..., Tensor],
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    size = _pair(kernel_size)
    options = (size, _pair(stride or size), _pair(padding), ceil_mode, count_include_pad, divisor_override)
    return _AvgPool.apply(input, options)  # type: ignore[no-any-return]


def _batch_norm(
    func: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or weight is None or bias is None:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    result, mean, inverse_std = _BatchNorm.apply(input, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        variance = (inverse_std.detach().pow(-2) - eps) * (count / (count - 1))
        running_mean.mul_(1 - momentum).add_(mean.detach() * momentum)
        running_var.mul_(1 - momentum).add_(variance * momentum)
    return result  # type: ignore[no-any-return]


def _group_norm(
    func: Callable[..., Tensor],
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    if weight is None or bias is None:
        return func(input, num_groups, weight, bias, eps)
    return _GroupNorm.apply(input, weight, bias, num_groups, eps)[0]  # type: ignore[no-any-return]


BETTER: dict[Any, Callable[..., Tensor]] = {
    torch.conv2d: _conv2d,
    torch.max_pool2d: _max_pool2d,
    F.max_pool2d: _max_pool2d,
    F.avg_pool2d: _avg_pool2d,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
}


def _last(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack of images, its clients along ``dim``, as (batch, clients * channels, height, width), channels last."""
    x = x.expand(clients, *x.shape) if dim is None else x.movedim(dim, 0)
    batch, height, width = x.shape[1], x.shape[3], x.shape[4]
    joined = x.permute(1, 3, 4, 0, 2).reshape(batch, height, width, -1).permute(0, 3, 1, 2)
    return joined.contiguous(memory_format=torch.channels_last)


def _apart(x: Tensor, clients: int) -> Tensor:
    """The images of :func:`_last` with clients along dimension 1, as they lie."""
    return x.unflatten(1, (clients, -1))  # type: ignore[no-any-return, no-untyped-call]


def _joined(weight: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack of weights, its clients along ``dim``, as groups of one weight."""
    return (weight.expand(clients, *weight.shape) if dim is None else weight.movedim(dim, 0)).flatten(0, 1)


class _Convolution(torch.autograd.Function):
    """``conv2d(x, weight, bias)``; ``options`` are stride, padding, dilation and groups."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Tensor:
        stride, padding, dilation, groups = options
        return aten.convolution(x, weight, bias, stride, padding, dilation, False, [0, 0], groups)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.options = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        asked = tuple(ctx.needs_input_grad[:3])
        grads = iter(_ConvolutionBackward.apply(grad, x, weight, ctx.options, asked))
        return *(next(grads) if want else None for want in asked), None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Any:
        clients, (*others, groups) = info.batch_size, options
        joined = None if bias is None else _joined(bias, in_dims[2], clients)
        images, weights = _last(x, in_dims[0], clients), _joined(weight, in_dims[1], clients)
        result = _Convolution.apply(images, weights, joined, (*others, clients * groups))
        return _apart(result, clients), 1


class _ConvolutionBackward(torch.autograd.Function):
    """Those gradients of a convolution, of its input, weight and bias, that are ``asked`` for."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, options: Any, asked: Any) -> Any:
        stride, padding, dilation, groups = options
        sizes = [weight.shape[0]] if asked[2] else None
        grads = aten.convolution_backward(
            grad, x, weight, sizes, stride, padding, dilation, False, [0, 0], groups, asked
        )
        return tuple(value for value, want in zip(grads, asked, strict=True) if want)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.options, ctx.asked = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients are linear in what came back, and in the weight and the input that the other is not for."""
        grad, x, weight = ctx.saved_tensors
        given = iter(grads)
        by_x, by_weight, by_bias = (next(given) if want else None for want in ctx.asked)
        of_grad: Any = 0.0
        of_x = of_weight = None
        if by_x is not None:
            of_grad = of_grad + _Convolution.apply(by_x, weight, None, ctx.options)
            (of_weight,) = _ConvolutionBackward.apply(grad, by_x, weight, ctx.options, (False, True, False))
        if by_weight is not None:
            of_grad = of_grad + _Convolution.apply(x, by_weight, None, ctx.options)
            (of_x,) = _ConvolutionBackward.apply(grad, x, by_weight, ctx.options, (True, False, False))
        if by_bias is not None:
            of_grad = of_grad + by_bias.view(1, -1, 1, 1)
        return of_grad, of_x, of_weight, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, weight: Tensor, options: Any, asked: Any) -> Any:
        clients, (*others, groups) = info.batch_size, options
        images = (_last(value, dim, clients) for value, dim in zip((grad, x), in_dims, strict=False))
        grads = iter(
            _ConvolutionBackward.apply(
                *images, _joined(weight, in_dims[2], clients), (*others, clients * groups), asked
            )
        )
        apart = [
            (_apart(next(grads), clients), 1) if i == 0 else (next(grads).unflatten(0, (clients, -1)), 0)
            for i in range(3)
            if asked[i]
        ]
        return tuple(value for value, _ in apart), tuple(dim for _, dim in apart)


class _MaxPool(torch.autograd.Function):
    """Max pooling and where the largest values were."""

    @staticmethod
    def forward(x: Tensor, options: Any) -> Any:
        return aten.max_pool2d_with_indices(x, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.options = inputs
        ctx.save_for_backward(x, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, indices = ctx.saved_tensors
        return _MaxPoolBackward.apply(grad, x, indices, ctx.options), None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, options: Any) -> Any:
        clients = info.batch_size
        pooled, indices = _MaxPool.apply(_last(x, in_dims[0], clients), options)
        return (_apart(pooled, clients), _apart(indices, clients)), (1, 1)


class _MaxPoolBackward(torch.autograd.Function):
    """The gradient of max pooling."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, indices: Tensor, options: Any) -> Tensor:
        return aten.max_pool2d_with_indices_backward(grad, x, *options, indices)  # type: ignore[no-any-return]

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
        images = (_last(value, dim, clients) for value, dim in zip((grad, x, indices), in_dims, strict=False))
        return _apart(_MaxPoolBackward.apply(*images, options), clients), 1


class _AvgPool(torch.autograd.Function):
    """Mean pooling."""

    @staticmethod
    def forward(x: Tensor, options: Any) -> Tensor:
        return aten.avg_pool2d(x, *options)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.options = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _AvgPoolBackward.apply(grad, x, ctx.options), None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, options: Any) -> Any:
        clients = info.batch_size
        return _apart(_AvgPool.apply(_last(x, in_dims[0], clients), options), clients), 1


class _AvgPoolBackward(torch.autograd.Function):
    """The gradient of mean pooling; of ``x`` only the shape matters."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, options: Any) -> Tensor:
        return aten.avg_pool2d_backward(grad, x, *options)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AvgPool.apply(grad, ctx.options), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, options: Any) -> Any:
        clients = info.batch_size
        images = (_last(value, dim, clients) for value, dim in zip((grad, x), in_dims, strict=False))
        return _apart(_AvgPoolBackward.apply(*images, options), clients), 1


class _BatchNorm(torch.autograd.Function):
    """Normalisation by the batch's own statistics; returns them, the mean and one over the deviation, too."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        return aten.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.eps = inputs
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return *_BatchNormBackward.apply(grad, *ctx.saved_tensors, ctx.eps), None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        clients = info.batch_size
        joined = (_joined(value, dim, clients) for value, dim in zip((weight, bias), in_dims[1:], strict=False))
        result, *statistics = _BatchNorm.apply(_last(x, in_dims[0], clients), *joined, eps)
        return (_apart(result, clients), *(s.unflatten(0, (clients, -1)) for s in statistics)), (1, 0, 0)


class _BatchNormBackward(torch.autograd.Function):
    """The gradients of BatchNorm, of its input, weight and bias."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse_std: Tensor, eps: float) -> Any:
        asked = [True, True, True]
        return aten.native_batch_norm_backward(grad, x, weight, None, None, mean, inverse_std, True, eps, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise FederationError("Second derivatives of BatchNorm cannot be stacked: use the engine 'sequential'.")

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, *others: Any) -> Any:
        clients, (*tensors, eps) = info.batch_size, others
        images = (_last(value, dim, clients) for value, dim in zip((grad, x), in_dims, strict=False))
        joined = (_joined(value, dim, clients) for value, dim in zip(tensors, in_dims[2:], strict=False))
        result, *grads = _BatchNormBackward.apply(*images, *joined, eps)
        return (_apart(result, clients), *(g.unflatten(0, (clients, -1)) for g in grads)), (1, 0, 0)


class _GroupNorm(torch.autograd.Function):
    """Normalisation by the statistics of each sample's groups of channels; returns them, too."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Any:
        return aten.native_group_norm(x, weight, bias, *_sizes(x), groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.groups, _ = inputs
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return *_GroupNormBackward.apply(grad, *ctx.saved_tensors, ctx.groups), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Any:
        clients = info.batch_size
        joined = (_joined(value, dim, clients) for value, dim in zip((weight, bias), in_dims[1:], strict=False))
        results = _GroupNorm.apply(_last(x, in_dims[0], clients), *joined, clients * groups, eps)
        return tuple(_apart(result, clients) for result in results), (1, 1, 1)


class _GroupNormBackward(torch.autograd.Function):
    """The gradients of GroupNorm, of its input, weight and bias."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse_std: Tensor, groups: int) -> Any:
        asked = [True, True, True]
        return aten.native_group_norm_backward(grad, x, mean, inverse_std, weight, *_sizes(x), groups, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise FederationError("Second derivatives of GroupNorm cannot be stacked: use the engine 'sequential'.")

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> Any:
        clients, (*statistics, groups) = info.batch_size, others
        images = (_last(value, dim, clients) for value, dim in zip((grad, x), in_dims, strict=False))
        stack = (_beside(value, dim, clients) for value, dim in zip(statistics, in_dims[3:], strict=False))
        result, *grads = _GroupNormBackward.apply(
            *images, _joined(weight, in_dims[2], clients), *stack, clients * groups
        )
        return (_apart(result, clients), *(g.unflatten(0, (clients, -1)) for g in grads)), (1, 0, 0)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Samples, channels, and places of a channel."""
    return x.shape[0], x.shape[1], x.shape[2] * x.shape[3]


def _beside(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """A stack of (batch, groups), its clients along ``dim``, with the groups of all clients beside each other."""
    x = x.expand(clients, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.transpose(0, 1).flatten(1)
