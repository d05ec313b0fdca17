"""Epsilon of releases with Gaussian noise, by privacy loss distributions.

A release is a pair of distributions P and Q of the server's mean: with a client's update and with 0 instead. The
distribution of log P/Q under P is discretised pessimistically (Doroshenko et al., 2022, connect the dots) and composed
by Fourier transforms. There are three kinds of releases, in units of the sensitivity:

``gaussian``
    Participation is known: N(1, z) against N(0, z).
``poisson``
    Every client secretly and independently takes part with probability q: (1 - q) N(0, z) + q N(1, z) against N(0, z).
``fixed``
    A secret cohort of fixed size that contains a client with probability q. The distance of its sum is at most 1 to the
    sum with 0 instead of the client, and at most 2 to that of a cohort with another client instead. By advanced joint
    convexity (Balle et al., 2018), with D_d the divergence of two Gaussians at distance d, alpha' = 1 + q (alpha - 1)
    and beta = alpha' / alpha, the divergence at alpha' >= 1 is at most q ((1 - beta) D_2(alpha) + beta D_1(alpha)) for
    the sum with the client against the one without, and q D_1(alpha) in the other direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from scipy.special import log_ndtr, ndtr

from fl_lightning.errors import FederationError

Kind = Literal["gaussian", "poisson", "fixed"]
Array = NDArray[np.float64]
#: Maximum grid spacing of losses; smaller if many releases are composed.
STEP = 1e-3
#: Mass of the truncated tails, which counts as an infinite loss.
TAIL = 1e-12


class Release(NamedTuple):
    """Releases of one kind."""

    kind: Kind
    noise: float
    """Standard deviation of the noise over the sensitivity."""
    rate: float
    """Participation probability of a client."""
    number: int


class LossDistribution(NamedTuple):
    """Masses of the losses (first + i) * STEP, and of an infinite loss."""

    first: int
    mass: Array
    infinite: float

    def delta(self, epsilon: float, step: float) -> float:
        """Return the hockey-stick divergence at epsilon."""
        losses = (self.first + np.arange(len(self.mass))) * step
        above = losses > epsilon
        return self.infinite + float(np.sum(self.mass[above] * -np.expm1(epsilon - losses[above])))

    def composed(self, other: LossDistribution) -> LossDistribution:
        """Compose two releases."""
        mass = np.maximum(fftconvolve(self.mass, other.mass), 0.0)
        infinite = 1 - (1 - self.infinite) * (1 - other.infinite)
        return _trimmed(LossDistribution(self.first + other.first, mass, infinite))

    def times(self, number: int) -> LossDistribution:
        """Compose ``number`` such releases."""
        found: LossDistribution | None = None
        power = self
        while number:
            if number & 1:
                found = power if found is None else found.composed(power)
            number >>= 1
            if number:
                power = power.composed(power)
        assert found is not None
        return found

    def epsilon(self, delta: float, step: float) -> float:
        """Return the smallest epsilon, at least 0, for this delta."""
        if self.infinite > delta:
            return math.inf
        low, high = 0.0, max(0.0, (self.first + len(self.mass)) * step)
        if self.delta(0.0, step) <= delta:
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle, step) > delta else (low, middle)
        return high


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return an upper bound of epsilon by privacy loss distributions; infinite without noise, 0 without releases.

    Args:
        releases: of any kinds.
        delta: probability that the bound fails.

    Example:
        >>> round(epsilon([Release("poisson", 1.0, 0.1, 100)], 1e-3), 2)
        4.78
    """
    releases = [one for one in releases if one.number]
    if not releases:
        return 0.0
    if any(one.noise <= 0 for one in releases):
        return math.inf
    # Gaussian releases compose to a single one.
    known = sum(one.number / one.noise**2 for one in releases if _kind(one) == "gaussian")
    sampled = [one for one in releases if _kind(one) != "gaussian"]
    if known:
        sampled.append(Release("gaussian", known**-0.5, 1.0, 1))
    if len(sampled) == 1 and known:
        return gaussian_epsilon(known**-0.5, delta)
    step = STEP / max(1.0, math.sqrt(sum(one.number for one in sampled) / 100))
    return max(_composed(sampled, removed, step).epsilon(delta, step) for removed in (True, False))


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Return the exact epsilon of one release of the Gaussian mechanism (Balle and Wang, 2018)."""

    def of(value: float) -> float:
        return float(_gaussian_delta(np.array(value), noise))

    low, high = 0.0, 1.0
    if of(0.0) <= delta:
        return 0.0
    while of(high) > delta:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) > delta else (low, middle)
    return high


def _gaussian_delta(epsilon: Array, noise: float) -> Array:
    """Return the hockey-stick divergence of N(1, noise) and N(0, noise)."""
    found: Array = ndtr(0.5 / noise - epsilon * noise) - np.exp(epsilon + log_ndtr(-0.5 / noise - epsilon * noise))
    return np.maximum(found, 0.0)


def _kind(one: Release) -> Kind:
    return "gaussian" if one.rate >= 1 else one.kind


def _composed(releases: Sequence[Release], removed: bool, step: float) -> LossDistribution:
    found: LossDistribution | None = None
    for one in releases:
        own = _loss(one, removed, step).times(one.number)
        found = own if found is None else found.composed(own)
    assert found is not None
    return found


def _loss(one: Release, removed: bool, step: float) -> LossDistribution:
    """Return the losses of one release, of P against Q or of Q against P."""
    match _kind(one):
        case "gaussian":
            return _discrete(one.noise, 1.0, True, step)
        case "poisson":
            return _discrete(one.noise, one.rate, removed, step)
        case "fixed":
            return _fixed(one.noise, one.rate, removed, step)
    raise FederationError(f"A release is gaussian, poisson or fixed, not {one.kind!r}.")


def _discrete(noise: float, rate: float, removed: bool, step: float) -> LossDistribution:
    """Return losses of the mixture against the Gaussian (``removed``), or the reverse.

    Masses of P and Q between two grid points are distributed to both, so that neither total changes.
    """
    reach = noise * 9.0  # beyond is a Gaussian mass of about 1e-19
    ends = _loss_at(np.array([-reach, 1.0 + reach]), noise, rate)
    low, high = math.floor(ends[0] / step), math.ceil(ends[1] / step)
    grid = np.arange(low, high + 1) * step
    places = _place_of(grid, noise, rate)
    plain, shifted = _masses(places, 0.0, noise), _masses(places, 1.0, noise)
    mixed = (1 - rate) * plain + rate * shifted
    p, q = (mixed, plain) if removed else (plain[::-1], mixed[::-1])
    if not removed:
        grid, low = -grid[::-1], -high
    # Move masses below the first point up to it; count those above the last as infinite.
    inner_p, inner_q = p[1:-1], q[1:-1]
    left = (inner_q * np.exp(grid[:-1]) - inner_p * math.exp(-step)) / -math.expm1(-step)
    left = np.clip(left, 0.0, inner_p)
    mass = np.zeros(len(grid))
    mass[:-1] += left
    mass[1:] += inner_p - left
    mass[0] += p[0]
    return _trimmed(LossDistribution(low, mass, float(p[-1])))


def _loss_at(x: Array, noise: float, rate: float) -> Array:
    """Return the log ratio of the mixture to the Gaussian."""
    with np.errstate(divide="ignore"):
        found: Array = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / (2 * noise**2))
    return found


def _place_of(losses: Array, noise: float, rate: float) -> Array:
    """Invert the loss; minus infinity for losses that do not occur."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.expm1(losses) + rate if rate < 1 else np.exp(losses)
        return np.where(share > 0, 0.5 + noise**2 * np.log(share / rate), -np.inf)


def _masses(places: Array, mean: float, noise: float) -> Array:
    """Return Gaussian masses below, between and above the points, without cancellation in the tails."""
    z = (places - mean) / noise
    inner = np.where(z[:-1] > 0, ndtr(-z[:-1]) - ndtr(-z[1:]), ndtr(z[1:]) - ndtr(z[:-1]))
    return np.concatenate(([ndtr(z[0])], inner, [ndtr(-z[-1])]))


@lru_cache(maxsize=8)
def _fixed(noise: float, rate: float, removed: bool, step: float) -> LossDistribution:
    """Return losses of a dominating pair for a cohort of fixed size, by its divergence at every grid point.

    Between grid points, the divergence is at most linear in e^loss because it is convex, like its lower hull.
    """
    last = math.ceil(_loss_at(np.array([2.0 + 9.0 * noise]), noise / 2, rate)[0] / step)
    losses = np.arange(1, last + 1) * step
    alpha = 1 + np.expm1(losses) / rate
    share, apart = np.exp(losses) / alpha, _gaussian_delta(np.log(alpha), noise)
    there = rate * ((1 - share) * _gaussian_delta(np.log(alpha), noise / 2) + share * apart)
    up, down = (there, rate * apart) if removed else (rate * apart, there)
    middle = rate * _gaussian_delta(np.zeros(1), noise)  # beta is 1
    below = -np.expm1(-losses) + np.exp(-losses) * down  # from the other direction
    grid = np.concatenate((-losses[::-1], [0.0], losses))
    return _of_divergences(grid, np.concatenate((below[::-1], middle, up)), -last)


def _of_divergences(losses: Array, values: Array, first: int) -> LossDistribution:
    """Return losses of a pair with the lower convex hull of these divergences in e^loss, with value 1 at 0."""
    x, y = np.concatenate(([0.0], np.exp(losses))), np.concatenate(([1.0], values))
    kept: list[int] = []
    for place in range(len(x)):
        while len(kept) > 1 and (y[kept[-1]] - y[kept[-2]]) * (x[place] - x[kept[-2]]) >= (y[place] - y[kept[-2]]) * (
            x[kept[-1]] - x[kept[-2]]
        ):
            kept.pop()
        kept.append(place)
    slopes = np.concatenate((np.diff(y[kept]) / np.diff(x[kept]), [0.0]))
    mass = np.zeros(len(losses))
    for place, change in zip(kept[1:], np.diff(slopes), strict=True):
        mass[place - 1] = x[place] * change
    return _trimmed(LossDistribution(first, np.maximum(mass, 0.0), float(values[-1])))


def _trimmed(one: LossDistribution) -> LossDistribution:
    """Truncate the tails: move small losses up, count large ones as infinite."""
    below, above = np.cumsum(one.mass), np.cumsum(one.mass[::-1])[::-1]
    kept = np.flatnonzero((below > TAIL) & (above > TAIL))
    if not len(kept):
        return one
    start, end = int(kept[0]), int(kept[-1]) + 1
    mass = one.mass[start:end].copy()
    mass[0] += one.mass[:start].sum()
    return LossDistribution(one.first + start, mass, one.infinite + float(one.mass[end:].sum()))
