"""Kumaraswamy, relaxed Bernoulli and stick-breaking, against scipy, numerical integration and Monte Carlo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor

from fl_lightning import distributions as dist

SHAPES = [(3.0, 0.5), (96.0, 1.0), (0.4, 2.5), (2.0, 7.0)]


def t(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def density(v: float, c: float, d: float) -> float:
    return float(c * d * v ** (c - 1) * (1 - v**c) ** (d - 1))


def samples(c: float, d: float, number: int = 40_000) -> Tensor:
    return dist.log_kumaraswamy(t(c), t(d), dist.log_uniform(np.random.default_rng(0), (number,))).exp()


@pytest.mark.parametrize(("c", "d"), SHAPES)
def test_kumaraswamy_samples_have_its_distribution(c: float, d: float) -> None:
    distance = stats.kstest(samples(c, d).numpy(), lambda v: 1 - (1 - v**c) ** d)
    assert distance.pvalue > 0.01


@pytest.mark.parametrize(("c", "d"), SHAPES)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_kumaraswamy_moments(c: float, d: float, order: int) -> None:
    moment = float(dist.kumaraswamy_moment(t(c), t(d), order))
    assert moment == pytest.approx(d * special.beta(1 + order / c, d), rel=1e-10)
    powers = samples(c, d) ** order
    assert moment == pytest.approx(float(powers.mean()), abs=5 * float(powers.std()) / 200)


def test_kumaraswamy_mean_with_d_of_one() -> None:
    assert float(dist.kumaraswamy_moment(t(4.0), t(1.0))) == pytest.approx(0.8)


@pytest.mark.parametrize(("c", "d"), [*SHAPES, (5.0, 1.5)])
@pytest.mark.parametrize("alpha", [0.7, 2.0, 20.0])
def test_kl_of_kumaraswamy_and_beta_by_integration(c: float, d: float, alpha: float) -> None:
    def integrand(u: float) -> float:  # over quantiles, where the density's poles are gone
        v = (1 - u ** (1 / d)) ** (1 / c)
        return float(np.log(density(v, c, d)) - stats.beta.logpdf(v, alpha, 1))

    expected, _ = integrate.quad(integrand, 0, 1, limit=500, epsabs=1e-9)
    assert float(dist.kl_kumaraswamy_beta(t(c), t(d), alpha)) == pytest.approx(expected, abs=1e-6)


def test_kl_of_kumaraswamy_and_beta_in_known_cases() -> None:
    assert float(dist.kl_kumaraswamy_beta(t(96.0), t(1.0), 96.0)) == pytest.approx(0.0, abs=1e-12)
    assert float(dist.kl_kumaraswamy_beta(t(3.0), t(0.5), 2.0)) == pytest.approx(0.507749, abs=1e-6)


@pytest.mark.parametrize("pi", [1e-3, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("p", [1e-4, 0.2, 0.999])
def test_kl_of_bernoullis(pi: float, p: float) -> None:
    got = float(dist.kl_bernoulli(t(pi).logit(), t(p).log()))
    assert got == pytest.approx(stats.entropy([pi, 1 - pi], [p, 1 - p]), abs=1e-12)


def test_kl_of_bernoullis_is_exact_in_single_precision_next_to_one() -> None:
    logits, log_p = torch.tensor(-2.0), torch.tensor(-1e-6)
    exact = float(dist.kl_bernoulli(logits.double(), log_p.double()))
    assert float(dist.kl_bernoulli(logits, log_p)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("temperature", "mean"), [(2 / 3, 0.14529), (0.1, 0.10118)])
def test_relaxed_bernoulli(temperature: float, mean: float) -> None:
    """Its mean is not pi, but it exceeds a half with probability pi."""
    a = t(0.1).logit()
    noise = dist.logistic(np.random.default_rng(1), (200_000,))
    b = dist.relaxed_bernoulli(a, noise, temperature)
    assert float((b > 0.5).double().mean()) == pytest.approx(0.1, abs=0.003)
    expected, _ = integrate.quad(
        lambda u: special.expit((special.logit(0.1) + special.logit(u)) / temperature), 0, 1, limit=200
    )
    assert expected == pytest.approx(mean, abs=1e-5)
    assert float(b.mean()) == pytest.approx(expected, abs=0.003)
    assert 0 <= float(b.min()) <= float(b.max()) <= 1


def test_noise_is_uniform_within_its_margins() -> None:
    u = dist.log_uniform(np.random.default_rng(2), (20_000,)).exp()
    assert stats.kstest(u.numpy(), "uniform").pvalue > 0.01
    assert stats.kstest(dist.logistic(np.random.default_rng(3), (20_000,)).numpy(), "logistic").pvalue > 0.01

    class Edges:
        def random(self, shape: tuple[int, ...]) -> np.ndarray:
            return np.array([0.0, 1.0])

    noise = dist.logistic(Edges(), (2,))  # type: ignore[arg-type]
    torch.testing.assert_close(noise.sigmoid(), torch.tensor([1e-6, 1 - 1e-6], dtype=torch.float64))


def test_sticks() -> None:
    v = torch.rand(5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).clamp(0.5)
    torch.testing.assert_close(dist.log_sticks(v.log()).exp(), v.cumprod(-1))
    assert float(dist.log_sticks(torch.zeros(3)).max()) < 0  # v = 1 leaves room for log(1 - p)


def test_prior() -> None:
    """v_k ~ Beta(alpha, 1), p_k their running product: mean and number of active factors."""
    alpha, factors = 4.0, 6
    sticks = np.cumprod(np.random.default_rng(0).beta(alpha, 1, (100_000, factors)), axis=1).mean(0)
    np.testing.assert_allclose(dist.prior_mean(factors, alpha).numpy(), sticks, atol=3e-3)
    assert dist.expected_active(120, 96.0) == pytest.approx(68.317, abs=5e-4)
    assert dist.expected_active(factors, alpha) == pytest.approx(float(dist.prior_mean(factors, alpha).sum()))


@pytest.mark.parametrize("y", [1e-3, 0.999, 95.999])
def test_softplus_inverse(y: float) -> None:
    assert float(torch.nn.functional.softplus(t(dist.softplus_inverse(y)))) == pytest.approx(y, rel=1e-12)


@pytest.mark.parametrize("c", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("d", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("u", [1e-6, 0.5, 1 - 1e-6])
@pytest.mark.parametrize("a", [-8.0, 8.0])
def test_values_and_gradients_stay_finite_in_single_precision(c: float, d: float, u: float, a: float) -> None:
    cs, ds, logits = (torch.full((50,), value, requires_grad=True) for value in (c, d, a))
    log_v = dist.log_kumaraswamy(cs, ds, torch.full((50,), u).log())
    kl = dist.kl_bernoulli(logits, dist.log_sticks(log_v)).sum() + dist.kl_kumaraswamy_beta(cs, ds, 96.0).sum()
    kl.backward()
    assert kl.isfinite()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in (cs, ds, logits))
