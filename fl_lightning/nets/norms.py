"""Normalisation layers of a net, and their insertion into nets without any."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence

from fl_lightning.errors import FederationError

#: Layers that subtract a mean and divide by a standard deviation.
NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm)
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT: tuple[type[nn.Module], ...] = (nn.LSTM, nn.GRU, nn.RNN)


def norm_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Return the net's normalisation layers by name.

    Example:
        >>> from fl_lightning.nets import LeNetBN
        >>> list(norm_layers(LeNetBN()))
        ['bn1', 'bn2']
    """
    return {name: module for name, module in net.named_modules() if isinstance(module, NORMS)}


def feature_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Return layers that compute features: convolutions and recurrent layers, else all linear layers but the last.

    Example:
        >>> from fl_lightning.nets import MLP, LeNet5
        >>> list(feature_layers(LeNet5())), list(feature_layers(MLP()))
        (['conv1', 'conv2'], ['fc1'])
    """
    modules: dict[str, nn.Module] = dict(net.named_modules())
    found = {name: module for name, module in modules.items() if isinstance(module, (*CONVOLUTIONS, *RECURRENT))}
    dense = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    return found or {name: modules[name] for name in dense[:-1]}


def add_norms(net: nn.Module) -> nn.Module:
    """Return a copy of the net with normalisation directly after each of its feature layers.

    BatchNorm follows convolutions and linear layers, LayerNorm recurrent ones. The new layer is a submodule ``norm`` of
    the layer that it follows, so all entries keep their names.

    Example:
        >>> from fl_lightning.nets import MLP
        >>> [name for name, _ in add_norms(MLP()).named_parameters()]
        ['fc1.weight', 'fc1.norm.weight', 'fc1.norm.bias', 'head.weight']
    """
    net = copy.deepcopy(net)
    layers = feature_layers(net)
    if not layers:
        raise FederationError(
            f"{type(net).__name__} has no layer to normalise: add_norm needs a convolution, a recurrent "
            "or a hidden fully connected layer."
        )
    for layer in layers.values():
        layer.add_module("norm", _norm_for(layer).to(next(layer.parameters())))
        layer.register_forward_hook(_normalise)
    return net


def _norm_for(layer: Any) -> nn.Module:
    if isinstance(layer, RECURRENT):
        directions = 2 if layer.bidirectional else 1
        return nn.LayerNorm(int(layer.proj_size or layer.hidden_size) * directions)  # type: ignore[arg-type]
    if isinstance(layer, nn.Linear):
        return nn.BatchNorm1d(layer.out_features)
    kind = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
    return next(norm for conv, norm in kind.items() if isinstance(layer, conv))(layer.out_channels)


def _normalise(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """Normalise a layer's output; recurrent layers also return their last state."""
    norm: Any = layer.norm
    if isinstance(output, PackedSequence):
        return output._replace(data=norm(output.data))
    return (_normalise(layer, inputs, output[0]), *output[1:]) if isinstance(output, tuple) else norm(output)
