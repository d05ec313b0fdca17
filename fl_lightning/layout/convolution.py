"""Convolutions of a stack's clients in one call, twice differentiable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.layout import products
from fl_lightning.layout.memory import Dims, batch_last, channels_last, fold_clients, split_clients, to_chwn
from fl_lightning.layout.native import kernels

aten = torch.ops.aten


def suits_groups(weight: Tensor, groups: int) -> bool:
    """Return whether PyTorch's grouped convolutions on NHWC are faster than matrix products on CHWN.

    They are if the numbers of channels fill vector registers, and for depthwise convolutions. Inputs with one or three
    channels are images, which need no gradient, so only the number of outputs matters.
    """
    outputs, channels = weight.shape[0] // groups, weight.shape[1]
    depthwise = outputs == channels == 1
    return depthwise or (outputs % 8 == 0 and (channels % 8 == 0 or channels in (1, 3)))


def fast_in_stack(state: Mapping[str, Tensor]) -> bool:
    """Return whether a net has convolutions and all of them have fast kernels, even for a single client."""
    weights = [value for value in state.values() if value.dim() == 4]
    return bool(weights) and kernels(weights[0]) is not None and not any(suits_groups(value, 1) for value in weights)


def _images(x: Tensor, dim: int | None, clients: int, by_groups: bool) -> Tensor:
    return (channels_last if by_groups else batch_last)(x, dim, clients)


class Convolution(torch.autograd.Function):
    """Differentiable ``conv2d(x, weight, bias)``; ``options`` are stride, padding, dilation and groups."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Tensor:
        stride, padding, dilation, groups = options
        if suits_groups(weight, groups):
            images = x.contiguous(memory_format=torch.channels_last)
            return aten.convolution(images, weight, bias, stride, padding, dilation, False, [0, 0], groups)  # type: ignore[no-any-return]
        return products.convolution(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.options = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        asked = tuple(ctx.needs_input_grad[:3])
        grads = iter(ConvolutionBackward.apply(grad, x, weight, ctx.options, asked))
        return *(next(grads) if want else None for want in asked), None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Any:
        clients, (*others, groups) = info.batch_size, options
        biases = None if bias is None else fold_clients(bias, in_dims[2], clients)
        weights = fold_clients(weight, in_dims[1], clients)
        images = _images(x, in_dims[0], clients, suits_groups(weights, clients * groups))
        result = Convolution.apply(images, weights, biases, (*others, clients * groups))
        return split_clients(result, clients), 1


class ConvolutionBackward(torch.autograd.Function):
    """Gradients of a convolution with respect to input, weight and bias, as far as ``asked`` for."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, options: Any, asked: Any) -> Any:
        stride, padding, dilation, groups = options
        if suits_groups(weight, groups):
            images = (value.contiguous(memory_format=torch.channels_last) for value in (grad, x))
            sizes = [weight.shape[0]] if asked[2] else None
            grads = aten.convolution_backward(
                *images, weight, sizes, stride, padding, dilation, False, [0, 0], groups, asked
            )
            return tuple(value for value, want in zip(grads, asked, strict=True) if want)
        kernels = [products.by_input, products.by_weight]
        grads = [
            kernel(grad, x, weight, stride, padding, dilation, groups)
            for kernel, want in zip(kernels, asked, strict=False)
            if want
        ]
        return *grads, *([to_chwn(grad).flatten(1).sum(1)] if asked[2] else [])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.options, ctx.asked = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Differentiate the gradients, which are linear in ``grad``, and each linear in ``x`` or ``weight``."""
        grad, x, weight = ctx.saved_tensors
        given = iter(grads)
        by_x, by_weight, by_bias = (next(given) if want else None for want in ctx.asked)
        of_grad: Any = 0.0
        of_x = of_weight = None
        if by_x is not None:
            of_grad = of_grad + Convolution.apply(by_x, weight, None, ctx.options)
            (of_weight,) = ConvolutionBackward.apply(grad, by_x, weight, ctx.options, (False, True, False))
        if by_weight is not None:
            of_grad = of_grad + Convolution.apply(x, by_weight, None, ctx.options)
            (of_x,) = ConvolutionBackward.apply(grad, x, by_weight, ctx.options, (True, False, False))
        if by_bias is not None:
            of_grad = of_grad + by_bias.view(1, -1, 1, 1)
        return of_grad, of_x, of_weight, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Dims, grad: Tensor, x: Tensor, weight: Tensor, options: Any, asked: Any) -> Any:
        clients, (*others, groups) = info.batch_size, options
        weights = fold_clients(weight, in_dims[2], clients)
        by_groups = suits_groups(weights, clients * groups)
        images = (_images(value, dim, clients, by_groups) for value, dim in zip((grad, x), in_dims, strict=False))
        grads = iter(ConvolutionBackward.apply(*images, weights, (*others, clients * groups), asked))
        parts = [
            (split_clients(next(grads), clients), 1) if i == 0 else (next(grads).unflatten(0, (clients, -1)), 0)
            for i in range(3)
            if asked[i]
        ]
        return tuple(value for value, _ in parts), tuple(dim for _, dim in parts)
