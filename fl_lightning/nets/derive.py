"""Derivation of hidden units for nets that do not declare them: chains of layers, and torchvision's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import FederationError
from fl_lightning.nets.norms import CONVOLUTIONS, NORMS
from fl_lightning.nets.units import Units, units_between


def derived_units(net: nn.Module, x: Tensor) -> list[Units]:
    """Return the units of a net that does not declare them: those inside its blocks if it has any, else of a chain."""
    return block_units(net) or chain_units(net, x)


def block_units(net: nn.Module) -> list[Units]:
    """Return the channels inside torchvision's basic, inverted residual and dense blocks; others are fixed.

    Example:
        >>> from torchvision.models.resnet import BasicBlock
        >>> [units.name for units in block_units(nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4)))]
        ['0.conv1', '1.conv1']
    """
    from torchvision.models.densenet import _DenseLayer
    from torchvision.models.mobilenetv2 import InvertedResidual
    from torchvision.models.resnet import BasicBlock

    found: list[Units] = []
    for name, block in net.named_modules():
        prefix, producers = f"{name}." if name else "", ["conv1", "bn1"]
        if isinstance(block, BasicBlock):
            consumer = "conv2"
        elif isinstance(block, _DenseLayer):
            producers, consumer = ["conv1", "norm2"], "conv2"
        elif isinstance(block, InvertedResidual) and len(block.conv) == 4:  # expansion, depthwise, projection, norm
            producers, consumer = ["conv.0.0", "conv.0.1", "conv.1.0", "conv.1.1"], "conv.2"
        else:
            continue
        found.append(units_between(net, [prefix + producer for producer in producers], [prefix + consumer]))
    return found


def chain_units(net: nn.Module, x: Tensor) -> list[Units]:
    """Return the units of a net whose layers form a chain, in the order in which they run on inputs ``x``.

    Raises:
        FederationError: if the layers cannot form a chain; :func:`check_units` tests whether they do.
    """
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda m, args, name=name: called.append(name))
        for name, module in net.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    mode = net.training
    try:
        net.eval()
        with torch.no_grad():
            net(x)
    finally:
        net.train(mode)
        for hook in hooks:
            hook.remove()
    found: list[Units] = []
    producers: list[str] = []
    for name in called:
        layer: Any = net.get_submodule(name)
        if not isinstance(layer, (nn.Linear, *CONVOLUTIONS, *NORMS)):
            raise FederationError(_cannot(net))
        if isinstance(layer, NORMS) or getattr(layer, "groups", 1) > 1:
            producers += [name] if producers else []
            continue
        if producers:
            try:
                found.append(units_between(net, producers, [name]))
            except FederationError as error:  # its inputs are not the outputs of the layer before it
                raise FederationError(_cannot(net)) from error
        producers = [name]
    return found


def check_units(net: nn.Module, call: Any, state: Mapping[str, Tensor], x: Tensor, units: Sequence[Units]) -> None:
    """Reject wrong units: permute all of them and check that the net still computes the same.

    Args:
        net: the network, for its name.
        call: ``call(state, x)`` computes the net's outputs in eval mode.
        state: the net's entries.
        x: some inputs.
        units: the units.
    """
    generator = torch.Generator().manual_seed(0)

    def varied(value: Tensor) -> Tensor:
        """Add noise, since many entries are initially equal, such as those of normalisation layers.

        The noise of matrices is centred at 0; otherwise features grow from layer to layer until biases are lost.
        """
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5 * (value.dim() > 1)
        return value.double() + 0.1 * noise.to(value.device)

    before = {name: varied(value) if value.is_floating_point() else value for name, value in state.items()}
    after, x = before, x.double() if x.is_floating_point() else x
    for group in units:
        after = group.placed(after, torch.randperm(group.width, generator=generator))
    with torch.no_grad():
        expected, found = call(before, x), call(after, x)
    if not torch.allclose(expected, found, rtol=0.0, atol=1e-9 * float(expected.abs().max())):
        raise FederationError(_cannot(net))


def _cannot(net: nn.Module) -> str:
    return (
        f"The hidden units of {type(net).__name__} that may be permuted cannot be derived: declare them in its method "
        "units(), as fl_lightning.nets.FedNet says."
    )
