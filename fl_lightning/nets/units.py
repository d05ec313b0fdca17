"""Hidden units that may be permuted: the tensors that contain them, and along which dimension.

The units of a hidden layer can be permuted without changing the function of a net, if all tensors that refer to them
are permuted alike: the rows of the layers that produce them, their normalisation, and the columns of the layers that
consume them. A net declares its units in ``FedNet.units``; those of plain chains of layers and of torchvision's blocks
are derived (:mod:`fl_lightning.nets.derive`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.errors import FederationError
from fl_lightning.nets.norms import CONVOLUTIONS, RECURRENT

#: Role of an entry: it produces and describes the units (own), belongs to them without describing them (state), or
#: consumes them (use).
Role = Literal["own", "state", "use"]
#: Rows per unit of a recurrent layer.
GATES: dict[type[nn.Module], int] = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


@dataclass(frozen=True)
class Axis:
    """Position of units in one entry: unit u is at offset + (g * width + u) * inner + r for g < outer, r < inner.

    Args:
        entry: name of the parameter or buffer.
        dim: dimension of the units.
        role: role of the entry.
        outer: number of repetitions of all units, for example once per gate of an LSTM.
        inner: consecutive positions of each unit, for example height times width of a flattened feature map.
        offset: position of the first unit, if other units come before.
    """

    entry: str
    dim: int
    role: Role
    outer: int = 1
    inner: int = 1
    offset: int = 0

    def positions(self, width: int) -> Tensor:
        """Return the positions of each of ``width`` units, shape (width, outer * inner)."""
        whole = torch.arange(self.outer * width * self.inner).view(self.outer, width, self.inner)
        return self.offset + whole.transpose(0, 1).reshape(width, -1)


@dataclass(frozen=True)
class Units:
    """Units that may be permuted among each other.

    Args:
        name: their name in messages.
        width: their number.
        axes: their positions in all entries.
    """

    name: str
    width: int
    axes: tuple[Axis, ...]

    def describe(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return one row per unit with all values of its own entries, float64, shape (width, numbers)."""
        rows = []
        for axis in self.axes:
            if axis.role == "own" and axis.entry in state:
                value = state[axis.entry].double().movedim(axis.dim, 0)
                rows.append(value[axis.positions(self.width).flatten().to(value.device)].reshape(self.width, -1))
        return torch.cat(rows, 1)

    def placed(self, state: Mapping[str, Tensor], place: Tensor, width: int | None = None) -> dict[str, Tensor]:
        """Return the state with unit u moved to place[u] among ``width`` places; unused places are zero."""
        width, moved = self.width if width is None else width, dict(state)
        for axis in self.axes:
            if axis.entry in state:
                value = moved[axis.entry]
                source = axis.positions(self.width).flatten().to(value.device)
                target = axis.positions(width)[place.cpu()].flatten().to(value.device)
                shape = list(value.shape)
                shape[axis.dim] += axis.outer * axis.inner * (width - self.width)
                start = value.clone() if width == self.width else value.new_zeros(shape)
                moved[axis.entry] = start.index_copy_(axis.dim, target, value.index_select(axis.dim, source))
        return moved

    def fills(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether the units span whole dimensions, so that their number can change."""
        return all(
            axis.offset == 0 and axis.outer * axis.inner * self.width == state[axis.entry].shape[axis.dim]
            for axis in self.axes
        )


def units_between(net: nn.Module, makers: Sequence[str], readers: Sequence[str], name: str | None = None) -> Units:
    """Return the units produced by the first of ``makers``, modified by the others, and consumed by ``readers``.

    Args:
        net: the network.
        makers: names of the producing layers: a convolution or linear layer, then elementwise ones (normalisation,
            depthwise convolutions).
        readers: names of the consuming convolutions and linear layers.
        name: name of the units; None means the first maker's name.

    Example:
        >>> from fl_lightning.nets import LeNetBN
        >>> units = units_between(LeNetBN(), ["conv2", "bn2"], ["fc1"])
        >>> units.width, [(axis.entry, axis.inner) for axis in units.axes if axis.role == "use"]
        (16, [('fc1.weight', 25)])
    """
    first: Any = net.get_submodule(makers[0])
    width = int(first.weight.shape[0])
    axes = [axis for maker in makers for axis in _maker_axes(net.get_submodule(maker), maker, width)]
    for reader in readers:
        taker: Any = net.get_submodule(reader)
        inputs = int(taker.weight.shape[1])
        if inputs % width:
            raise FederationError(f"{reader} reads {inputs} inputs, which are not {width} units of {makers[0]}.")
        axes.append(Axis(f"{reader}.weight", 1, "use", inner=inputs // width))
    return Units(name or makers[0], width, tuple(axes))


def _maker_axes(layer: Any, name: str, width: int) -> list[Axis]:
    parts = [("weight", "own"), ("bias", "own"), ("running_mean", "state"), ("running_var", "state")]
    axes: list[Axis] = []
    for part, role in parts:
        value = getattr(layer, part, None)
        if value is not None:
            inner = value.shape[0] // width if value.dim() == 1 else 1
            axes.append(Axis(f"{name}.{part}", 0, role, inner=inner))  # type: ignore[arg-type]
    return axes


def recurrent_units(net: nn.Module, layer: str, readers: Sequence[str], norms: Sequence[str] = ()) -> list[Units]:
    """Return the units of an LSTM, GRU or RNN, one set per layer and direction.

    A unit owns its rows in all gates. Recurrent weights belong to it but do not describe it, because their columns are
    hidden units too, whose order is unknown until the units are matched.

    Args:
        net: the network.
        layer: name of the recurrent layer.
        readers: names of the linear layers that consume its outputs, with both directions concatenated.
        norms: names of LayerNorms on its outputs.
    """
    module: Any = net.get_submodule(layer)
    if module.proj_size:
        raise FederationError(f"Units of {layer} cannot be identified, because it projects them.")
    gates = next(number for kind, number in GATES.items() if isinstance(module, kind))
    width, directions, found = int(module.hidden_size), 2 if module.bidirectional else 1, []
    suffixes = ["", "_reverse"][:directions]
    for depth in range(module.num_layers):
        for direction, suffix in enumerate(suffixes):
            end, offset = f"_l{depth}{suffix}", direction * width
            own = ["weight_ih", *(["bias_ih", "bias_hh"] if module.bias else [])]
            axes = [Axis(f"{layer}.{part}{end}", 0, "own", outer=gates) for part in own]
            axes += [Axis(f"{layer}.weight_hh{end}", 0, "state", outer=gates)]
            axes += [Axis(f"{layer}.weight_hh{end}", 1, "use")]
            if depth + 1 < module.num_layers:
                above = [f"{layer}.weight_ih_l{depth + 1}{other}" for other in suffixes]
            else:
                above = [f"{reader}.weight" for reader in readers]
                axes += [
                    Axis(f"{norm}.{part}", 0, "own", offset=offset) for norm in norms for part in ("weight", "bias")
                ]
            axes += [Axis(entry, 1, "use", offset=offset) for entry in above]
            found.append(Units(f"{layer}{end}", width, tuple(axes)))
    return found


@torch.no_grad()
def resize(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the net's layers the shapes and values of the tensors in ``state``."""
    for path, layer in net.named_modules():
        slots: Any = layer
        for name, old in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            new = state.get(f"{path}.{name}" if path else name)
            if new is not None and new.shape != old.shape:
                old.data = new.detach().clone().to(old)
        weight = getattr(layer, "weight", None)
        if isinstance(layer, CONVOLUTIONS):
            if slots.groups > 1 and slots.groups == slots.out_channels:
                slots.groups = slots.in_channels = weight.shape[0]  # type: ignore[union-attr]
            else:
                slots.in_channels = weight.shape[1] * slots.groups  # type: ignore[union-attr]
            slots.out_channels = weight.shape[0]  # type: ignore[union-attr]
        elif isinstance(layer, nn.Linear):
            slots.out_features, slots.in_features = layer.weight.shape
        elif isinstance(layer, _NormBase) and layer.running_mean is not None:
            slots.num_features = len(layer.running_mean)
        elif (
            isinstance(layer, nn.LayerNorm)
            and weight is not None
            and math.prod(layer.normalized_shape) != weight.numel()
        ):
            slots.normalized_shape = tuple(weight.shape)
        elif isinstance(layer, RECURRENT):
            slots.hidden_size, slots.input_size = layer.weight_hh_l0.shape[1], layer.weight_ih_l0.shape[1]  # type: ignore[index]
