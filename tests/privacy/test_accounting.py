"""Epsilon against dp-accounting, closed forms and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import kstest, norm

from fl_lightning.privacy.accounting import Release, epsilon, gaussian_epsilon
from fl_lightning.secret import SecretStream, new_key

#: noise, rate, releases, delta, and what dp-accounting 0.6.0 says (PLD, add or remove one).
KNOWN = [
    (1.0, 0.1, 100, 1e-3, 4.784350),
    (2.0, 0.05, 500, 1e-5, 2.532034),
    (0.7, 0.3, 20, 1e-4, 15.069716),
    (1.5, 0.5, 10, 1e-3, 4.017195),
    (1.0, 0.01, 3000, 1e-5, 3.192341),
    (4.0, 1.0, 50, 1e-5, 8.595866),
]


@pytest.mark.parametrize(("noise", "rate", "number", "delta", "theirs"), KNOWN)
def test_poisson_is_what_dp_accounting_says(
    noise: float, rate: float, number: int, delta: float, theirs: float
) -> None:
    ours = epsilon([Release("poisson", noise, rate, number)], delta)
    assert ours == pytest.approx(theirs, rel=2e-4)
    assert ours > theirs - 2e-6


@pytest.mark.parametrize(("noise", "rate", "number", "delta", "theirs"), KNOWN[:3])
def test_dp_accounting_still_says_so(noise: float, rate: float, number: int, delta: float, theirs: float) -> None:
    accounting = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: its pins are others")
    from dp_accounting import pld

    accountant = pld.PLDAccountant(accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise))
    accountant.compose(accounting.SelfComposedDpEvent(event, number))
    assert accountant.get_epsilon(delta) == pytest.approx(theirs, abs=1e-5)


def test_the_gaussian_mechanism_is_exact() -> None:
    """delta = Phi(1 / 2z - epsilon z) - e^epsilon Phi(-1 / 2z - epsilon z)."""
    for z in (0.5, 1.0, 3.0):
        found = gaussian_epsilon(z, 1e-4)
        assert norm.cdf(0.5 / z - found * z) - math.exp(found) * norm.cdf(-0.5 / z - found * z) == pytest.approx(1e-4)
    four = [Release("gaussian", 4.0, 1.0, 4)]
    assert epsilon(four, 1e-4) == pytest.approx(gaussian_epsilon(2.0, 1e-4))
    assert epsilon([Release("gaussian", 4.0, 1.0, 1)] * 4, 1e-4) == pytest.approx(epsilon(four, 1e-4))


def test_one_round_of_sampling_by_hand() -> None:
    """epsilon' = log(1 + q (e^epsilon - 1)) at delta' = q delta; for a fixed size a part at twice the distance."""
    z, q, delta = 1.3, 0.2, 1e-4
    one = math.log1p(q * math.expm1(gaussian_epsilon(z, delta)))
    assert epsilon([Release("poisson", z, q, 1)], q * delta) == pytest.approx(one, rel=1e-3)
    found = epsilon([Release("fixed", z, q, 1)], delta)
    alpha = 1 + math.expm1(found) / q
    far, near = (
        norm.cdf(s / 2 - math.log(alpha) / s) - alpha * norm.cdf(-s / 2 - math.log(alpha) / s) for s in (2 / z, 1 / z)
    )
    beta = math.exp(found) / alpha
    assert q * ((1 - beta) * far + beta * near) == pytest.approx(delta, rel=2e-3)


def test_a_fixed_size_costs_more_and_kinds_add_up() -> None:
    poisson, fixed = (epsilon([Release(kind, 1.0, 0.1, 20)], 1e-3) for kind in ("poisson", "fixed"))  # type: ignore[arg-type]
    assert fixed > poisson
    assert epsilon([Release("fixed", 1.0, 1.0, 3)], 1e-3) == epsilon([Release("gaussian", 1.0, 1.0, 3)], 1e-3)
    both = epsilon([Release("poisson", 1.0, 0.1, 20), Release("gaussian", 5.0, 1.0, 2)], 1e-3)
    assert poisson < both < poisson + gaussian_epsilon(5 / math.sqrt(2), 1e-3)
    assert epsilon([Release("gaussian", 0.0, 1.0, 1)], 0.1) == math.inf
    assert epsilon([Release("gaussian", 1.0, 1.0, 0)], 0.1) == 0.0


def test_a_fixed_size_against_an_attack() -> None:
    """Nine clients send -C and one sends C or nothing, one of ten is drawn: the bound holds for what is then seen."""
    z, q, bound = 1.0, 0.1, epsilon([Release("fixed", 1.0, 0.1, 1)], 1e-3)
    x = np.linspace(-12, 12, 200_001)
    others = norm.pdf(x, -1, z)
    first, second = (1 - q) * others + q * norm.pdf(x, 1, z), (1 - q) * others + q * norm.pdf(x, 0, z)
    for p, other in ((first, second), (second, first)):
        assert np.trapezoid(np.maximum(p - math.exp(bound) * other, 0), x) <= 1e-3


def test_a_fixed_size_against_an_attack_of_many_rounds() -> None:
    """The same attack in each of 100 rounds, composed on a grid of its own: epsilon is 12.2 at least, not 4.8."""
    z, q, step = 1.0, 0.1, 1e-3
    x = np.linspace(-11, 12, 100_001)
    others = (1 - q) * norm.pdf(x, -1, z)
    first, second = ((others + q * norm.pdf(x, mean, z)) * (x[1] - x[0]) for mean in (1, 0))
    places = np.floor(np.log(first / second) / step).astype(int)  # rounded down: no more than there is
    mass = np.bincount(places - places.min(), weights=first)
    size = 100 * len(mass)
    composed = np.fft.irfft(np.fft.rfft(mass, size) ** 100, size)
    losses = (np.arange(size) + 100 * places.min()) * step

    def delta(epsilon: float) -> float:
        return float(np.sum(composed[losses > epsilon] * -np.expm1(epsilon - losses[losses > epsilon])))

    assert delta(12.0) > 1e-3
    bound = epsilon([Release("fixed", z, q, 100)], 1e-3)
    assert 12.0 < bound < 21.0
    assert delta(bound) < 1e-3


def test_secret_draws_are_normal_and_nobody_elses() -> None:
    key = new_key()
    drawn = SecretStream(key).normal((200, 100))
    assert drawn.shape == (200, 100)
    assert kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-4
    assert bool((SecretStream(key).normal((200, 100)) == drawn).all())
    assert not bool((SecretStream(key, "other").normal((200, 100)) == drawn).any())
    assert not bool((SecretStream().normal((200, 100)) == drawn).any())
    stream = SecretStream(key)
    assert not bool((stream.normal((50,)) == stream.normal((50,))).any())
    uniform = SecretStream(key).uniform(10_000)
    assert 0 < uniform.min() <= uniform.max() <= 1
