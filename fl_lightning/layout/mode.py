"""The mode that replaces a net's calls by versions for a whole stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from fl_lightning.layout.activation import Tanh
from fl_lightning.layout.convolution import Convolution
from fl_lightning.layout.normalisation import BatchNorm, GroupNorm
from fl_lightning.layout.pooling import MaxPool, MeanPool
from fl_lightning.process import wanted


class StackLayout(TorchFunctionMode):
    """Runs convolutions, pooling and normalisation of mapped images for all clients at once.

    It also keeps recurrent layers mappable, which vmap would otherwise run client by client.

    Under autocast nothing is replaced, because PyTorch chooses the precision of a call by its function.

    Args:
        mapped: whether to replace calls under vmap only; otherwise a single net is treated as a stack of one.
    """

    def __init__(self, mapped: bool = True) -> None:
        super().__init__()
        self.mapped = mapped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace calls that have a faster version."""
        kwargs = kwargs or {}
        if func is torch.lstm and self.mapped:
            return _lstm(func, *args, **kwargs)
        better = BETTER.get(func)
        image = args[0] if args else kwargs.get("input")
        if better is None or not isinstance(image, Tensor) or image.dim() != 4:
            return func(*args, **kwargs)
        if self.mapped and not is_functorch_wrapped_tensor(image):
            return func(*args, **kwargs)
        if torch.is_autocast_enabled(image.device.type):
            return func(*args, **kwargs)
        return better(func, *args, **kwargs)


def _lstm(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Disable oneDNN, whose LSTM cannot be mapped."""
    if not wanted("mkldnn"):
        return func(*args, **kwargs)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._set_mkldnn_enabled(before)


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
    return Convolution.apply(input, weight, bias, (_pair(stride), _pair(padding), _pair(dilation), groups))  # type: ignore[no-any-return]


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
    return MaxPool.apply(input, options)[0]  # type: ignore[no-any-return]


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
    return MeanPool.apply(input, options)  # type: ignore[no-any-return]


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
    if not training and running_mean is not None and running_var is not None:
        return _scaled(input, running_mean, running_var, weight, bias, eps)
    if not training or weight is None or bias is None:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    result, mean, inverse_std = BatchNorm.apply(input, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        variance = (inverse_std.detach().pow(-2) - eps) * (count / (count - 1))
        running_mean.mul_(1 - momentum).add_(mean.detach() * momentum)
        running_var.mul_(1 - momentum).add_(variance * momentum)
    return result  # type: ignore[no-any-return]


def _scaled(
    input: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise by given statistics with one factor and one summand per channel, in any layout."""
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return torch.addcmul(shift[:, None, None], input, scale[:, None, None])


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
    return GroupNorm.apply(input, weight, bias, num_groups, eps)[0]  # type: ignore[no-any-return]


def _tanh(func: Callable[..., Tensor], input: Tensor) -> Tensor:
    return Tanh.apply(input)  # type: ignore[no-any-return]


BETTER: dict[Any, Callable[..., Tensor]] = {
    torch.conv2d: _conv2d,
    torch.max_pool2d: _max_pool2d,
    F.max_pool2d: _max_pool2d,
    F.avg_pool2d: _avg_pool2d,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    torch.tanh: _tanh,
    Tensor.tanh: _tanh,
}
