"""Robust rules: by hand on ten numbers, against NumPy and SciPy, and around their breakdown points."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import trim_mean
from torch import Tensor

from fl_lightning import robust
from fl_lightning.errors import FederationError
from fl_lightning.robust import Aggregation
from fl_lightning.wire import Message

#: Ten numbers, the last one hostile.
TEN = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1000.0]).double()[:, None]
ZERO = torch.zeros(1).double()


def test_ten_numbers_by_hand() -> None:
    assert float(robust.coordinate_median(TEN)) == 5.5
    assert float(robust.trimmed_mean(TEN, 1)) == pytest.approx((2 + 3 + 4 + 5 + 6 + 7 + 8 + 9) / 8)
    assert float(robust.trimmed_mean(TEN, 3)) == pytest.approx(np.mean([4, 5, 6, 7]))
    # K - f - 2 = 7 neighbours; of 5 they are 4, 6, 3, 7, 2, 8 and 1: 2 (1 + 4 + 9) + 16.
    scores = robust.krum_scores(TEN, hostile=1)
    assert float(scores[4]) == 2 * (1 + 4 + 9) + 16
    assert float(scores[0]) == sum(d * d for d in range(1, 8))
    # 4, 5 and 6 have as near neighbours, and the first of them is taken.
    assert float(robust.krum(TEN, 1)) == 4.0
    assert float(robust.krum(TEN, 1, chosen=3)) == 5.0
    assert float(robust.geometric_median(TEN)) == pytest.approx(5.5, abs=0.5)  # every point from 5 to 6 is one
    assert float(robust.norm_bounded(TEN, ZERO, 2.0)) == pytest.approx((1 + 9 * 2) / 10)
    assert float(robust.norm_bounded(TEN, ZERO)) == pytest.approx((1 + 2 + 3 + 4 + 6 * 5) / 10)
    # From 0 by 1.9, then from 1.9: 1 is 0.9 below, 2 and 3 are 0.1 and 1.1 above, the others by 2 at most.
    second = 1.9 + (-0.9 + 0.1 + 1.1 + 7 * 2) / 10
    assert float(robust.centred_clipping(TEN, ZERO, 2.0, steps=2)) == pytest.approx(second)
    # All point the trusted way and get its length.
    assert float(robust.fltrust(TEN, ZERO, torch.tensor([3.0]).double())) == pytest.approx(3.0)
    signed = torch.cat((TEN, torch.tensor([[-5.0]]).double()))
    assert float(robust.fltrust(signed, ZERO, torch.tensor([3.0]).double())) == pytest.approx(3.0)


def test_fltrust_weights_by_cosine() -> None:
    """Half a right angle off the trusted direction, and at a right angle to it."""
    values = torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 7.0]]).double()
    half = 0.5**0.5
    expected = (torch.tensor([2.0, 0.0]) + half * torch.tensor([2 * half, 2 * half])) / (1 + half)
    found = robust.fltrust(values, torch.zeros(2).double(), torch.tensor([2.0, 0.0]).double())
    torch.testing.assert_close(found, expected.double())
    away = robust.fltrust(-values[:1], torch.zeros(2).double(), torch.tensor([2.0, 0.0]).double())
    assert away.tolist() == [2.0, 0.0]


def test_against_numpy_and_scipy() -> None:
    values = torch.randn(11, 7, generator=torch.Generator().manual_seed(0)).double()
    np.testing.assert_allclose(robust.coordinate_median(values), np.median(values.numpy(), axis=0))
    np.testing.assert_allclose(robust.coordinate_median(values[:10]), np.median(values[:10].numpy(), axis=0))
    np.testing.assert_allclose(robust.trimmed_mean(values, 2), trim_mean(values.numpy(), 2 / 11, axis=0))
    found = robust.geometric_median(values, 1000).numpy()
    best = minimize(lambda p: np.linalg.norm(values.numpy() - p, axis=1).sum(), values.mean(0).numpy(), tol=1e-12)
    np.testing.assert_allclose(found, best.x, atol=1e-5)


def drawn(hostile: int, far: float = 1e6) -> Tensor:
    """Ten rows near the origin, the last ones of which say something else."""
    values = 0.1 * torch.randn(10, 5, generator=torch.Generator().manual_seed(1)).double()
    values[10 - hostile :] = far
    return values


RULES: list[tuple[str, int, Callable[[Tensor], Tensor]]] = [
    ("median", 4, robust.coordinate_median),
    ("trimmed", 3, lambda v: robust.trimmed_mean(v, 3)),
    ("krum", 3, lambda v: robust.krum(v, 3)),
    ("multi-krum", 3, lambda v: robust.krum(v, 3, chosen=7)),
    ("geometric", 4, robust.geometric_median),
    ("clipping", 4, lambda v: robust.centred_clipping(v, torch.zeros(5).double(), 1.0, steps=100)),
]


@pytest.mark.parametrize(("name", "most", "rule"), RULES, ids=[name for name, _, _ in RULES])
def test_up_to_the_breakdown_point_and_beyond(name: str, most: int, rule: Callable[[Tensor], Tensor]) -> None:
    """So many hostile rows as the rule stands change little; half of all rows, or one more than it knows of, win."""
    assert float(rule(drawn(most)).norm()) < 2.5
    beyond = {"trimmed": 4, "krum": 6, "multi-krum": 4, "clipping": 6}.get(name, 6)
    assert float(rule(drawn(beyond)).norm()) > 10


def test_one_row_breaks_the_mean_and_a_bound_limits_every_row() -> None:
    assert float(drawn(1).mean(0).norm()) > 1e5
    for hostile in range(6):
        moved = robust.norm_bounded(drawn(hostile), torch.zeros(5).double(), 0.5)
        honest = robust.norm_bounded(drawn(0), torch.zeros(5).double(), 0.5)
        assert float((moved - honest).norm()) <= 2 * 0.5 * hostile / 10 + 1e-9
    trusted = 0.1 * torch.ones(5).double()
    for hostile in range(10):  # all of them
        found = robust.fltrust(drawn(hostile, -1e6), torch.zeros(5).double(), trusted)
        assert float(found.norm()) <= float(trusted.norm()) + 1e-9


def messages(values: Tensor) -> list[Message]:
    return [
        Message(
            k, {"w": row.float().view(1, 5), "b": row[:2].float(), "count": torch.tensor(k)}, 10**9 if k == 9 else 1
        )
        for k, row in enumerate(values)
    ]


@pytest.mark.parametrize(
    "rule",
    [
        robust.Median(),
        robust.TrimmedMean(0.2),
        robust.Krum(2),
        robust.Krum(2, chosen=None),
        robust.GeometricMedian(),
        robust.NormBound(),
        robust.CentredClipping(),
        robust.FLTrust(trusted=0),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_messages_are_aggregated_jointly_whatever_they_claim(rule: Aggregation) -> None:
    """A hostile client with a billion samples is one client; entries come back in their shapes and types."""
    found = rule(messages(drawn(1)), {"w": torch.zeros(1, 5), "b": torch.zeros(2)})
    assert list(found) == ["w", "b", "count"]
    assert (found["w"].shape, found["w"].dtype, found["count"].dtype) == ((1, 5), torch.float32, torch.int64)
    assert float(found["w"].norm()) < 1
    shuffled = rule(messages(drawn(1))[::-1], {"w": torch.zeros(1, 5), "b": torch.zeros(2)})
    assert torch.equal(found["w"], shuffled["w"])
    assert list(rule(messages(drawn(0)), names=["b"])) == ["b"]


def test_impossible_settings_are_rejected() -> None:
    for attempt, sentence in (
        (lambda: robust.krum(TEN, 4), "Krum withstands 4 hostile clients among 11 or more, not among 10"),
        (lambda: robust.krum(TEN, 1, 10), "keeps between 1 and 9 clients, not 10"),
        (lambda: robust.trimmed_mean(TEN, 5), "cannot leave out 5 at each end"),
        (lambda: robust.TrimmedMean(0.5), "share must be at least 0 and below 0.5"),
        (lambda: robust.NormBound(0.0), "bound must be greater than 0"),
        (lambda: robust.FLTrust(12)(messages(drawn(0))), "FLTrust needs client 12"),
    ):
        with pytest.raises(FederationError, match=sentence):
            attempt()
