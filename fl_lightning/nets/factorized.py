"""Factorised layers: weights that are masked sums of rank-one factors.

W = wa diag(r * mask) wb, Eq. (2)-(4) of WAFFLe (Hao et al.): the columns of ``wa`` and the rows of ``wb`` are a
dictionary of F factors, ``r`` contains their strengths and ``mask`` selects them, possibly in part. The layers are
independent of federated methods: all factors are used unless ``mask`` is written to.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import FederationError

#: Default number of factors of a layer, as a share of the smaller side of its weight matrix.
SHARE = 0.6


class FactorizedLayer(nn.Module):
    """Base of the factorised layers.

    Attributes:
        wa: left factors, shape (out, F).
        wb: right factors, shape (F, in) or (F, in / groups, height, width).
        r: strengths, shape (F,).
        mask: share of each factor that is used, a buffer of ones, shape (F,).
        bias: shape (out,), or None.

    Args:
        out: number of outputs.
        right: shape of a right factor.
        factors: number of factors F.
        bias: whether outputs have a bias.
        effective: average number of active factors, for the initial scale; None means all.
    """

    mask: Tensor
    bias: nn.Parameter | None

    def __init__(self, out: int, right: tuple[int, ...], factors: int, bias: bool, effective: float | None) -> None:
        super().__init__()
        if factors < 1:
            raise FederationError(f"A factorised layer needs at least one factor, not {factors}.")
        self.effective = float(factors) if effective is None else effective
        self.wa = nn.Parameter(torch.empty(out, factors))
        self.wb = nn.Parameter(torch.empty(factors, *right))
        self.r = nn.Parameter(torch.ones(factors))
        self.register_buffer("mask", torch.ones(factors))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out)) if bias else None)
        self.reset_parameters()

    @property
    def factors(self) -> int:
        """Number of factors F."""
        return len(self.r)

    @property
    def fan_in(self) -> int:
        """Inputs of one output."""
        return self.wb[0].numel()

    @property
    def scores(self) -> Tensor:
        """Weight of each factor, r * mask, Eq. (4), shape (F,)."""
        return self.r * self.mask

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The equivalent dense weight."""

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new factors, with r = 1 and no bias.

        wb ~ N(0, 2 / fan_in) and wa ~ N(0, 1 / effective), so an entry of W has variance 2 / fan_in (Kaiming, for ReLU)
        when ``effective`` factors are active.
        """
        self.wb.normal_(0.0, math.sqrt(2 / self.fan_in), generator=generator)
        self.wa.normal_(0.0, math.sqrt(1 / self.effective), generator=generator)
        self.r.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def grow(self, extra: int, generator: torch.Generator | None = None) -> None:
        """Append factors with the initial distribution; masked by 0 they do not change the layer's output."""
        if extra < 0:
            raise FederationError(f"A layer grows by 0 or more factors, not by {extra}.")
        wb = self.wb.new_empty(extra, *self.wb.shape[1:]).normal_(0.0, math.sqrt(2 / self.fan_in), generator=generator)
        wa = self.wa.new_empty(len(self.wa), extra).normal_(0.0, math.sqrt(1 / self.effective), generator=generator)
        self.wb, self.wa = nn.Parameter(torch.cat((self.wb, wb))), nn.Parameter(torch.cat((self.wa, wa), 1))
        self.r = nn.Parameter(torch.cat((self.r, self.r.new_ones(extra))))
        self.mask = torch.cat((self.mask, self.mask.new_ones(extra)))


class FactorizedLinear(FactorizedLayer):
    """``nn.Linear`` with the weight wa diag(r * mask) wb.

    The weight is never built: two thin products take a quarter of the time.

    Args:
        in_features: size of an input.
        out_features: size of an output.
        factors: number of factors F.
        bias: whether outputs have a bias.
        effective: average number of active factors, for the initial scale; None means all.

    Example:
        >>> layer = FactorizedLinear(784, 200, factors=120)
        >>> layer(torch.zeros(3, 784)).shape, sum(p.numel() for p in layer.parameters())
        (torch.Size([3, 200]), 118200)
    """

    def __init__(
        self, in_features: int, out_features: int, factors: int, bias: bool = False, effective: float | None = None
    ) -> None:
        super().__init__(out_features, (in_features,), factors, bias, effective)

    @property
    def weight(self) -> Tensor:
        """The dense weight, shape (out, in)."""
        return (self.wa * self.scores) @ self.wb

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs of shape (..., out) for inputs of shape (..., in)."""
        return F.linear(F.linear(x, self.wb) * self.scores, self.wa, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes, for ``print(net)``."""
        return f"{self.fan_in}, {len(self.wa)}, factors={self.factors}, bias={self.bias is not None}"


Pair = tuple[int, int]


class FactorizedConv2d(FactorizedLayer):
    """``nn.Conv2d`` whose kernel, as a matrix of shape (out, in * height * width), is wa diag(r * mask) wb.

    The kernel is built in the forward pass: its cost is small compared to an image's pixels, and two convolutions
    instead take up to twice as long.

    Args:
        in_channels: channels of an input.
        out_channels: channels of an output.
        kernel_size: height and width of the kernel.
        factors: number of factors F.
        stride: as in ``nn.Conv2d``.
        padding: zeros added around the input, as in ``nn.Conv2d``.
        dilation: as in ``nn.Conv2d``.
        groups: as in ``nn.Conv2d``.
        bias: whether outputs have a bias.
        effective: average number of active factors, for the initial scale; None means all.

    Example:
        >>> layer = FactorizedConv2d(16, 32, kernel_size=5, factors=25, padding=2)
        >>> layer(torch.zeros(3, 16, 14, 14)).shape
        torch.Size([3, 32, 14, 14])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        factors: int,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = False,
        effective: float | None = None,
    ) -> None:
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        super().__init__(out_channels, (in_channels // groups, height, width), factors, bias, effective)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    @property
    def weight(self) -> Tensor:
        """The kernel, shape (out, in / groups, height, width), channels-last in memory."""
        _, channels, height, width = self.wb.shape
        flat = (self.wa * self.scores) @ self.wb.permute(0, 2, 3, 1).flatten(1)
        return flat.view(-1, height, width, channels).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs of shape (B, out, ...) for inputs of shape (B, in, height, width)."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """Return the sizes, for ``print(net)``."""
        kernel = tuple(self.wb.shape[1:])
        sizes = f"{kernel}, {len(self.wa)}, factors={self.factors}, stride={self.stride}, padding={self.padding}"
        return f"{sizes}, bias={self.bias is not None}"


def factorized_layers(net: nn.Module) -> dict[str, FactorizedLayer]:
    """Return the factorised layers within a net by name."""
    return {name: layer for name, layer in net.named_modules() if isinstance(layer, FactorizedLayer)}


def default_factors(net: nn.Module) -> dict[str, int]:
    """Return numbers of factors for all linear and convolutional layers except the last linear one.

    The number is three fifths of the smaller side of a layer's weight matrix, as in the papers for MNIST's hidden layer
    (120 of 200) and for CIFAR-10's convolutions (10 of 16).

    Example:
        >>> default_factors(nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)))
        {'0': 120}
    """
    usable = {name: layer for name, layer in net.named_modules() if type(layer) in (nn.Linear, nn.Conv2d)}
    dense = [name for name, layer in usable.items() if isinstance(layer, nn.Linear)]
    times = Counter(id(layer) for layer in net.modules() for layer in layer.children())
    return {
        name: max(1, round(SHARE * min(layer.weight.flatten(1).shape)))
        for name, layer in usable.items()
        if name not in dense[-1:] and times[id(layer)] == 1 and getattr(layer, "padding_mode", "zeros") == "zeros"
    }


def factorize(
    net: nn.Module,
    factors: Mapping[str, int],
    effective: Mapping[str, float] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Return a copy of a net with the named layers factorised and freshly drawn factors.

    Args:
        net: any network; it is unchanged. A named layer that is factorised already is kept, and grown if it has fewer
            factors, so that a grown dictionary can be rebuilt from its checkpoint.
        factors: number of factors of each layer, by the layer's name.
        effective: average number of active factors of a layer, by its name; by default all.
        generator: generator of the factors; None means torch's global generator.

    Raises:
        FederationError: if a name is not a ``Linear`` or ``Conv2d`` layer of the net, or the layer already has more
            factors.

    Example:
        >>> net = factorize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), {"0": 3})
        >>> net[0]
        FactorizedLinear(4, 8, factors=3, bias=True)
    """
    net = copy.deepcopy(net)
    for name, number in factors.items():
        layer = _named(net, name)
        if isinstance(layer, FactorizedLayer):
            if layer.factors > number:
                raise FederationError(f"Layer {name!r} is factorised already, into {layer.factors} factors.")
            if layer.factors < number:
                layer.grow(number - layer.factors, generator)
            continue
        with torch.device("cpu"):  # so that draws do not depend on the device
            made = _convert(name, layer, number, (effective or {}).get(name))
        made.reset_parameters(generator)
        if made.bias is not None:
            made.bias.data.copy_(layer.bias.data)  # type: ignore[arg-type]
        parent, _, child = name.rpartition(".")
        net.get_submodule(parent).add_module(child, made.to(_of(layer)))
    return net


def _named(net: nn.Module, name: str) -> nn.Module:
    layers: dict[str, nn.Module] = dict(net.named_modules(remove_duplicate=False))
    if name not in layers:
        usable = [path for path, m in layers.items() if isinstance(m, nn.Linear | nn.Conv2d | FactorizedLayer)]
        raise FederationError(
            f"{type(net).__name__} has no layer {name!r} to factorise: choose among {', '.join(usable) or 'none'}."
        )
    layer: nn.Module = layers[name]
    if sum(module is layer for module in layers.values()) > 1:
        raise FederationError(f"Layer {name!r} is used under several names and cannot be factorised.")
    return layer


def _convert(name: str, layer: nn.Module, factors: int, effective: float | None) -> FactorizedLayer:
    if type(layer) is nn.Linear:
        return FactorizedLinear(layer.in_features, layer.out_features, factors, layer.bias is not None, effective)
    if type(layer) is not nn.Conv2d:
        raise FederationError(f"Layer {name!r} is a {type(layer).__name__}: only Linear and Conv2d can be factorised.")
    if layer.padding_mode != "zeros":
        raise FederationError(f"Layer {name!r} pads with {layer.padding_mode!r}: only zeros can be factorised.")
    kernel: Pair = layer.kernel_size  # type: ignore[assignment]
    return FactorizedConv2d(
        layer.in_channels,
        layer.out_channels,
        kernel,
        factors,
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        layer.groups,
        layer.bias is not None,
        effective,
    )


def _of(layer: nn.Module) -> Tensor:
    """Return a tensor with the layer's device and precision."""
    return next(layer.parameters()).detach()
