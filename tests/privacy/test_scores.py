"""Membership scores by hand, against independent formulas, and on models whose members are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.metrics import attack_auroc
from fl_lightning.privacy.scores import OWN_VARIANCE, lira_offline, lira_online, loss_scores, rmia


def game(models: int, samples: int = 400, gain: float = 1.5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log odds of a target and of models, each trained on a random half: N(hardness, 1), plus a gain for members."""
    rng = np.random.default_rng(seed)
    hardness = 3 * rng.normal(size=samples)
    seen = rng.random((models + 1, samples)) < 0.5
    odds = torch.from_numpy(hardness + gain * seen + rng.normal(size=seen.shape))
    return odds[0], odds[1:], torch.from_numpy(seen[0]), torch.from_numpy(seen[1:])


def test_lira_is_the_ratio_of_two_gaussians() -> None:
    target, shadows, _, inside = game(64, 30)
    assert int(inside.sum(0).min()) >= OWN_VARIANCE
    for k in range(30):
        sides = [shadows[mask, k].numpy() for mask in (inside[:, k], ~inside[:, k])]
        ratio = [norm.logpdf(float(target[k]), side.mean(), side.std(ddof=1)) for side in sides]
        assert float(lira_online(target, shadows, inside, ~inside)[k]) == pytest.approx(ratio[0] - ratio[1])
        z = (float(target[k]) - sides[1].mean()) / sides[1].std(ddof=1)
        assert float(lira_offline(target, shadows, ~inside)[k]) == pytest.approx(z)


def test_few_models_share_a_variance() -> None:
    target, shadows = torch.tensor([1.0, 1.0]).double(), torch.tensor([[0.0, 2.0], [2.0, 2.0]]).double()
    both = torch.ones(2, 2, dtype=torch.bool)
    # Means 1 and 2, squares 2 and 0, of four values less two means: a variance of 1.
    assert lira_offline(target, shadows, both).tolist() == [0.0, -1.0]


def test_the_stronger_attack_wins_where_samples_differ_in_hardness() -> None:
    """Members are 1.5 easier, samples differ by 3: the best possible test, N(1.5, 1) against N(0, 1), reaches 0.856."""
    target, shadows, members, inside = game(64)
    scores = {
        "loss": loss_scores(torch.nn.functional.softplus(-target)),
        "offline": lira_offline(target, shadows, ~inside),
        "online": lira_online(target, shadows, inside, ~inside),
        "rmia": rmia(target.sigmoid(), shadows.sigmoid(), ~inside, target.sigmoid(), shadows.sigmoid(), inside),
    }
    found = {name: float(attack_auroc(value, members)) for name, value in scores.items()}
    best = float(norm.cdf(1.5 / 2**0.5))
    assert found["loss"] < 0.7
    assert found["offline"] == pytest.approx(best, abs=0.04)
    assert found["online"] == pytest.approx(best, abs=0.04)
    assert found["rmia"] > found["loss"] + 0.1


def test_nothing_learnt_is_chance() -> None:
    target, shadows, members, inside = game(32, 2000, gain=0.0)
    for value in (
        loss_scores(-target),
        lira_offline(target, shadows, ~inside),
        lira_online(target, shadows, inside, ~inside),
        rmia(target.sigmoid(), shadows.sigmoid(), ~inside, target.sigmoid(), shadows.sigmoid()),
    ):
        assert float(attack_auroc(value, members)) == pytest.approx(0.5, abs=0.04)


def test_rmia_by_hand() -> None:
    """Offline with offset 0.3 and p = 0.5: the mean is (0.65 + 0.7) / 2, and others have 0.2 over the same."""
    half = torch.full((1, 2), 0.5).double()
    seen = torch.ones(1, 2, dtype=torch.bool)
    target, others = torch.tensor([0.9, 0.1]).double(), torch.tensor([0.2, 0.2, 0.95]).double()
    found = rmia(target, half, seen, others, torch.full((1, 3), 0.5).double())
    assert [int(value * 4) for value in found] == [2, 0]
    stricter = rmia(target, half, seen, others, torch.full((1, 3), 0.5).double(), gamma=10.0)
    assert [int(value * 4) for value in stricter] == [0, 0]


@pytest.mark.parametrize("online", [True, False])
def test_rmia_is_that_of_plain_loops(online: bool) -> None:
    """Sample by sample and other by other, as the paper writes it; the order of samples is the same but for ties."""
    target, shadows, _, inside = game(8, 30)
    p, q = target.sigmoid(), shadows.sigmoid()
    rng = np.random.default_rng(2)
    others, theirs = torch.from_numpy(rng.random(40)), torch.from_numpy(rng.random((8, 40)))
    a = 0.3
    expected = []
    for k in range(30):
        outs = [float(q[m, k]) for m in range(8) if not inside[m, k]]
        ins = [float(q[m, k]) for m in range(8) if inside[m, k]]
        out = sum(outs) / len(outs)
        mean = (out + sum(ins) / len(ins)) / 2 if online else ((1 + a) * out + 1 - a) / 2
        hits = 0
        for z in range(40):
            ratio = float(p[k]) / mean / (float(others[z]) / (((1 + a) * float(theirs[:, z].mean()) + 1 - a) / 2))
            hits += ratio >= 1
        expected.append(hits)
    found = rmia(p, q, ~inside, others, theirs, inside if online else None) * 41
    assert [int(value) for value in found] == expected


def test_samples_without_a_reference_are_refused() -> None:
    target, shadows, _, inside = game(4, 10)
    with pytest.raises(FederationError, match="needs a reference model on this side"):
        lira_offline(target, shadows, torch.zeros_like(inside))
