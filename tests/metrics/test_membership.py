"""The measures of membership attacks against scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score, roc_curve

from fl_lightning.metrics import (
    MembershipAttack,
    attack_accuracy,
    attack_auroc,
    attack_f1,
    best_accuracy,
    best_threshold,
    membership_summary,
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
    for rate in (0.001, 0.01, 0.3):
        assert float(tpr_at_fpr(s, m, rate)) == pytest.approx(tpr[fpr <= rate].max())
    assert float(best_accuracy(s, m)) == pytest.approx(0.5 + (tpr - fpr).max() / 2)
    line = best_threshold(s, m)
    called = scores >= line
    assert (called[members].mean() + 1 - called[~members].mean()) / 2 == pytest.approx(float(best_accuracy(s, m)))


def test_ends_of_the_scale() -> None:
    members = torch.tensor([True, True, False, False])
    perfect, useless, inverse = torch.tensor([3.0, 2, 1, 0]), torch.ones(4), torch.tensor([0.0, 1, 2, 3])
    assert [float(attack_auroc(s, members)) for s in (perfect, useless, inverse)] == [1.0, 0.5, 0.0]
    assert [float(tpr_at_fpr(s, members, 0.01)) for s in (perfect, useless, inverse)] == [1.0, 0.0, 0.0]
    assert [float(best_accuracy(s, members)) for s in (perfect, useless, inverse)] == [1.0, 0.5, 0.5]
    assert best_threshold(inverse, members) > 3
    assert float(attack_f1(useless, members, 2.0)) == 0.0


def test_metric_adds_up() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, members = torch.rand(50, generator=generator), torch.rand(50, generator=generator) < 0.5
    metric = MembershipAttack(0.4)
    for part in torch.split(torch.arange(50), 7):
        metric.update(scores[part], members[part])
    assert metric.compute() == membership_summary(scores, members, 0.4)


def test_scores_that_are_no_numbers_are_no_attack() -> None:
    members = torch.tensor([True, True, False])
    lost = membership_summary(torch.tensor([0.9, torch.nan, 0.1]), members)
    assert all(value.isnan() for value in lost.values())
    assert lost.keys() == membership_summary(torch.tensor([0.9, 0.2, 0.1]), members).keys()
