"""Imprint layers of a malicious server, which sort the samples of a batch into bins (Fowl et al., 2022).

Functions of modules and tensors. All rows of the crafted dense layer measure the same quantity, such as the brightness
of an image, with different thresholds between the bins. A row is active for every sample above its threshold, so the
difference of the gradients of neighbouring rows is due to the samples between their thresholds: for a single sample,
the ratio of weight and bias gradients is the sample.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.privacy.gradients import Loss
from fl_lightning.wire import State


def imprint(size: int, thresholds: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a layer that measures the mean of its inputs, followed by a ReLU.

    Args:
        size: of an input.
        thresholds: ascending thresholds, such as quantiles of the mean on the server's own data, shape (bins,).
        scale: scale of the layer.

    Returns:
        Weight of shape (bins, size) and bias of shape (bins,).

    Example:
        >>> weight, bias = imprint(2, torch.tensor([0.0, 1.0]))
        >>> weight @ torch.tensor([1.0, 0.0]) + bias
        tensor([ 0.5000, -0.5000])
    """
    return torch.full((len(thresholds), size), scale / size).to(thresholds), -scale * thresholds


def read(weight: Tensor, bias: Tensor) -> Tensor:
    """Read the samples that are alone in a bin from the layer's gradients or changes; others are mixtures.

    The following layer must weight all rows equally, as a layer with equal columns does.

    Args:
        weight: shape (bins, size).
        bias: shape (bins,).

    Returns:
        Shape (bins with a sample, size).
    """
    own = torch.cat((weight[:-1] - weight[1:], weight[-1:])), torch.cat((bias[:-1] - bias[1:], bias[-1:]))
    filled = own[1].abs() > 1e-6 * own[1].abs().max().clamp(min=1e-30)
    return own[0][filled] / own[1][filled][:, None]


def gaussian_thresholds(inputs: Tensor, bins: int) -> Tensor:
    """Return thresholds with equally likely bins, for Gaussian means of inputs.

    Args:
        inputs: the server's own samples as inputs of the net, shape (n, ...).
        bins: number of bins.
    """
    means = inputs.flatten(1).double().mean(1)
    places = torch.arange(1, bins + 1, dtype=torch.float64, device=means.device) / (bins + 1)
    spread = means.std(correction=0).clamp(min=1e-12)
    quantiles: Tensor = torch.special.ndtri(places)
    return (means.mean() + spread * quantiles).to(inputs.dtype)


class Imprint(nn.Module):
    """An imprint layer in front of any net, which hardly changes the net's inputs.

    Args:
        size: of an input.
        thresholds: ascending thresholds, shape (bins,).
        strength: scale of the added values.

    Example:
        >>> front = Imprint(4, torch.tensor([0.2, 0.5]))
        >>> front(torch.ones(3, 1, 2, 2)).shape
        torch.Size([3, 1, 2, 2])
    """

    mix: Tensor

    def __init__(self, size: int, thresholds: Tensor, strength: float = 1e-2) -> None:
        super().__init__()
        weight, bias = imprint(size, thresholds)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        # Equal rows weight all bins equally; fixed signs ensure that nets respond to them.
        signs = torch.where(torch.arange(size, device=thresholds.device) * 7 % 5 < 2, -1.0, 1.0)
        self.register_buffer("mix", (strength * signs).to(thresholds))

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs plus a small multiple of the number of bins they fill."""
        filled: Tensor = F.linear(x.flatten(1), self.weight, self.bias).relu().sum(1, keepdim=True) / len(self.bias)
        return x + (filled * self.mix).view_as(x)


def dense_layers(net: nn.Module, size: int) -> tuple[str, str] | None:
    """Return names of a first dense layer with a bias and of the next dense layer; None for other nets.

    Whether they are consecutive, with a ReLU between them, is tested by :func:`sorts`.

    Args:
        net: any net.
        size: of an input.
    """
    own = [(name, one) for name, one in net.named_modules() if list(one.parameters(recurse=False))]
    if len(own) < 2 or not all(isinstance(one, nn.Linear) for _, one in own[:2]):
        return None
    (first, before), (second, after) = own[:2]
    fits = before.in_features == size and before.bias is not None and after.in_features == before.out_features
    return (first, second) if fits else None


def crafted(state: State, layers: tuple[str, str], thresholds: Tensor) -> State:
    """Return crafted entries for the two first dense layers of a net.

    The first layer sorts samples, the second one weights all its outputs equally, by its mean column.

    Args:
        state: the net's entries.
        layers: names of the two layers.
        thresholds: one threshold per output of the first layer.
    """
    first, second = layers
    like = state[f"{first}.weight"]
    weight, bias = imprint(like.shape[1], thresholds.to(like))
    behind = state[f"{second}.weight"]
    return {
        f"{first}.weight": weight,
        f"{first}.bias": bias,
        f"{second}.weight": behind.mean(1, keepdim=True).expand_as(behind).clone(),
    }


def sorts(loss: Loss, state: State, layer: str, x: Tensor, y: Tensor) -> bool:
    """Whether a crafted net reveals single samples: the gradient of one is proportional to the sample.

    Args:
        loss: the client's objective.
        state: the crafted net.
        layer: the imprint layer.
        x: the server's own samples, shape (n, ...).
        y: their labels.
    """
    names = [f"{layer}.weight", f"{layer}.bias"]
    seen = 0
    for place in range(len(x)):
        own = {name: state[name].detach().clone().requires_grad_() for name in names}
        value = loss({**state, **own}, x[place : place + 1], y[place : place + 1])
        weight, bias = torch.autograd.grad(value, [*own.values()], allow_unused=True, materialize_grads=True)
        found = read(weight, bias)
        if len(found) > 1 or not bool(found.isfinite().all()):  # one sample fills one bin
            return False
        if len(found):
            seen += 1
            if not torch.allclose(found[0], x[place].flatten(), rtol=1e-2, atol=1e-2):
                return False
    return seen > 0
