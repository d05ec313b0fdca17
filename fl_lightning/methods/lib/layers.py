"""Layers of a net by name, for methods that divide a net into shared and private layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from fl_lightning.engine import entries
from fl_lightning.errors import FederationError


def last_linear(net: nn.Module) -> str:
    """Return the name of the net's last fully connected layer.

    Example:
        >>> from fl_lightning.nets import MLP
        >>> last_linear(MLP())
        'head'
    """
    names: list[str] = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise FederationError(f"{type(net).__name__} has no fully connected layer: name the layers.")
    return names[-1]


def entries_of(net: nn.Module, layers: Sequence[str] | None) -> frozenset[str]:
    """Return all entries (parameters and buffers) of the named layers.

    Args:
        net: the network.
        layers: names of layers (``head``), of blocks of layers (``stage4``) or of single entries (``head.bias``); None
            means the last fully connected layer.

    Raises:
        FederationError: if the net has no layer of that name.

    Example:
        >>> from fl_lightning.nets import MLP
        >>> sorted(entries_of(MLP(bias=True), ["head"]))
        ['head.bias', 'head.weight']
    """
    names = entries(net).keys()
    chosen: set[str] = set()
    for layer in [last_linear(net)] if layers is None else layers:
        found = {name for name in names if name == layer or name.startswith(f"{layer}.")}
        if not found:
            has = ", ".join(_layers(names))
            raise FederationError(f"{type(net).__name__} has no layer {layer!r}: its layers are {has}.")
        chosen |= found
    return frozenset(chosen)


def _layers(names: Collection[str], limit: int = 40) -> list[str]:
    """Return names of the layers of entries, in order, up to a limit."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    return owners[:limit] + (["and others"] if len(owners) > limit else [])
