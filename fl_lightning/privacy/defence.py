"""Differential privacy for clients: bounded updates, Gaussian noise, and what they amount to (epsilon)."""

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

#: Draws standard normals of a shape in float64.
Normal = Callable[[Sequence[int]], Tensor]


def change(sent: State, received: State) -> State:
    """Changes in a client's message: its floating entries less those that the client received under the same name."""
    return {
        name: value - received[name] if name in received else value
        for name, value in sent.items()
        if value.is_floating_point()
    }


def norm(tensors: State) -> float:
    """Euclidean norm of all entries together, in float64."""
    return math.sqrt(sum(float(value.double().pow(2).sum()) for value in tensors.values()))


def clipped(sent: State, received: State, bound: float) -> State:
    """The message with its change scaled down, if need be, to a joint norm of ``bound``; integer entries stay.

    Args:
        sent: an up message.
        received: the down message before it.
        bound: largest norm.

    Example:
        >>> clipped({"w": torch.tensor([3.0, 5.0])}, {"w": torch.tensor([0.0, 1.0])}, bound=1.0)["w"]
        tensor([0.6000, 1.8000])
    """
    factor = min(1.0, bound / max(norm(change(sent, received)), 1e-30))
    return dict(sent) if factor == 1.0 else scaled(sent, received, factor)


def scaled(sent: State, received: State, factor: float) -> State:
    """The message with its change multiplied by a factor; integer entries stay."""
    moved = change(sent, received)
    return {n: received.get(n, torch.zeros_like(v)) + factor * moved[n] if n in moved else v for n, v in sent.items()}


def noised(message: State, std: float, normal: Normal) -> State:
    """The message with Gaussian noise on every floating entry; integer entries stay.

    The sum is taken in float64 and rounded to the entry's own precision last.

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
    """Draws from a stream that whoever knows the seed can repeat."""
    return lambda shape: seeding.normal(rng, shape, torch.float64)


def central_std(noise_multiplier: float, bound: float, messages: Sequence[Message], weighting: Weighting) -> float:
    """Noise for each message such that their weighted mean has the noise that hides any one client.

    With nothing (0) instead of the update of a client of weight p, weights being public, the mean moves by
    p * bound at most, so its noise must have the standard deviation noise_multiplier * bound * max(p). Independent
    noise of standard deviation s on every message gives the mean s * sqrt(sum p^2). Put on the messages, the noise
    reaches whatever a method makes of them.

    Example:
        >>> four = [Message(client, {}, samples=10) for client in range(4)]
        >>> central_std(2.0, 3.0, four, "uniform")
        3.0
    """
    weights = message_weights(messages, weighting)
    return noise_multiplier * bound * max(weights) / math.sqrt(sum(w * w for w in weights))


def next_bound(bound: float, inside: float, quantile: float, rate: float) -> float:
    """A bound that more updates are below in the next round, or fewer (Andrew et al., 2021).

    Args:
        bound: the present one.
        inside: noisy share of the updates below it.
        quantile: the share that is to be below it.
        rate: how fast it moves, by a geometric step.

    Example:
        >>> next_bound(1.0, 0.5, 0.5, 0.2), round(next_bound(1.0, 1.0, 0.5, 0.2), 4)
        (1.0, 0.9048)
    """
    return bound * math.exp(-rate * (inside - quantile))


def split_noise(noise_multiplier: float, count_std: float) -> float:
    """The noise multiplier of the updates where a count with noise is released, too, and both cost as one.

    The count changes by a half, so that noise_multiplier^-2 = updates^-2 + (2 count_std)^-2.

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
    """The epsilon of releases with Gaussian noise.

    Args:
        releases: of any kinds.
        delta: the probability with which the bound may fail.
        accountant: ``pld`` (:mod:`fl_lightning.privacy.accounting`), or ``rdp`` or ``prv`` of opacus, which know no
            cohorts of a fixed size.

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
        raise FederationError(f"The accountant {accountant} knows no cohorts of a fixed size: use pld.")
    if any(one.noise <= 0 for one in releases):
        return math.inf
    if not releases:
        return 0.0
    made: Any = create_accountant(mechanism=accountant)
    made.history = [(one.noise, one.rate, one.number) for one in releases]
    return float(made.get_epsilon(delta))
