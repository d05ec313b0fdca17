"""Metrics of membership inference: accuracy, F1, AUROC, and the true positive rate at low false positive rates."""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy.special import betaincinv
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from fl_lightning import seeding

#: False positive rates at which the true positive rate is reported, by the metric's name.
FALSE_ALARMS = {"tpr_at_1": 0.01, "tpr_at_01": 0.001}


def attack_accuracy(scores: Tensor, members: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the share of samples classified correctly as member (score at the threshold or above) or non-member.

    Args:
        scores: higher means member, shape (n,).
        members: whether each sample is a member, boolean, shape (n,).
        threshold: decision threshold.

    Example:
        >>> attack_accuracy(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        tensor(0.3333, dtype=torch.float64)
    """
    return ((scores >= threshold) == members).double().mean()


def attack_f1(scores: Tensor, members: Tensor, threshold: float = 0.5) -> Tensor:
    """Return F1 with members as the positive class; 0 if no member is found.

    Example:
        >>> attack_f1(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        tensor(0.5000, dtype=torch.float64)
    """
    called = scores >= threshold
    right = (called & members).sum().double()
    return 2 * right / (called.sum() + members.sum()).clamp(min=1)


def attack_auroc(scores: Tensor, members: Tensor) -> Tensor:
    """Return the probability that a random member scores higher than a random non-member, ties counted half.

    Example:
        >>> attack_auroc(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        tensor(0.5000, dtype=torch.float64)
    """
    found, alarms = _counts(scores, members)
    return torch.trapezoid(found, alarms) / (found[-1] * alarms[-1])


def _counts(scores: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of true and false positives at every distinct threshold, from none to all, shape (t,).

    torchmetrics would apply a sigmoid to scores outside of [0, 1], such as losses, where high ones become equal (which
    may change an AUROC by 0.08), counts in single precision, and returns 0 if there are no members.
    """
    order = scores.argsort(descending=True)
    ordered, hits = scores[order], members[order].double()
    last = torch.cat((ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool, device=scores.device)))
    zero = hits.new_zeros(1)
    return torch.cat((zero, hits.cumsum(0)[last])), torch.cat((zero, (1 - hits).cumsum(0)[last]))


def _rates(scores: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the true and false positive rates at every distinct threshold, from none to all, shape (t,)."""
    found, alarms = _counts(scores, members)
    return found / found[-1], alarms / alarms[-1]


def tpr_at_fpr(scores: Tensor, members: Tensor, fpr: float) -> Tensor:
    """Return the highest true positive rate of a threshold with at most the given false positive rate.

    NaN with fewer than 1 / fpr non-members, where only a rate of 0 could be that low.

    Example:
        >>> tpr_at_fpr(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, True, False, False]), 0.5)
        tensor(1., dtype=torch.float64)
    """
    found, alarms = _rates(scores, members)
    if fpr * int((~members).sum()) < 1 - 1e-9:
        return found.new_tensor(torch.nan)
    return found[alarms <= fpr + 1e-12].max()


def roc(scores: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return false and true positive rates at every distinct threshold, both of shape (t,).

    Example:
        >>> [rate.tolist() for rate in roc(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))]
        [[0.0, 0.0, 1.0, 1.0], [0.0, 0.5, 0.5, 1.0]]
    """
    found, alarms = _rates(scores, members)
    return alarms, found


def clopper_pearson(hits: int, number: int, level: float = 0.95) -> tuple[float, float]:
    """Return the exact confidence interval of a proportion.

    Example:
        >>> tuple(round(end, 4) for end in clopper_pearson(0, 10))
        (0.0, 0.3085)
    """
    tail = (1 - level) / 2
    low = float(betaincinv(hits, number - hits + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, number - hits, 1 - tail)) if hits < number else 1.0
    return low, high


def auroc_interval(
    scores: Tensor, members: Tensor, seed: int = 0, draws: int = 200, level: float = 0.95
) -> tuple[float, float]:
    """Return the bootstrap interval of the AUROC, with members and non-members resampled separately.

    Args:
        scores: higher means member, shape (n,).
        members: whether each sample is a member, boolean, shape (n,).
        seed: seed of the resampling.
        draws: number of resamples.
        level: confidence level.
    """
    rng = seeding.stream(seed, "bootstrap")
    _, place = torch.unique(scores.double().cpu(), return_inverse=True)
    weights = []
    for side in (members.cpu(), ~members.cpu()):
        n = int(side.sum())
        drawn = torch.from_numpy(rng.multinomial(n, [1 / n] * n, size=draws)).double() / n
        weights.append(drawn.new_zeros(draws, int(place.max()) + 1).index_add_(1, place[side], drawn))
    inside, outside = weights
    found = (inside * (outside.cumsum(1) - outside / 2)).sum(1)
    ends = torch.quantile(found, found.new_tensor([(1 - level) / 2, (1 + level) / 2]))
    return float(ends[0]), float(ends[1])


def membership_intervals(scores: Tensor, members: Tensor, seed: int = 0) -> dict[str, float]:
    """Return the ends of 95% intervals of the AUROC (bootstrap) and true positive rates (Clopper-Pearson), by name.

    The latter treat the threshold as fixed.

    Args:
        scores: higher means member, shape (n,).
        members: whether each sample is a member, boolean, shape (n,).
        seed: seed of the bootstrap.
    """
    names = ["auroc", *FALSE_ALARMS]
    if bool(scores.isnan().any()):
        return {f"{name}_{end}": float("nan") for name in names for end in ("low", "high")}
    ends = {"auroc": auroc_interval(scores, members, seed)}
    total = int(members.sum())
    for name, rate in FALSE_ALARMS.items():
        share = float(tpr_at_fpr(scores, members, rate))
        known = not math.isnan(share)
        ends[name] = clopper_pearson(round(share * total), total) if known else (float("nan"), float("nan"))
    return {f"{name}_{end}": value for name in names for end, value in zip(("low", "high"), ends[name], strict=True)}


def best_accuracy(scores: Tensor, members: Tensor) -> Tensor:
    """Return the balanced accuracy at the best threshold in hindsight, an upper bound for any threshold.

    Example:
        >>> best_accuracy(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        tensor(0.7500, dtype=torch.float64)
    """
    found, alarms = _rates(scores, members)
    return 0.5 + (found - alarms).max() / 2


def best_threshold(scores: Tensor, members: Tensor) -> float:
    """Return the threshold with the highest balanced accuracy; the highest of several.

    Example:
        >>> best_threshold(torch.tensor([0.9, 0.5, 0.0]), torch.tensor([True, True, False]))
        0.25
    """
    found, alarms = _rates(scores, members)
    values = torch.unique(scores).flip(0)
    cut = int((found - alarms).argmax())
    if cut == 0:
        return float(values[0]) + 1.0
    above = float(values[cut - 1])
    return (above + float(values[cut])) / 2 if cut < len(values) else above


def membership_summary(scores: Tensor, members: Tensor, threshold: float = 0.5) -> dict[str, Tensor]:
    """Return all metrics by name, as fractions; all are NaN if a score is NaN, since the attack then has no answer.

    Args:
        scores: higher means member, shape (n,).
        members: whether each sample is a member, boolean, shape (n,).
        threshold: decision threshold.

    Example:
        >>> found = membership_summary(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        >>> {name: round(float(value), 2) for name, value in found.items()}
        {'accuracy': 0.33, 'f1': 0.5, 'auroc': 0.5, 'best_accuracy': 0.75, 'tpr_at_1': nan, 'tpr_at_01': nan}
    """
    measures = {
        "accuracy": attack_accuracy(scores, members, threshold),
        "f1": attack_f1(scores, members, threshold),
        "auroc": attack_auroc(scores, members),
        "best_accuracy": best_accuracy(scores, members),
        **{name: tpr_at_fpr(scores, members, rate) for name, rate in FALSE_ALARMS.items()},
    }
    lost = bool(scores.isnan().any())
    return {name: torch.full_like(value, torch.nan) for name, value in measures.items()} if lost else measures


class MembershipAttack(Metric):
    """The metrics of :func:`membership_summary`, accumulated over updates.

    Args:
        threshold: decision threshold.

    Example:
        >>> metric = MembershipAttack()
        >>> metric.update(torch.tensor([0.9, 0.4]), torch.tensor([True, True]))
        >>> metric.update(torch.tensor([0.6]), torch.tensor([False]))
        >>> metric.compute()["auroc"]
        tensor(0.5000, dtype=torch.float64)
    """

    full_state_update = False
    scores: list[Tensor]
    members: list[Tensor]

    def __init__(self, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.threshold = threshold
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("members", [], dist_reduce_fx="cat")

    def update(self, scores: Tensor, members: Tensor) -> None:
        """Add some samples: their scores and whether they are members, both of shape (n,)."""
        self.scores.append(scores)
        self.members.append(members.bool())

    def compute(self) -> dict[str, Tensor]:
        """Return all metrics by name."""
        return membership_summary(dim_zero_cat(self.scores), dim_zero_cat(self.members), self.threshold)
