"""Inference about whole clients from updates: participation and data properties. Functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.wire import State


def took_part(change: Tensor, update: Tensor) -> float:
    """Return the cosine of the global model's change and a client's expected update (client-level membership).

    The mean of K updates that are independent but for one has a cosine of about 1 / sqrt(K) to each of them, and one
    of about 0 to others, so the score is compared with those of clients that are known not to have taken part.

    Args:
        change: change of the global model in a round, shape (D,).
        update: the client's expected update, trained on similar data, shape (D,).

    Example:
        >>> round(took_part(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0])), 4)
        0.7071
    """
    return float(F.cosine_similarity(change.double(), update.double(), dim=0))


def property_direction(with_it: Tensor, without: Tensor, shrinkage: float = 0.1) -> tuple[Tensor, float]:
    """Return direction and threshold that separate updates of data with a property from others.

    A linear discriminant with diagonal covariance on updates of the adversary's own data.

    Args:
        with_it: updates of data with the property, shape (n, D).
        without: updates of data without it, shape (m, D).
        shrinkage: share of the mean variance in each entry's.

    Returns:
        The direction, shape (D,), and the threshold above which the product indicates the property.
    """
    means = with_it.double().mean(0), without.double().mean(0)
    spread = torch.cat((with_it.double() - means[0], without.double() - means[1])).pow(2).mean(0)
    variance = (1 - shrinkage) * spread + shrinkage * spread.mean()
    direction = (means[0] - means[1]) / variance.clamp(min=1e-30)
    return direction, float(direction @ (means[0] + means[1]) / 2)


def remaining(mean: State, weights: Sequence[float], known: Sequence[State], own: float) -> State:
    """Return the message of the remaining client, given the server's mean and all other messages.

    For a server that sees only the mean (secure aggregation) and colludes with all other clients.

    Args:
        mean: the weighted mean.
        weights: weights of the known messages.
        known: messages of the colluding clients.
        own: weight of the remaining client.

    Example:
        >>> found = remaining({"w": torch.tensor([2.0])}, [0.5], [{"w": torch.tensor([3.0])}], 0.5)
        >>> found["w"]
        tensor([1.])
    """
    left: State = {}
    for name, value in mean.items():
        rest = sum(
            (w * message[name].double() for w, message in zip(weights, known, strict=True)), 0.0 * value.double()
        )
        left[name] = ((value.double() - rest) / own).to(value.dtype)
    return left
