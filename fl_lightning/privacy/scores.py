"""Membership scores from arrays of model outputs; higher means member. Independent of nets and federations.

``target`` contains one output of the attacked model for each of n samples and ``shadows`` those of M reference models,
shape (M, n). ``inside`` and ``outside`` mark the models that were trained on a sample and those that have not seen it
at all, boolean, shape (M, n); a model may be neither.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning.errors import FederationError

#: With fewer models than this on a side, all samples share one variance (64 in Carlini et al., 2022).
OWN_VARIANCE = 16
#: Smallest standard deviation.
SMALLEST = 1e-4


def loss_scores(loss: Tensor) -> Tensor:
    """Return the negative loss (Yeom et al., 2018)."""
    return -loss


def lira_offline(target: Tensor, shadows: Tensor, outside: Tensor) -> Tensor:
    """Standardise the log odds by those of models that have not seen the sample.

    Offline LiRA (Carlini et al., 2022): larger values are less likely under the Gaussian of those models.

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
    """Return the log likelihood ratio of the log odds, for models trained on the sample against others.

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
    """Return the share of other samples whose preference is lower by a factor (Zarifzadeh et al., 2024).

    Preference is the probability of the true class relative to its mean over models. Offline, this mean is estimated
    without models trained on the sample, as ((1 + offset) p + 1 - offset) / 2 with p the mean over other models.

    Args:
        target: probability of the true class, shape (n,).
        shadows: the same of M models, shape (M, n).
        outside: which of them have not seen the sample.
        target_others: the target's probabilities for samples of the population, shape (z,).
        shadow_others: those of the M models, none of which has seen them, shape (M, z).
        inside: which models were trained on the sample, for the online attack; None means offline.
        gamma: the factor.
        offset: offset of the offline mean.
    """
    mean_out = _mean(shadows, outside)
    mean_in = offset * mean_out + 1 - offset if inside is None else _mean(shadows, inside)
    own = (mean_out + mean_in) / 2
    others = target_others / (((1 + offset) * shadow_others.mean(0) + 1 - offset) / 2).clamp(min=1e-30)
    ratio = target / own.clamp(min=1e-30)
    ordered = others.sort().values
    below = torch.searchsorted(ordered, ratio / gamma, right=True)
    # Break ties among samples above all others by the ratio itself.
    return (below + torch.sigmoid(ratio.clamp(min=1e-30).log())) / (len(ordered) + 1)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    number = chosen.sum(0)
    if not bool((number > 0).all()):
        raise FederationError("Every attacked sample needs a reference model on this side of it: train more shadows.")
    return (values * chosen).sum(0) / number


def _moments(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation by sample; the latter is shared if there are few models."""
    mean, number = _mean(values, chosen), chosen.sum(0)
    squares = ((values - mean).pow(2) * chosen).sum(0)
    if int(number.min()) >= OWN_VARIANCE:
        return mean, (squares / (number - 1)).sqrt().clamp(min=SMALLEST)
    freedom = (number.sum() - len(mean)).clamp(min=0)
    common = (squares.sum() / freedom).sqrt() if bool(freedom > 0) else squares.new_ones(())
    return mean, common.clamp(min=SMALLEST).expand_as(mean)


def _log_likelihood(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return -0.5 * ((values - mean) / std).pow(2) - std.log() - 0.5 * math.log(2 * math.pi)
