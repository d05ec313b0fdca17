"""Inference from updates about a whole client: whether it took part, and properties of its data. All of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.wire import State


def took_part(change: Tensor, update: Tensor) -> float:
    """Client-level membership: how far the change of the global model points along what the client would send.

    The mean of K updates that are independent but for one has a cosine of about 1 / sqrt(K) to each of them, and one
    of about 0 to others, so the score is compared with those of clients that are known not to have taken part.

    Args:
        change: of the global model in a round, shape (D,).
        update: what the client would send, as trained on data like its own, shape (D,).

    Example:
        >>> round(took_part(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0])), 4)
        0.7071
    """
    return float(F.cosine_similarity(change.double(), update.double(), dim=0))


def property_direction(with_it: Tensor, without: Tensor, shrinkage: float = 0.1) -> tuple[Tensor, float]:
    """Property inference: the direction and line that tell updates of data with a property from others.

    A linear discriminant on updates that the adversary makes of data of its own, with a variance for each entry.

    Args:
        with_it: updates of data that has the property, shape (n, D).
        without: of data that has not, shape (m, D).
        shrinkage: share of the mean variance in each entry's.

    Returns:
        The direction, shape (D,), and the line: a larger product means that the property is there.
    """
    means = with_it.double().mean(0), without.double().mean(0)
    spread = torch.cat((with_it.double() - means[0], without.double() - means[1])).pow(2).mean(0)
    variance = (1 - shrinkage) * spread + shrinkage * spread.mean()
    direction = (means[0] - means[1]) / variance.clamp(min=1e-30)
    return direction, float(direction @ (means[0] + means[1]) / 2)


def remaining(mean: State, weights: Sequence[float], known: Sequence[State], own: float) -> State:
    """Message of the one client that is left, where the server's mean and all other messages are known.

    A server that sees the mean alone, under secure aggregation, and clients that collude with it.

    Args:
        mean: the weighted mean.
        weights: those of the known messages.
        known: the messages of clients that collude.
        own: the weight of the client that is left.

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
