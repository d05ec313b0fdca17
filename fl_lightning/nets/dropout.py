"""Dropout with noise as an input.

``nn.Dropout`` draws from torch's global generator, so its mask depends on how many clients were trained before and on
whether they were stacked. Here the noise is an input drawn from the client's own RNG stream, the same in every engine.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fl_lightning.errors import FederationError
from fl_lightning.nets.convert import replace_modules


class StreamDropout(nn.Module):
    """Dropout that reads its uniform noise from the buffer ``noise``.

    In training an entry is kept if ``noise >= p`` and scaled by 1 / (1 - p); in eval mode the input is unchanged. The
    buffer is not part of the ``state_dict``: pass it with ``torch.func.functional_call``, also under ``vmap``.

    Args:
        p: probability that an entry is dropped.

    Example:
        >>> drop = StreamDropout(0.5)
        >>> noise = torch.tensor([0.1, 0.5, 0.9])
        >>> torch.func.functional_call(drop, {"noise": noise}, torch.ones(3))
        tensor([0., 2., 2.])
    """

    noise: Tensor

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise FederationError(f"A dropout probability lies between 0 and 1, not at {p}.")
        self.p = p
        self.register_buffer("noise", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with dropped entries set to 0."""
        if not self.training or self.p == 0.0:
            return x
        if self.noise.shape != x.shape:
            raise FederationError(
                f"Dropout needs noise of its input's shape {tuple(x.shape)} but was given {tuple(self.noise.shape)}."
            )
        if self.p == 1.0:
            return x * 0.0
        return x * (self.noise >= self.p) / (1.0 - self.p)

    def extra_repr(self) -> str:
        """Return the probability, for ``print(net)``."""
        return f"p={self.p}"


def stream_dropout(net: nn.Module) -> nn.Module:
    """Replace every active ``nn.Dropout`` within ``net`` by a :class:`StreamDropout`, in place.

    Layers with other random draws (``nn.Dropout2d``, the dropout of ``nn.LSTM``) are kept: they cannot be stacked and
    are trained one client at a time, with a generator seeded for the client.

    Args:
        net: the network to change.

    Returns:
        The same network, or a new module if ``net`` is itself a dropout.
    """

    def make(module: nn.Module) -> nn.Module | None:
        return StreamDropout(module.p) if type(module) is nn.Dropout and module.p > 0 else None

    return replace_modules(net, make)


def noise_shapes(net: nn.Module, sample_batch: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the noise of one training forward: buffer name (``"drop.noise"``) to shape, with the batch dimension.

    Args:
        net: a network after :func:`stream_dropout`; it is unchanged.
        sample_batch: one batch of inputs, shape (B, ...).

    Raises:
        FederationError: if one dropout layer is applied several times in a forward.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    probe = copy.deepcopy(net).train()

    def record(name: str, layer: StreamDropout, x: Tensor) -> None:
        if name in shapes:
            raise FederationError(
                f"The dropout layer {name.removesuffix('.noise')} is applied several times in one forward: "
                "use a separate layer each time."
            )
        shapes[name] = tuple(x.shape)
        layer.noise = torch.ones_like(x)

    for name, module in probe.named_modules():
        if isinstance(module, StreamDropout):
            buffer = f"{name}.noise" if name else "noise"
            module.register_forward_pre_hook(lambda layer, args, buffer=buffer: record(buffer, layer, args[0]))
    with torch.no_grad():
        probe(sample_batch)
    return shapes
