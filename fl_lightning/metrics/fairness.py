"""Fairness metrics: how evenly a federated model serves its clients.

Units: every function takes one accuracy per client as a fraction in [0, 1], or NaN for a client without a score, which
is ignored. Accuracies and their differences are returned as fractions, indices as numbers in [0, 1], and the variance
in percent squared, as usual in papers. Other scores are described by a :class:`Measure`: the variance of one that is
not a share is in its own units squared, and worst tenth, gap and gain over Local respect its direction.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning import seeding
from fl_lightning.measure import ACCURACY, Measure
from fl_lightning.metrics.clients import worst_tenth


def group_means(accuracies: Tensor, groups: Tensor) -> Tensor:
    """Return the mean accuracy of every group of clients.

    Args:
        accuracies: shape (clients,).
        groups: each client's group, numbered from 0, int64, shape (clients,).

    Returns:
        Shape (groups,), NaN for a group without a scored client.

    Example:
        >>> group_means(torch.tensor([0.9, 0.7, 0.5]), torch.tensor([0, 0, 1]))
        tensor([0.8000, 0.5000])
    """
    return torch.stack([scored(accuracies[groups == g]).mean() for g in range(int(groups.max()) + 1)])


def majority_minority(groups: Tensor) -> tuple[int, int]:
    """Return the largest and the smallest group, counting all clients, scored or not.

    Among groups of equal size the majority is the first and the minority the last.

    Example:
        >>> majority_minority(torch.tensor([0, 0, 1, 2, 2, 2, 3]))
        (2, 3)
    """
    sizes = torch.bincount(groups).tolist()
    numbers = range(len(sizes))
    return max(numbers, key=lambda g: (sizes[g], -g)), min(numbers, key=lambda g: (sizes[g], -g))


def accuracy_gap(accuracies: Tensor, groups: Tensor, measure: Measure = ACCURACY) -> Tensor:
    """Return the majority's mean minus the minority's, negated if lower is better; 0 if there is only one group.

    Args:
        accuracies: shape (clients,).
        groups: each client's group, numbered from 0, int64, shape (clients,).
        measure: the measure of the scores.

    Example:
        >>> accuracy_gap(torch.tensor([0.75, 1.0, 0.5]), torch.tensor([0, 0, 1]))
        tensor(0.3750)
    """
    means = group_means(accuracies, groups)
    majority, minority = majority_minority(groups)
    return measure.sign * (means[majority] - means[minority])


def accuracy_variance(accuracies: Tensor, measure: Measure = ACCURACY) -> Tensor:
    """Return the population variance over clients in percent squared, or in squared units if not a share.

    Example:
        >>> accuracy_variance(torch.tensor([0.50, 0.60]))
        tensor(25.0000)
    """
    printed = measure.scale * scored(accuracies)
    return (printed - printed.mean()).pow(2).mean()


def corrected_variance(accuracies: Tensor, samples: Tensor) -> Tensor:
    """Return the variance over clients corrected for the sampling of test samples, in percent squared, at least 0.

    A client with accuracy a on n samples has the sampling variance a (1 - a) / (n - 1), estimated without bias. Their
    mean, times the factor (n - 1) / n of a population variance, is subtracted.

    Args:
        accuracies: shape (clients,).
        samples: test samples of every client, shape (clients,).

    Example:
        >>> corrected_variance(torch.tensor([0.4, 0.6]), torch.tensor([1001, 1001])).round(decimals=2)
        tensor(98.8000)
    """
    kept = ~accuracies.isnan() & (samples > 1)
    a, n = accuracies[kept], samples[kept].to(accuracies)
    clients = len(a)
    noise = (a * (1 - a) / (n - 1)).mean() * (clients - 1) / max(clients, 1)
    return (accuracy_variance(a) - 1e4 * noise).clamp(min=0)


def corrected_worst_decile(accuracies: Tensor, samples: Tensor) -> Tensor:
    """Return the worst decile after shrinking accuracies towards their mean to the corrected variance.

    Even if all clients are equal, the worst tenth of the measured accuracies are those with bad luck in their test
    samples. Distances from the mean are multiplied by sqrt(corrected variance / variance).

    Args:
        accuracies: shape (clients,).
        samples: test samples of every client, shape (clients,).

    Example:
        >>> accuracies, samples = torch.tensor([0.4, 0.6]), torch.tensor([1001, 1001])
        >>> corrected_worst_decile(accuracies, samples).round(decimals=3)
        tensor(0.4010)
    """
    kept = ~accuracies.isnan() & (samples > 1)
    a, n = accuracies[kept], samples[kept]
    share = (corrected_variance(a, n) / accuracy_variance(a).clamp(min=1e-12)).sqrt()
    return worst_decile(a.mean() + share * (a - a.mean()))


def fairness_intervals(
    accuracies: Tensor, seed: int = 0, draws: int = 500, level: float = 0.95, measure: Measure = ACCURACY
) -> dict[str, tuple[float, float]]:
    """Return bootstrap intervals over clients of ``mean``, ``variance``, ``worst10``, ``jain``, ``entropy``, by name.

    Args:
        accuracies: shape (clients,).
        seed: seed of the resampling.
        draws: number of resamples.
        level: confidence level.
        measure: the measure of the scores.

    Example:
        >>> fairness_intervals(torch.full((5,), 0.5))["worst10"]
        (0.5, 0.5)
    """
    a = scored(accuracies).double().cpu()
    if not len(a):
        return {}
    picks = torch.from_numpy(seeding.stream(seed, "bootstrap").integers(len(a), size=(draws, len(a))))
    drawn = [{"mean": row.mean(), **fairness_summary(row, measure=measure)} for row in a[picks]]
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    found = {}
    for name in drawn[0]:
        low, high = torch.quantile(torch.stack([one[name] for one in drawn]), ends).tolist()
        found[name] = (low, high)
    return found


def gap_interval(
    accuracies: Tensor,
    groups: Tensor,
    seed: int = 0,
    draws: int = 500,
    level: float = 0.95,
    measure: Measure = ACCURACY,
) -> tuple[float, float]:
    """Return the bootstrap interval of the gap, clients drawn within majority and minority; NaN where one is empty.

    Args:
        accuracies: shape (clients,).
        groups: each client's group, numbered from 0, int64, shape (clients,).
        seed: of the draws.
        draws: their number.
        level: of confidence.
        measure: what the scores are.

    Example:
        >>> gap_interval(torch.tensor([0.75, 0.75, 0.5]), torch.tensor([0, 0, 1]))
        (0.25, 0.25)
    """
    means, rng = [], seeding.stream(seed, "bootstrap.gap")
    for group in majority_minority(groups):
        own = scored(accuracies[groups == group]).double().cpu()
        if not len(own):
            return math.nan, math.nan
        means.append(own[torch.from_numpy(rng.integers(len(own), size=(draws, len(own))))].mean(1))
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(measure.sign * (means[0] - means[1]), ends).tolist()
    return low, high


def worst_decile(accuracies: Tensor, measure: Measure = ACCURACY) -> Tensor:
    """Return the mean accuracy of the worst tenth of the clients, at least one; the highest scores for errors.

    Example:
        >>> worst_decile(torch.tensor([0.5, float("nan"), 0.25]))
        tensor(0.2500)
    """
    return worst_tenth(scored(accuracies), measure.higher_is_better)


def jain_index(accuracies: Tensor) -> Tensor:
    """Return Jain's index, (sum a)^2 / (n sum a^2): 1 if all are equal (even 0), 1/n if only one is not 0.

    Example:
        >>> jain_index(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        tensor(0.5000)
    """
    a = scored(accuracies)
    squares = a.pow(2).sum()
    return torch.where(squares > 0, a.sum().pow(2) / (len(a) * squares), _equal(a))


def accuracy_entropy(accuracies: Tensor) -> Tensor:
    """Return the entropy of the clients' shares of the summed accuracy over log n: 1 if all are equal, or only one.

    Example:
        >>> accuracy_entropy(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        tensor(0.5000)
    """
    a = scored(accuracies)
    if len(a) < 2 or not a.sum() > 0:
        return _equal(a)
    share = a / a.sum()
    return -torch.xlogy(share, share).sum() / math.log(len(a))


def gap_to_local(accuracies: Tensor, local: Tensor, measure: Measure = ACCURACY) -> Tensor:
    """Return each client's gain over training alone: its accuracy minus that of its Local model.

    Args:
        accuracies: shape (clients,).
        local: accuracy of every client's Local model, shape (clients,).
        measure: the measure of the scores; for errors the gain is the reduction.

    Returns:
        Shape (clients,), negative for a client that is better off alone, NaN where either is unknown.

    Example:
        >>> gap_to_local(torch.tensor([0.75, 0.5]), torch.tensor([0.5, 0.75]))
        tensor([ 0.2500, -0.2500])
    """
    return measure.sign * (accuracies - local.to(accuracies))


def fairness_summary(
    accuracies: Tensor, groups: Tensor | None = None, local: Tensor | None = None, measure: Measure = ACCURACY
) -> dict[str, Tensor]:
    """Return all of the above by name.

    Args:
        accuracies: shape (clients,).
        groups: each client's group, numbered from 0; None means a single group.
        local: accuracy of every client's Local model, if known.
        measure: the measure of the scores.

    Returns:
        ``variance``, ``worst10``, ``jain`` and ``entropy``; with two groups or more ``gap``; with ``local`` the mean
        gain over it, ``local_gap``, and the share of clients that are better off alone, ``local_worse``.

    Example:
        >>> summary = fairness_summary(torch.tensor([0.5, 1.0]), groups=torch.tensor([0, 1]))
        >>> {name: round(float(value), 3) for name, value in summary.items()}
        {'variance': 625.0, 'worst10': 0.5, 'jain': 0.9, 'entropy': 0.918, 'gap': -0.5}
    """
    summary = {
        "variance": accuracy_variance(accuracies, measure),
        "worst10": worst_decile(accuracies, measure),
        "jain": jain_index(accuracies),
        "entropy": accuracy_entropy(accuracies),
    }
    if groups is not None and int(groups.max()) > 0:
        summary["gap"] = accuracy_gap(accuracies, groups, measure)
    if local is not None:
        gained = scored(gap_to_local(accuracies, local, measure))
        summary["local_gap"] = gained.mean()
        summary["local_worse"] = (gained < 0).to(gained).mean()
    return summary


def scored(accuracies: Tensor) -> Tensor:
    """Return the accuracies that are not NaN."""
    return accuracies[~accuracies.isnan()]


def _equal(scores: Tensor) -> Tensor:
    """Return 1, or NaN without any scores."""
    return scores.new_tensor(1.0 if len(scores) else float("nan"))


class ClientFairness(Metric):
    """Base class of the metrics below, with counts of every client's correct samples, accumulated over updates.

    Args:
        num_clients: number of clients.
        groups: each client's group, numbered from 0, int64, shape (clients,), for metrics that compare groups.
        local: accuracy of every client's Local model, shape (clients,), for metrics that compare with it.
    """

    full_state_update = False
    correct: Tensor
    total: Tensor
    groups: Tensor | None
    local: Tensor | None

    def __init__(
        self, num_clients: int, groups: Tensor | None = None, local: Tensor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        for name in ("correct", "total"):
            self.add_state(name, torch.zeros(num_clients, dtype=torch.float64), dist_reduce_fx="sum")
        self.register_buffer("groups", groups, persistent=False)
        self.register_buffer("local", local, persistent=False)

    def update(self, clients: Tensor, correct: Tensor, total: Tensor) -> None:
        """Add the scores of some clients.

        Args:
            clients: their numbers, shape (K,).
            correct: correctly classified samples, shape (K,).
            total: number of samples, shape (K,).
        """
        self.correct.index_add_(0, clients, correct.to(self.correct))
        self.total.index_add_(0, clients, total.to(self.total))

    @property
    def accuracies(self) -> Tensor:
        """Accuracy of every client, shape (clients,), NaN if never updated."""
        return self.correct / self.total

    def compute(self) -> Any:
        """Return all metrics by name; see :func:`fairness_summary`."""
        return fairness_summary(self.accuracies, self.groups, self.local)


class GroupAccuracy(ClientFairness):
    """Mean accuracy of every group; see :func:`group_means`.

    Example:
        >>> metric = GroupAccuracy(3, groups=torch.tensor([0, 0, 1]))
        >>> metric.update(torch.tensor([0, 1, 2]), correct=torch.tensor([4, 2, 1]), total=torch.tensor([4, 4, 4]))
        >>> metric.compute()
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    def compute(self) -> Tensor:
        """Return the means, shape (groups,)."""
        assert self.groups is not None, "GroupAccuracy needs groups"
        return group_means(self.accuracies, self.groups)


class AccuracyGap(ClientFairness):
    """Mean accuracy of the majority minus that of the minority; see :func:`accuracy_gap`."""

    def compute(self) -> Tensor:
        """Return the gap, 0-dim."""
        assert self.groups is not None, "AccuracyGap needs groups"
        return accuracy_gap(self.accuracies, self.groups)


class AccuracyVariance(ClientFairness):
    """Population variance over clients in percent squared; see :func:`accuracy_variance`."""

    def compute(self) -> Tensor:
        """Return the variance, 0-dim."""
        return accuracy_variance(self.accuracies)


class WorstDecile(ClientFairness):
    """Mean accuracy of the worst tenth of the clients; see :func:`worst_decile`."""

    def compute(self) -> Tensor:
        """Return the mean, 0-dim."""
        return worst_decile(self.accuracies)


class JainIndex(ClientFairness):
    """Jain's index; see :func:`jain_index`."""

    def compute(self) -> Tensor:
        """Return the index, 0-dim."""
        return jain_index(self.accuracies)


class AccuracyEntropy(ClientFairness):
    """Normalised entropy of accuracy; see :func:`accuracy_entropy`."""

    def compute(self) -> Tensor:
        """Return the entropy, 0-dim."""
        return accuracy_entropy(self.accuracies)


class GapToLocal(ClientFairness):
    """Gain of each client over training alone; see :func:`gap_to_local`."""

    def compute(self) -> Tensor:
        """Return the gains, shape (clients,)."""
        assert self.local is not None, "GapToLocal needs local"
        return gap_to_local(self.accuracies, self.local)
