"""The measures of membership attacks against scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, bootstrap
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score, roc_curve

from fl_lightning.metrics import (
    MembershipAttack,
    attack_accuracy,
    attack_auroc,
    attack_f1,
    auroc_interval,
    best_accuracy,
    best_threshold,
    clopper_pearson,
    membership_intervals,
    membership_summary,
    roc,
    tpr_at_fpr,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_against_scikit_learn(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    members = rng.random(300) < 0.4
    scores = rng.random(300) + 0.3 * members
    scores = np.round(scores, 1) if ties else scores
    s, m = torch.from_numpy(scores), torch.from_numpy(members)
    assert float(attack_accuracy(s, m)) == pytest.approx(accuracy_score(members, scores >= 0.5))
    assert float(attack_f1(s, m)) == pytest.approx(f1_score(members, scores >= 0.5))
    assert float(attack_auroc(s, m)) == pytest.approx(roc_auc_score(members, scores))
    fpr, tpr, _ = roc_curve(members, scores, drop_intermediate=False)
    assert [rate.tolist() for rate in roc(s, m)] == [fpr.tolist(), tpr.tolist()]
    assert bool(tpr_at_fpr(s, m, 0.001).isnan())
    for rate in (0.01, 0.3):
        assert float(tpr_at_fpr(s, m, rate)) == pytest.approx(tpr[fpr <= rate].max())
    assert float(best_accuracy(s, m)) == pytest.approx(0.5 + (tpr - fpr).max() / 2)
    line = best_threshold(s, m)
    called = scores >= line
    assert (called[members].mean() + 1 - called[~members].mean()) / 2 == pytest.approx(float(best_accuracy(s, m)))


def test_ends_of_the_scale() -> None:
    members = torch.tensor([True, True, False, False])
    perfect, useless, inverse = torch.tensor([3.0, 2, 1, 0]), torch.ones(4), torch.tensor([0.0, 1, 2, 3])
    assert [float(attack_auroc(s, members)) for s in (perfect, useless, inverse)] == [1.0, 0.5, 0.0]
    assert [float(tpr_at_fpr(s, members, 0.5)) for s in (perfect, useless, inverse)] == [1.0, 0.0, 0.0]
    assert bool(tpr_at_fpr(perfect, members, 0.49).isnan())  # of two non-members a half is the smallest share
    assert [float(best_accuracy(s, members)) for s in (perfect, useless, inverse)] == [1.0, 0.5, 0.5]
    assert best_threshold(inverse, members) > 3
    assert float(attack_f1(useless, members, 2.0)) == 0.0


def test_scores_of_any_size_keep_their_order() -> None:
    scores, members = torch.tensor([40.0, 39.0, 41.0, -40.0]), torch.tensor([True, False, True, False])
    for unit in (1e-9, 1.0, 1e9):
        assert float(attack_auroc(unit * scores, members)) == 1.0
    assert bool(attack_auroc(scores, torch.ones(4, dtype=torch.bool)).isnan()), "nobody to tell members from"


def test_metric_adds_up() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, members = torch.rand(50, generator=generator), torch.rand(50, generator=generator) < 0.5
    metric = MembershipAttack(0.4)
    for part in torch.split(torch.arange(50), 7):
        metric.update(scores[part], members[part])
    found, expected = metric.compute(), membership_summary(scores, members, 0.4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], v) or bool(found[n].isnan() & v.isnan()) for n, v in expected.items())


def test_scores_that_are_no_numbers_are_no_attack() -> None:
    members = torch.tensor([True, True, False])
    lost = membership_summary(torch.tensor([0.9, torch.nan, 0.1]), members)
    assert all(value.isnan() for value in lost.values())
    assert lost.keys() == membership_summary(torch.tensor([0.9, 0.2, 0.1]), members).keys()


def test_intervals_of_shares_are_those_of_scipy() -> None:
    for hits, number in ((0, 10), (3, 10), (10, 10), (50, 2000)):
        theirs = binomtest(hits, number).proportion_ci(0.95, method="exact")
        assert clopper_pearson(hits, number) == pytest.approx((theirs.low, theirs.high))


def test_intervals_contain_chance_for_scores_that_know_nothing() -> None:
    """Of 100 useless attacks about five intervals miss 0.5; they are as wide as the AUROC's standard error says."""
    missed, widths = 0, []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        scores, members = torch.from_numpy(rng.random(120)), torch.arange(120) < 60
        low, high = auroc_interval(scores, members, seed)
        missed += not low <= 0.5 <= high
        widths.append(high - low)
    assert missed <= 11
    error = ((60 + 60 + 1) / (12 * 60 * 60)) ** 0.5  # of the Mann-Whitney statistic without an effect
    assert np.mean(widths) == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_the_bootstrap_is_that_of_scipy() -> None:
    rng = np.random.default_rng(1)
    members = np.arange(80) < 30
    scores = np.round(rng.normal(size=80) + members, 1)
    theirs = bootstrap(
        (scores[members], scores[~members]),
        lambda a, b: roc_auc_score([1] * len(a) + [0] * len(b), np.concatenate((a, b))),
        vectorized=False,
        method="percentile",
        n_resamples=1500,
        rng=rng,
    ).confidence_interval
    ours = auroc_interval(torch.from_numpy(scores), torch.from_numpy(members), draws=4000)
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.015)


def test_intervals_by_name_and_the_curve() -> None:
    scores, members = torch.rand(300, generator=torch.Generator().manual_seed(0)), torch.arange(300) < 100
    found = membership_intervals(scores, members)
    assert list(found) == [f"{n}_{e}" for n in ("auroc", "tpr_at_1", "tpr_at_01") for e in ("low", "high")]
    assert found["auroc_low"] < float(attack_auroc(scores, members)) < found["auroc_high"]
    assert np.isnan(found["tpr_at_01_low"])  # 200 non-members tell no share of a thousandth
    alarms, hits = roc(scores, members)
    fpr, tpr, _ = roc_curve(members.numpy(), scores.numpy(), drop_intermediate=False)
    np.testing.assert_allclose(alarms, fpr)
    np.testing.assert_allclose(hits, tpr)
