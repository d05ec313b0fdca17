"""The hyperbolic tangent of a stack's images, with a compiled kernel if available."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.layout.native import kernels


@torch.library.custom_op("fl_lightning::tanh", mutates_args=())
def tanh(x: Tensor) -> Tensor:
    """Compute ``torch.tanh``; PyTorch's own takes as long as a small convolution in single precision."""
    native = kernels(x) if x.dtype == torch.float32 else None
    result = torch.empty_like(x)
    if native is None or result.stride() != x.stride():  # x is not dense
        return torch.tanh(x)
    native.tanh(x, result)
    return result


@tanh.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Tanh(torch.autograd.Function):
    """Differentiable elementwise hyperbolic tangent."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return tanh(x)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, result)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Tanh.apply(x), in_dims[0]
