"""Client-level membership inference from the change of a global model in a round.

Functions of tensors. The mean of K updates has a small component along each of them. The common component of all
updates, estimated from the adversary's own updates, is removed, and the rest is compared with the client's expected
update, in standard deviations of updates that are not in the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.metrics import attack_auroc, best_threshold

#: Minimum number of references for a standard deviation.
FEWEST = 3


def participation_scores(change: Tensor, candidates: Tensor, others: Tensor) -> Tensor:
    """Return the component of the change along each candidate, in standard deviations of unrelated updates.

    Args:
        change: of the global model, or the mean of the updates, shape (D,).
        candidates: the clients' expected updates, shape (n, D).
        others: updates made of the adversary's own data, which are not in the change, shape (m, D), m at least 3.

    Returns:
        Shape (n,); about standard normal for candidates distributed like the others.

    Example:
        >>> others = torch.tensor([[1.0, 0.1, 0.0], [1.0, -0.1, 0.1], [1.0, 0.0, -0.1]])
        >>> candidates = torch.tensor([[1.0, 0.5, 0.0], [1.0, -0.5, 0.0]])
        >>> (participation_scores(torch.tensor([1.0, 0.3, 0.0]), candidates, others) > 0).tolist()
        [True, False]
    """
    null = _apart(change, others)
    common = others.double().mean(0)
    found = torch.stack([_alike(change, one, common) for one in candidates.double()])
    return (found - null.mean()) / null.std().clamp(min=1e-12)


class Taught(NamedTuple):
    """The adversary's threshold and estimated strength."""

    threshold: float
    """Score above which a client counts as a participant."""
    auroc: float
    """AUROC on the adversary's own updates, added to the change or not."""


def teach(change: Tensor, others: Tensor, weight: float) -> Taught:
    """Learn a threshold by adding the adversary's own updates to the change.

    Args:
        change: shape (D,).
        others: shape (m, D).
        weight: weight of one update in the mean, such as one over the number of clients.
    """
    outside = _apart(change, others)
    added = []
    for place, one in enumerate(others.double()):
        common = _without(others, place).mean(0)
        added.append(_alike(change.double() + weight * one, one, common))
    inside, spread = torch.stack(added), outside.std().clamp(min=1e-12)
    scores = torch.cat(((inside - outside.mean()) / spread, (outside - outside.mean()) / spread))
    flags = torch.arange(len(scores)) < len(inside)
    return Taught(best_threshold(scores, flags), float(attack_auroc(scores, flags)))


def _apart(change: Tensor, others: Tensor) -> Tensor:
    """Return the cosine of every other update, with the common component of the rest removed."""
    every = enumerate(others.double())
    return torch.stack([_alike(change, one, _without(others, place).mean(0)) for place, one in every])


def _without(others: Tensor, place: int) -> Tensor:
    return torch.cat((others[:place], others[place + 1 :])).double()


def _alike(change: Tensor, update: Tensor, common: Tensor) -> Tensor:
    """Return the cosine of two updates without the common component; 0 if nothing remains."""
    square = common.pow(2).sum().clamp(min=1e-30)
    left, right = (one.double() - (one.double() @ common) / square * common for one in (change, update))
    return F.cosine_similarity(left, right, dim=0, eps=1e-30)
