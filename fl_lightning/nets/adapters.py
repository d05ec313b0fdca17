"""Pretrained nets that are trained in part: frozen layers, LoRA adapters, weights from a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import FederationError
from fl_lightning.nets.base import FedNet
from fl_lightning.nets.convert import Net, replace_modules
from fl_lightning.ranges import Count, Positive


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trained low-rank update: W x + b + (alpha / rank) up down x.

    The update is initially zero (Hu et al., LoRA, ICLR 2022, section 4.1).

    Args:
        layer: the layer; its weights are shared, not copied.
        rank: rank of the update.
        alpha: scale of the update, times the rank; None is the rank, a scale of 1.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        for frozen in layer.parameters():
            frozen.requires_grad_(False)
        self.scale = 1.0 if alpha is None else alpha / rank
        self.down = nn.Parameter(torch.empty(rank, self.in_features, dtype=layer.weight.dtype))
        self.up = nn.Parameter(torch.zeros(self.out_features, rank, dtype=layer.weight.dtype))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the update."""
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.down), self.up)

    def merged(self) -> nn.Linear:
        """Return an equivalent plain layer."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=self.weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(self.weight + self.scale * self.up @ self.down)
            if self.bias is not None:
                layer.bias.copy_(self.bias)
        return layer


def lora(
    net: Net,
    rank: int = 4,
    layers: Sequence[str] = ("*",),
    alpha: float | None = None,
    train: Sequence[str] = ("head",),
) -> Net:
    """Return a copy of a net that trains LoRA adapters and the modules in ``train`` only; entries keep their names.

    Args:
        net: any network.
        rank: rank of the adapters.
        layers: names of the linear layers that get an adapter, with wildcards: ``blocks.*.attention.qkv``.
        alpha: scale of the update, times the rank; None is the rank.
        train: names of modules that are trained in full, with wildcards; they get no adapter.

    Example:
        >>> from fl_lightning.nets import MLP
        >>> adapted = lora(MLP(4, (8,), 2), rank=2)
        >>> [name for name, p in adapted.named_parameters() if p.requires_grad]
        ['fc1.down', 'fc1.up', 'head.weight']
    """
    if rank < 1:
        raise FederationError(f"rank must be 1 or more, not {rank}.")
    net = freeze(net, train)
    chosen = {
        module: name
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and _named(name, layers) and not _named(name, train)
    }
    if not chosen:
        known = ", ".join(name for name, module in net.named_modules() if isinstance(module, nn.Linear)) or "none"
        raise FederationError(
            f"No fully connected layer is named {', '.join(layers)}: {type(net).__name__} has {known}."
        )
    adapted: Net = replace_modules(  # type: ignore[assignment]
        net,
        lambda module: LoRALinear(module, rank, alpha) if module in chosen else None,
    )
    return adapted


def adapters(net: nn.Module) -> list[str]:
    """Return the names of a net's adapter entries, for example for ``FedPer(net, personal=adapters(net))``.

    Example:
        >>> from fl_lightning.nets import MLP
        >>> adapters(lora(MLP(4, (8,), 2), rank=2))
        ['fc1.down', 'fc1.up']
    """
    found = [name for name, module in net.named_modules() if isinstance(module, LoRALinear)]
    return [f"{name}.{part}".removeprefix(".") for name in found for part in ("down", "up")]


def freeze(net: Net, train: Sequence[str] = ("head",)) -> Net:
    """Return a copy of a net that trains the named modules only.

    Args:
        net: any network.
        train: names of modules, with wildcards; an empty list trains nothing.
    """
    net = copy.deepcopy(net).requires_grad_(False)
    for pattern in train:
        modules = [module for name, module in net.named_modules() if name and _named(name, [pattern])]
        if not modules and pattern != "head":
            raise FederationError(f"{type(net).__name__} has no module {pattern}.")
        for module in modules:
            module.requires_grad_(True)
    return net


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def load_weights(net: Net, path: str | Path, strict: bool = False) -> Net:
    """Load a net's weights from a torch or safetensors file, in place.

    For a Lightning checkpoint its ``state_dict`` is used; prefixes such as ``net.`` are stripped.

    Args:
        net: any network.
        path: the file.
        strict: whether every entry must be found; otherwise entries that are missing or differ in shape are kept.
    """
    found = _read(Path(path))
    own = net.state_dict()
    for prefix in ("", "net.", "model.", "module."):
        fitting = {n: found[prefix + n] for n in own if prefix + n in found and found[prefix + n].shape == own[n].shape}
        if fitting:
            break
    missing = sorted(own.keys() - fitting.keys())
    if not fitting or (strict and missing):
        said = f"lacks {missing[0]}" if fitting else "has none of its entries in the same shape"
        raise FederationError(f"{path} does not fit {type(net).__name__}: it {said}.")
    net.load_state_dict(fitting, strict=False)
    return net


def _read(path: Path) -> Mapping[str, Tensor]:
    if not path.exists():
        raise FederationError(f"There is no file {path}.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FederationError(f"{path} has no weights that can be loaded safely ({type(error).__name__}).") from error
    state: Mapping[str, Tensor] = found.get("state_dict", found)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


class LoRA(FedNet):
    """A net with LoRA adapters that the command line and checkpoints can rebuild; see :func:`lora`.

    Args:
        net: the network.
        rank: rank of the adapters.
        layers: names of the linear layers that get an adapter, with wildcards.
        alpha: scale of the update, times the rank; None is the rank.
        train: names of modules that are trained in full.
        weights: a file with the net's pretrained weights.

    Example:
        >>> from fl_lightning.nets import MLP
        >>> LoRA(MLP(4, (8,), 2), rank=2).spec["init_args"]["net"]["class_path"]
        'fl_lightning.nets.MLP'
    """

    def __init__(
        self,
        net: FedNet,
        rank: Count = 4,
        layers: Sequence[str] = ("*",),
        alpha: Positive | None = None,
        train: Sequence[str] = ("head",),
        weights: str | None = None,
    ) -> None:
        super().__init__()
        base = FedNet.from_spec(net) if isinstance(net, Mapping) else net
        if weights is not None:
            base = load_weights(copy.deepcopy(base), weights)
        noted: dict[str, Any] = {"rank": rank, "layers": list(layers), "alpha": alpha, "train": list(train)}
        # The file is not needed to rebuild the net, because checkpoints contain the weights.
        self._noted = {"net": base.spec if isinstance(base, FedNet) else None, **noted}
        self.net = lora(base, rank, layers, alpha, train)

    @property
    def spec(self) -> dict[str, Any]:
        """Class path and arguments as plain values, including those of the inner net."""
        if self._noted["net"] is None:
            raise FederationError("The net within LoRA is not a FedNet and cannot be described by plain values.")
        return {"class_path": "fl_lightning.nets.LoRA", "init_args": copy.deepcopy(self._noted)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the net."""
        output: Tensor = self.net(x)
        return output
