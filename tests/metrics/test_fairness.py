"""Fairness metrics against numpy, scipy, hand numbers and the identities that bind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning import metrics
from fl_lightning.metrics import (
    accuracy_entropy,
    accuracy_gap,
    accuracy_variance,
    corrected_variance,
    corrected_worst_decile,
    fairness_intervals,
    fairness_summary,
    gap_interval,
    gap_to_local,
    group_means,
    jain_index,
    majority_minority,
    worst_decile,
    worst_tenth,
)

NAN = float("nan")


def accuracies(clients: int, seed: int) -> Tensor:
    return torch.rand(clients, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


runs = given(st.integers(2, 60), st.integers(0, 10_000))


@settings(max_examples=60, deadline=None)
@runs
def test_equal_numpy_and_scipy(clients: int, seed: int) -> None:
    a = accuracies(clients, seed)
    n = a.numpy()
    assert float(accuracy_variance(a)) == pytest.approx(float(np.var(100 * n)))
    assert float(jain_index(a)) == pytest.approx(n.mean() ** 2 / (n**2).mean())
    assert float(accuracy_entropy(a)) == pytest.approx(scipy.stats.entropy(n) / np.log(clients))
    worst = np.sort(n)[: int(np.ceil(clients / 10))]
    assert float(worst_decile(a)) == pytest.approx(worst.mean()) == pytest.approx(float(worst_tenth(a)))


@settings(max_examples=60, deadline=None)
@runs
def test_sub_populations_bind_mean_and_variance(clients: int, seed: int) -> None:
    """mean = (N1 Maj + N2 Min) / N, and variance >= N1 N2 / N^2 Gap^2."""
    a = accuracies(clients, seed)
    minority = max(1, clients // 5)
    groups = torch.cat((torch.zeros(clients - minority), torch.ones(minority))).long()
    major, minor = group_means(a, groups)
    n1, n2 = clients - minority, minority
    assert float(a.mean()) == pytest.approx(float(n1 * major + n2 * minor) / clients)
    gap = 100 * float(accuracy_gap(a, groups))
    assert gap == pytest.approx(100 * float(major - minor))
    assert float(accuracy_variance(a)) >= n1 * n2 / clients**2 * gap**2 - 1e-9


def test_variance_between_groups_is_the_bound_when_groups_are_even_within() -> None:
    a, groups = torch.tensor([0.9] * 5 + [0.5]), torch.tensor([0] * 5 + [1])
    assert float(accuracy_variance(a)) == pytest.approx(5 * 1 / 36 * 40.0**2, rel=1e-5)
    assert float(accuracy_gap(a, groups)) == pytest.approx(0.4)


def test_hand_numbers() -> None:
    a = torch.tensor([0.9, 0.8, 0.7, 0.4], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1])
    assert group_means(a, groups).tolist() == pytest.approx([0.8, 0.4])
    assert float(accuracy_gap(a, groups)) == pytest.approx(0.4)
    assert float(accuracy_variance(a)) == pytest.approx((20**2 + 10**2 + 0 + 30**2) / 4)  # mean 70%
    assert float(jain_index(a)) == pytest.approx(2.8**2 / (4 * 2.1))
    assert float(worst_decile(a)) == pytest.approx(0.4)
    local = torch.tensor([0.95, 0.7, 0.7, 0.1])
    assert gap_to_local(a, local).tolist() == pytest.approx([-0.05, 0.1, 0.0, 0.3], abs=1e-7)
    summary = fairness_summary(a, groups, torch.tensor([0.95, 0.7, 0.7, 0.1], dtype=torch.float64))
    assert float(summary["local_gap"]) == pytest.approx(0.35 / 4)
    assert float(summary["local_worse"]) == pytest.approx(0.25)


def test_ends_of_the_indices() -> None:
    equal, one = torch.full((8,), 0.3), torch.tensor([1.0] + [0.0] * 7)
    assert float(jain_index(equal)) == pytest.approx(1)
    assert float(jain_index(one)) == pytest.approx(1 / 8)
    assert float(accuracy_entropy(equal)) == pytest.approx(1)
    assert float(accuracy_entropy(one)) == 0
    assert float(accuracy_variance(equal)) == pytest.approx(0, abs=1e-9)
    for function in (jain_index, accuracy_entropy):
        assert float(function(torch.zeros(5))) == 1  # all equal
        assert float(function(torch.tensor([0.4]))) == 1


@settings(max_examples=30, deadline=None)
@runs
def test_indices_do_not_depend_on_scale_or_order(clients: int, seed: int) -> None:
    a = accuracies(clients, seed)
    mixed = a[torch.randperm(clients, generator=torch.Generator().manual_seed(seed))]
    for function in (jain_index, accuracy_entropy):
        assert float(function(a / 2)) == pytest.approx(float(function(a)))
        assert float(function(mixed)) == pytest.approx(float(function(a)))


def test_majority_is_the_largest_group_whoever_was_scored() -> None:
    assert majority_minority(torch.tensor([0, 1, 1])) == (1, 0)
    assert majority_minority(torch.tensor([0, 1])) == (0, 1)
    groups = torch.tensor([0, 0, 0, 1, 1])
    a = torch.tensor([0.5, NAN, NAN, 0.75, 0.25])
    assert float(accuracy_gap(a, groups)) == 0.0
    assert torch.isnan(accuracy_gap(torch.tensor([0.5, 0.5, 0.5, NAN, NAN]), groups))


def test_clients_that_were_not_scored_are_left_out() -> None:
    a, groups, local = accuracies(12, 0), torch.arange(12) % 2, accuracies(12, 1)
    kept = torch.arange(12) < 7
    holes = torch.where(kept, a, NAN)
    with_holes, without = fairness_summary(holes, groups, local), fairness_summary(a[:7], groups[:7], local[:7])
    assert {k: float(v) for k, v in with_holes.items()} == pytest.approx({k: float(v) for k, v in without.items()})
    assert gap_to_local(holes, local).isnan().tolist() == (~kept).tolist()
    nobody = fairness_summary(torch.full((3,), NAN), torch.tensor([0, 0, 1]), torch.zeros(3))
    assert all(value.isnan() for value in nobody.values())


GROUPS, LOCAL = torch.tensor([0, 0, 0, 0, 1, 1]), accuracies(6, 3)
METRICS: dict[str, tuple[dict[str, Tensor], Any]] = {
    "GroupAccuracy": ({"groups": GROUPS}, lambda a: group_means(a, GROUPS)),
    "AccuracyGap": ({"groups": GROUPS}, lambda a: accuracy_gap(a, GROUPS)),
    "AccuracyVariance": ({}, accuracy_variance),
    "WorstDecile": ({}, worst_decile),
    "JainIndex": ({}, jain_index),
    "AccuracyEntropy": ({}, accuracy_entropy),
    "GapToLocal": ({"local": LOCAL}, lambda a: gap_to_local(a, LOCAL)),
    "ClientFairness": ({"groups": GROUPS, "local": LOCAL}, lambda a: fairness_summary(a, GROUPS, LOCAL)),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_add_up_batches_and_equal_their_functions(name: str) -> None:
    options, function = METRICS[name]
    metric = getattr(metrics, name)(6, **options)
    correct, total = torch.tensor([3, 5, 2, 7, 1, 0]), torch.tensor([4, 5, 9, 8, 6, 3])
    metric.update(torch.tensor([5, 0, 2]), correct[[5, 0, 2]], total[[5, 0, 2]])
    metric.update(torch.tensor([1, 3, 4]), correct[[1, 3, 4]] - 1, total[[1, 3, 4]] - 2)
    metric.update(torch.tensor([4, 1, 3]), torch.ones(3), torch.full((3,), 2))
    torch.testing.assert_close(metric.compute(), function(correct.double() / total))
    metric.reset()
    assert metric.accuracies.isnan().all()


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_two_processes_are_summed(name: str) -> None:
    """Add states, as torchmetrics does across ranks."""
    options, _ = METRICS[name]
    halves = [getattr(metrics, name)(6, **options) for _ in range(3)]
    for metric, clients in zip(halves, ([0, 1, 2], [3, 4, 5], range(6)), strict=True):
        index = torch.tensor(list(clients))
        metric.update(index, index + 1, torch.full_like(index, 8))
    for state in ("correct", "total"):
        setattr(halves[0], state, getattr(halves[0], state) + getattr(halves[1], state))
    torch.testing.assert_close(halves[0].compute(), halves[2].compute())


def test_sampling_of_test_samples_is_taken_off_the_variance() -> None:
    """Clients of equal true accuracy 0.8 with 20 samples each: a variance of 80, of which little is left."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.full((100,), 20)
    raw, corrected, spread = [], [], []
    for _ in range(100):
        right = torch.bernoulli(torch.full((100, 20), 0.8), generator=generator)
        raw.append(float(accuracy_variance(right.mean(1))))
        corrected.append(float(corrected_variance(right.mean(1), samples)))
        chance = torch.where(torch.arange(100) < 50, 0.7, 0.9)[:, None].expand(100, 20)
        other = torch.bernoulli(chance, generator=generator).mean(1)
        spread.append(float(corrected_variance(other, samples)))
    assert sum(raw) / 100 == pytest.approx(80, rel=0.06)
    assert sum(corrected) / 100 < 8
    assert sum(spread) / 100 == pytest.approx(100, rel=0.06)  # 0.1 squared, in percent


def test_accuracies_that_differ_by_sampling_alone_have_a_corrected_variance_of_nothing() -> None:
    """By hand: 100 clients at 0.8 of 20 samples, as many right answers as the binomial distribution says."""
    right = torch.arange(21)
    chance = torch.distributions.Binomial(20, torch.tensor(0.8).double()).log_prob(right.double()).exp()
    clients = (100 * chance).round().long()
    accuracies = (right / 20).double().repeat_interleave(clients)
    samples = torch.full((len(accuracies),), 20)
    assert float(accuracy_variance(accuracies)) == pytest.approx(80, abs=6)
    assert float(corrected_variance(accuracies, samples)) < 1


def test_the_interval_of_a_gap_holds_the_truth() -> None:
    """Two groups of 200 clients at 0.8 and 0.7, each with a standard deviation of 0.1."""
    draws = 0.1 * torch.randn(2, 200, generator=torch.Generator().manual_seed(0)).double()
    accuracies, groups = torch.cat((0.8 + draws[0], 0.7 + draws[1])), torch.arange(400) // 200
    low, high = gap_interval(accuracies, groups)
    assert low < 0.1 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.1 * (2 / 200) ** 0.5, rel=0.15)
    assert all(end != end for end in gap_interval(torch.tensor([0.5, float("nan")]), torch.tensor([0, 1])))


def test_bad_luck_is_taken_off_the_worst_tenth() -> None:
    """Of equal clients the worst tenth is that of luck; of clients at 0.5 to 0.95 it is about what it truly is."""
    generator = torch.Generator().manual_seed(0)
    samples, true = torch.full((200,), 20), torch.linspace(0.5, 0.95, 200)
    equal, raw, spread, naive = [], [], [], []
    for _ in range(50):
        even = torch.bernoulli(torch.full((200, 20), 0.8), generator=generator).mean(1)
        raw.append(float(worst_decile(even)))
        equal.append(float(corrected_worst_decile(even, samples)))
        uneven = torch.bernoulli(true[:, None].expand(200, 20), generator=generator).mean(1)
        spread.append(float(corrected_worst_decile(uneven, samples)))
        naive.append(float(worst_decile(uneven)))
    assert sum(raw) / 50 < 0.66
    assert sum(equal) / 50 > 0.76
    truth = float(worst_decile(true))
    assert abs(sum(spread) / 50 - truth) < 0.5 * abs(sum(naive) / 50 - truth)
    some = torch.tensor([float("nan"), 0.5, 0.5])
    assert float(corrected_worst_decile(some, torch.tensor([9, 9, 9]))) == 0.5


def test_intervals_hold_the_truth() -> None:
    """Means of squares have a standard error of variance * sqrt(2 / n) for Gaussian clients."""
    accuracies = 0.5 + 0.05 * torch.randn(400, generator=torch.Generator().manual_seed(1)).double()
    low, high = fairness_intervals(accuracies, draws=400)["variance"]
    assert low < 25 < high
    assert high - low == pytest.approx(2 * 1.96 * 25 * (2 / 400) ** 0.5, rel=0.25)
    assert fairness_intervals(torch.tensor([float("nan")])) == {}
