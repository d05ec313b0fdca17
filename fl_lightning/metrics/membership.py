"""How well an attacker tells members from non-members: accuracy, F1, AUROC, and the hits at few false alarms."""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy.special import betaincinv
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from fl_lightning import seeding

#: Shares of false alarms at which the share of members that are found is reported, and the names for them.
FALSE_ALARMS = {"tpr_at_1": 0.01, "tpr_at_01": 0.001}


def attack_accuracy(scores: Tensor, members: Tensor, threshold: float = 0.5) -> Tensor:
    """Share of samples that are rightly called member (score at the threshold or above) or non-member.

    Args:
        scores: higher means member, shape (n,).
        members: whether each sample is one, boolean, shape (n,).
        threshold: where the attacker draws the line.

    Example:
        >>> attack_accuracy(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        tensor(0.3333, dtype=torch.float64)
    """
    return ((scores >= threshold) == members).double().mean()


def attack_f1(scores: Tensor, members: Tensor, threshold: float = 0.5) -> Tensor:
    """F1 with members as the positive class; 0 if none is found.

    Example:
        >>> attack_f1(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        tensor(0.5000, dtype=torch.float64)
    """
    called = scores >= threshold
    right = (called & members).sum().double()
    return 2 * right / (called.sum() + members.sum()).clamp(min=1)


def attack_auroc(scores: Tensor, members: Tensor) -> Tensor:
    """Chance that a random member scores higher than a random non-member, ties counted half.

    Example:
        >>> attack_auroc(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        tensor(0.5000, dtype=torch.float64)
    """
    found, alarms = _counts(scores, members)
    return torch.trapezoid(found, alarms) / (found[-1] * alarms[-1])


def _counts(scores: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of true and of false alarms at every distinct threshold, from "nobody" to "everybody", shape (t,).

    torchmetrics would squash scores outside 0 to 1, such as losses, by a sigmoid in which the high ones become equal
    (an AUROC may be off by 0.08), counts in single precision, and says 0 where there are no members.
    """
    order = scores.argsort(descending=True)
    ordered, hits = scores[order], members[order].double()
    last = torch.cat((ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool, device=scores.device)))
    zero = hits.new_zeros(1)
    return torch.cat((zero, hits.cumsum(0)[last])), torch.cat((zero, (1 - hits).cumsum(0)[last]))


def _rates(scores: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """True and false alarms at every distinct threshold, from "nobody" to "everybody"; shares, shape (t,)."""
    found, alarms = _counts(scores, members)
    return found / found[-1], alarms / alarms[-1]


def tpr_at_fpr(scores: Tensor, members: Tensor, fpr: float) -> Tensor:
    """Largest share of members that a threshold finds with at most the given share of false alarms.

    NaN where there are fewer than 1 / fpr non-members: no share of false alarms but none is then that small.

    Example:
        >>> tpr_at_fpr(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, True, False, False]), 0.5)
        tensor(1., dtype=torch.float64)
    """
    found, alarms = _rates(scores, members)
    if fpr * int((~members).sum()) < 1 - 1e-9:
        return found.new_tensor(torch.nan)
    return found[alarms <= fpr + 1e-12].max()


def roc(scores: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of false alarms and of members found, at every distinct threshold, both of shape (t,).

    Example:
        >>> [rate.tolist() for rate in roc(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))]
        [[0.0, 0.0, 1.0, 1.0], [0.0, 0.5, 0.5, 1.0]]
    """
    found, alarms = _rates(scores, members)
    return alarms, found


def clopper_pearson(hits: int, number: int, level: float = 0.95) -> tuple[float, float]:
    """The exact interval of a share of which so many hits were seen.

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
    """The bootstrap interval of the AUROC, members and non-members drawn for themselves.

    Args:
        scores: higher means member, shape (n,).
        members: whether each sample is one, boolean, shape (n,).
        seed: of the draws.
        draws: their number.
        level: of confidence.
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
    """Ends of the 95% intervals of AUROC (bootstrap) and of the members found (Clopper-Pearson), by name.

    The latter take the threshold for given.

    Args:
        scores: higher means member, shape (n,).
        members: whether each sample is one, boolean, shape (n,).
        seed: of the bootstrap.
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
    """Balanced accuracy at the best of all thresholds, chosen in hindsight: no line could do better.

    Example:
        >>> best_accuracy(torch.tensor([0.9, 0.4, 0.6]), torch.tensor([True, True, False]))
        tensor(0.7500, dtype=torch.float64)
    """
    found, alarms = _rates(scores, members)
    return 0.5 + (found - alarms).max() / 2


def best_threshold(scores: Tensor, members: Tensor) -> float:
    """The score from which on calling samples members is right most often; of equals the highest.

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
    """All measures by name, as fractions; all NaN if a score is, since an attack without an answer is none.

    Args:
        scores: higher means member, shape (n,).
        members: whether each sample is one, boolean, shape (n,).
        threshold: where the attacker draws the line.

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
    """The measures of :func:`membership_summary` over any number of updates.

    Args:
        threshold: where the attacker draws the line.

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
        """All measures by name."""
        return membership_summary(dim_zero_cat(self.scores), dim_zero_cat(self.members), self.threshold)
