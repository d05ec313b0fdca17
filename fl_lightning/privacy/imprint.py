"""A server that crafts its message: an imprint layer sorts the samples of a batch into bins (Fowl et al., 2022).

Functions of tensors. The server sends a dense layer all of whose rows measure one thing, such as the brightness of an
image, with thresholds between the bins. A row is active for every sample above its threshold, so that the difference
of the gradients of two neighbouring rows is that of the samples between their thresholds: where that is one sample,
their ratio is the sample.
"""

from __future__ import annotations

import torch
from torch import Tensor


def imprint(size: int, thresholds: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer that measures the mean of its inputs, for a ReLU behind it.

    Args:
        size: of an input.
        thresholds: in ascending order, such as quantiles of the mean on data of the server's own, shape (bins,).
        scale: of the layer.

    Returns:
        Weight of shape (bins, size) and bias of shape (bins,).

    Example:
        >>> weight, bias = imprint(2, torch.tensor([0.0, 1.0]))
        >>> weight @ torch.tensor([1.0, 0.0]) + bias
        tensor([ 0.5000, -0.5000])
    """
    return torch.full((len(thresholds), size), scale / size).to(thresholds), -scale * thresholds


def read(weight: Tensor, bias: Tensor) -> Tensor:
    """The samples that are alone in a bin, out of the gradients or changes of the layer; others come out as mixtures.

    The layer's rows must count alike in what follows, as they do behind a layer of equal columns.

    Args:
        weight: shape (bins, size).
        bias: shape (bins,).

    Returns:
        Shape (bins with a sample, size).
    """
    own = torch.cat((weight[:-1] - weight[1:], weight[-1:])), torch.cat((bias[:-1] - bias[1:], bias[-1:]))
    filled = own[1].abs() > 1e-6 * own[1].abs().max().clamp(min=1e-30)
    return own[0][filled] / own[1][filled][:, None]
