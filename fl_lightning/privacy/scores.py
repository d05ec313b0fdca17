"""Membership scores out of arrays of answers; higher means member. They know neither nets nor federations.

In what follows ``target`` holds one answer of the attacked model for each of n samples, ``shadows`` those of M
reference models, shape (M, n), and ``inside`` and ``outside`` say which of these were trained on a sample and which
have not seen it at all, boolean, shape (M, n); a model may be neither.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning.errors import FederationError

#: With fewer models than this on a side of a sample, all samples share one variance (Carlini et al., 2022, used 64).
OWN_VARIANCE = 16
#: Smallest standard deviation.
SMALLEST = 1e-4


def loss_scores(loss: Tensor) -> Tensor:
    """Minus the loss (Yeom et al., 2018)."""
    return -loss


def lira_offline(target: Tensor, shadows: Tensor, outside: Tensor) -> Tensor:
    """How far the log odds lie above those of models that have not seen the sample, in standard deviations.

    Offline LiRA (Carlini et al., 2022): the larger, the less likely under the Gaussian of those models.

    Args:
        target: log odds of the true class, shape (n,).
        shadows: the same of M models, shape (M, n).
        outside: which of them have not seen the sample.

    Example:
        >>> lira_offline(torch.tensor([3.0]), torch.tensor([[0.0], [2.0]]), torch.tensor([[True], [True]]))
        tensor([1.4142])
    """
    mean, std = _moments(shadows, outside)
    return (target - mean) / std


def lira_online(target: Tensor, shadows: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Log likelihood ratio of the log odds under models that were trained on the sample and that were not.

    Args:
        target: log odds of the true class, shape (n,).
        shadows: the same of M models, shape (M, n).
        inside: which of them were trained on the sample.
        outside: which of them have not seen it.

    Example:
        >>> shadows, seen = torch.tensor([[3.0], [5.0], [0.0], [2.0]]), torch.tensor([[True], [True], [False], [False]])
        >>> lira_online(torch.tensor([4.0]), shadows, seen, ~seen)
        tensor([2.2500])
    """
    return _log_likelihood(target, *_moments(shadows, inside)) - _log_likelihood(target, *_moments(shadows, outside))


def rmia(
    target: Tensor,
    shadows: Tensor,
    outside: Tensor,
    target_others: Tensor,
    shadow_others: Tensor,
    inside: Tensor | None = None,
    gamma: float = 1.0,
    offset: float = 0.3,
) -> Tensor:
    """The share of other samples that the target prefers less than this one, by a factor (Zarifzadeh et al., 2024).

    Preference is the probability of the true class over its mean over models. Offline that mean is not known for
    models trained on the sample: it is put at ((1 + offset) p + 1 - offset) / 2 with p the mean over the others.

    Args:
        target: probability of the true class, shape (n,).
        shadows: the same of M models, shape (M, n).
        outside: which of them have not seen the sample.
        target_others: the target's probabilities for samples of the population, shape (z,).
        shadow_others: those of the M models, none of which has seen them, shape (M, z).
        inside: which models were trained on the sample, for the attack online; None is offline.
        gamma: the factor.
        offset: of the offline mean.
    """
    mean_out = _mean(shadows, outside)
    mean_in = offset * mean_out + 1 - offset if inside is None else _mean(shadows, inside)
    own = (mean_out + mean_in) / 2
    others = target_others / (((1 + offset) * shadow_others.mean(0) + 1 - offset) / 2).clamp(min=1e-30)
    ratio = target / own.clamp(min=1e-30)
    ordered = others.sort().values
    below = torch.searchsorted(ordered, ratio / gamma, right=True)
    # Samples that all others are below are told apart by the ratio itself.
    return (below + torch.sigmoid(ratio.clamp(min=1e-30).log())) / (len(ordered) + 1)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    number = chosen.sum(0)
    if not bool((number > 0).all()):
        raise FederationError("Every attacked sample needs a reference model on this side of it: train more shadows.")
    return (values * chosen).sum(0) / number


def _moments(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every sample, the latter common to all where models are few."""
    mean, number = _mean(values, chosen), chosen.sum(0)
    squares = ((values - mean).pow(2) * chosen).sum(0)
    if int(number.min()) >= OWN_VARIANCE:
        return mean, (squares / (number - 1)).sqrt().clamp(min=SMALLEST)
    freedom = (number.sum() - len(mean)).clamp(min=0)
    common = (squares.sum() / freedom).sqrt() if bool(freedom > 0) else squares.new_ones(())
    return mean, common.clamp(min=SMALLEST).expand_as(mean)


def _log_likelihood(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return -0.5 * ((values - mean) / std).pow(2) - std.log() - 0.5 * math.log(2 * math.pi)
