"""Client-level differential privacy: clipped updates, Gaussian noise, and their epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.privacy import accounting
from fl_lightning.privacy.accounting import Release
from fl_lightning.wire import Message, State, Weighting, message_weights

#: Function that draws standard normals of a shape in float64.
Normal = Callable[[Sequence[int]], Tensor]


def change(sent: State, received: State) -> State:
    """Return a client's update: floating-point entries sent minus those received under the same name."""
    return {
        name: value - received[name] if name in received else value
        for name, value in sent.items()
        if value.is_floating_point()
    }


def norm(tensors: State) -> float:
    """Return the joint Euclidean norm of all entries, in float64."""
    return math.sqrt(sum(float(value.double().pow(2).sum()) for value in tensors.values()))


def clipped(sent: State, received: State, bound: float) -> State:
    """Clip a message's update to a joint norm of ``bound``; integer entries do not change.

    Args:
        sent: an up message.
        received: the down message before it.
        bound: maximum norm.

    Example:
        >>> clipped({"w": torch.tensor([3.0, 5.0])}, {"w": torch.tensor([0.0, 1.0])}, bound=1.0)["w"]
        tensor([0.6000, 1.8000])
    """
    factor = min(1.0, bound / max(norm(change(sent, received)), 1e-30))
    return dict(sent) if factor == 1.0 else scaled(sent, received, factor)


def scaled(sent: State, received: State, factor: float) -> State:
    """Multiply a message's update by a factor; integer entries do not change."""
    moved = change(sent, received)
    return {n: received.get(n, torch.zeros_like(v)) + factor * moved[n] if n in moved else v for n, v in sent.items()}


def noised(message: State, std: float, normal: Normal) -> State:
    """Add Gaussian noise to every floating-point entry; integer entries do not change.

    The sum is computed in float64 and then rounded to the entry's own precision.

    Args:
        message: the named tensors.
        std: standard deviation of the noise.
        normal: draws standard normals in float64 of a shape, as :meth:`fl_lightning.secret.SecretStream.normal`.
    """
    return {
        n: (v.double() + std * normal(v.shape).to(v.device)).to(v.dtype) if v.is_floating_point() else v
        for n, v in message.items()
    }


def seeded_normal(rng: np.random.Generator) -> Normal:
    """Draw from a generator that is reproducible by the seed."""
    return lambda shape: seeding.normal(rng, shape, torch.float64)


def central_std(noise_multiplier: float, bound: float, messages: Sequence[Message], weighting: Weighting) -> float:
    """Return the noise per message for which the weighted mean has the noise that hides any one client.

    If the update of a client of public weight p is replaced by 0, the mean changes by at most p * bound, so its noise
    must have the standard deviation noise_multiplier * bound * max(p). Independent noise of standard deviation s on
    every message gives the mean s * sqrt(sum p^2). Noise on messages covers everything that a method computes from
    them.

    Example:
        >>> four = [Message(client, {}, samples=10) for client in range(4)]
        >>> central_std(2.0, 3.0, four, "uniform")
        3.0
    """
    weights = message_weights(messages, weighting)
    return noise_multiplier * bound * max(weights) / math.sqrt(sum(w * w for w in weights))


def next_bound(bound: float, inside: float, quantile: float, rate: float) -> float:
    """Return the bound of the next round, moved towards a quantile of the norms (Andrew et al., 2021).

    Args:
        bound: the current bound.
        inside: noisy share of the updates below it.
        quantile: target share of updates below it.
        rate: learning rate of the geometric step.

    Example:
        >>> next_bound(1.0, 0.5, 0.5, 0.2), round(next_bound(1.0, 1.0, 0.5, 0.2), 4)
        (1.0, 0.9048)
    """
    return bound * math.exp(-rate * (inside - quantile))


def split_noise(noise_multiplier: float, count_std: float) -> float:
    """Return the noise multiplier of updates such that releasing a noisy count too costs the same in total.

    The sensitivity of the count is 1/2, so noise_multiplier^-2 = updates^-2 + (2 count_std)^-2.

    Example:
        >>> round(split_noise(1.0, 5.0), 6)
        1.005038
    """
    rest = noise_multiplier**-2 - (2 * count_std) ** -2
    if rest <= 0:
        raise FederationError(
            f"Noise of {count_std} on the count of bounded updates is too little for a noise_multiplier of "
            f"{noise_multiplier}: use a larger cohort or a smaller noise_multiplier."
        )
    return math.sqrt(1 / rest)


def epsilon(releases: Sequence[Release], delta: float, accountant: str = "pld") -> float:
    """Return the epsilon of releases with Gaussian noise.

    Args:
        releases: of any kinds.
        delta: probability that the bound fails.
        accountant: ``pld`` (:mod:`fl_lightning.privacy.accounting`), or opacus's ``rdp`` or ``prv``, which do not
            support cohorts of a fixed size.

    Returns:
        Epsilon; infinite without noise, 0 without a release.
    """
    if accountant == "pld":
        return accounting.epsilon(releases, delta)
    try:
        from opacus.accountants import create_accountant
    except ImportError as error:
        raise FederationError(
            f"The accountant {accountant} needs opacus: pip install 'fl-lightning[privacy]', or use pld."
        ) from error
    if any(one.kind == "fixed" and one.rate < 1 for one in releases):
        raise FederationError(f"The accountant {accountant} does not support cohorts of a fixed size: use pld.")
    if any(one.noise <= 0 for one in releases):
        return math.inf
    if not releases:
        return 0.0
    made: Any = create_accountant(mechanism=accountant)
    made.history = [(one.noise, one.rate, one.number) for one in releases]
    return float(made.get_epsilon(delta))
