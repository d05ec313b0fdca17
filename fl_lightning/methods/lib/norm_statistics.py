"""Statistics of normalisation layers: mu, sigma, beta, gamma by layer and channel.

BatchNorm keeps mu and sigma in its buffers, so they are part of a model. GroupNorm, LayerNorm and features without
normalisation have none: the owner of the samples measures them in a pass over the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fl_lightning.errors import FederationError
from fl_lightning.model import NamedModel
from fl_lightning.nets.norms import RECURRENT, norm_layers
from fl_lightning.wire import State

#: Statistics of a channel: mean and standard deviation of the input, then shift and scale.
STATISTICS = ("mu", "sigma", "beta", "gamma")
#: Number of samples in one forward pass.
SAMPLES = 128
#: Statistics by layer.
LayerStatistics = dict[str, State]


def model_statistics(net: nn.Module, state: State) -> LayerStatistics:
    """Return the statistics in a model: beta and gamma of normalisation layers, mu and sigma if stored in buffers.

    Args:
        net: the network, for its layers.
        state: the model; at least the entries of normalisation layers.

    Returns:
        By layer and statistic, float64, shape (channels,). Sigma is the square root of the running variance plus
        epsilon, which the layer divides by; negative variances, due to noise, count as 0. Layers without scale and
        shift have no beta and gamma.
    """
    found: LayerStatistics = {}
    for name, layer in norm_layers(net).items():
        prefix, own = f"{name}." if name else "", {}
        if f"{prefix}running_mean" in state:
            variance = state[f"{prefix}running_var"].double().clamp(min=0) + float(layer.eps)  # type: ignore[arg-type]
            own = {"mu": state[f"{prefix}running_mean"].double(), "sigma": variance.sqrt()}
        for statistic, entry in (("beta", "bias"), ("gamma", "weight")):
            if f"{prefix}{entry}" in state:
                own[statistic] = state[f"{prefix}{entry}"].double().flatten()
        found[name] = own
    return found


def without_running(net: nn.Module) -> list[str]:
    """Return normalisation layers without running statistics, for which mu and sigma must be measured."""
    return [name for name, layer in norm_layers(net).items() if getattr(layer, "running_mean", None) is None]


@torch.no_grad()
def measured_statistics(
    method: NamedModel,
    state: State,
    batches: Iterable[Tensor],
    layers: Sequence[str],
    of: Literal["input", "output"] = "input",
) -> LayerStatistics:
    """Measure mean and standard deviation per channel of layers' inputs or outputs, in one pass in eval mode.

    Args:
        method: the method, for its net.
        state: the model, with at least all entries of the net.
        batches: the samples' normalised inputs, each of shape (n, ...).
        layers: names of the layers.
        of: whether to measure inputs or outputs of the layers.

    Returns:
        ``mu`` and ``sigma`` by layer, float64, shape (channels,).
    """
    sums: dict[str, Tensor] = {}
    with _watched(method.functional.skeleton, layers, of, sums):
        for x in batches:
            method.call(state, x, training=False)
    found: LayerStatistics = {}
    for name in layers:
        if name not in sums:
            raise FederationError(
                f"Features of {name} cannot be measured: {type(method.net).__name__} does not call this layer."
            )
        count, total, squares = sums[name]
        mean = total / count
        found[name] = {"mu": mean, "sigma": (squares / count - mean**2).clamp(min=0).sqrt()}
    return found


@contextmanager
def _watched(net: nn.Module, layers: Sequence[str], of: str, sums: dict[str, Tensor]) -> Iterator[None]:
    """Accumulate count, sum and sum of squares by channel of the layers' values, shape (3, channels)."""

    def note(name: str, layer: nn.Module, value: Any) -> None:
        rows = _by_channel(layer, _values(value).double())
        added = torch.stack([rows.new_full(rows.shape[1:], len(rows)), rows.sum(0), (rows**2).sum(0)])
        sums[name] = sums[name] + added if name in sums else added

    hooks = []
    for name in layers:
        layer = net.get_submodule(name)
        if of == "input":
            hooks.append(layer.register_forward_pre_hook(lambda m, args, name=name: note(name, m, args[0])))
        else:
            hooks.append(layer.register_forward_hook(lambda m, args, out, name=name: note(name, m, out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _values(passed: Any) -> Tensor:
    """Return the output of a layer without padding and additional return values."""
    if isinstance(passed, PackedSequence):
        return passed.data
    if not isinstance(passed, tuple):
        value: Tensor = passed
        return value
    value, beside = _values(passed[0]), passed[1] if len(passed) > 1 else None
    # Layers that keep padding also return a mask.
    return value[beside] if isinstance(beside, Tensor) and beside.dtype == torch.bool else value


def _by_channel(layer: nn.Module, value: Tensor) -> Tensor:
    """Reshape to (n, channels); channels come last in LayerNorm, dense and recurrent layers."""
    if isinstance(layer, nn.LayerNorm):
        return value.reshape(-1, math.prod(layer.normalized_shape))
    if isinstance(layer, (nn.Linear, *RECURRENT)) or value.dim() == 2:
        return value.reshape(-1, value.shape[-1])
    return value.movedim(1, -1).reshape(-1, value.shape[1])
