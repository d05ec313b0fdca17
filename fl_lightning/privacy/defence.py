"""Differential privacy for clients: bounded updates, Gaussian noise, and what they amount to (epsilon)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.wire import Message, State, Weighting, message_weights


def change(sent: State, received: State) -> State:
    """What a client's message changes: its floating entries less those that the client received under the same name."""
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
    moved = change(sent, received)
    scale = min(1.0, bound / max(norm(moved), 1e-30))
    if scale == 1.0:
        return dict(sent)
    return {n: received.get(n, torch.zeros_like(v)) + scale * moved[n] if n in moved else v for n, v in sent.items()}


def noised(message: State, std: float, rng: np.random.Generator) -> State:
    """The message with Gaussian noise on every floating entry; integer entries stay."""
    return {n: v + std * _normal(rng, v) if v.is_floating_point() else v for n, v in message.items()}


def _normal(rng: np.random.Generator, like: Tensor) -> Tensor:
    return seeding.normal(rng, like.shape, like.dtype).to(like.device)


def central_std(noise_multiplier: float, bound: float, messages: Sequence[Message], weighting: Weighting) -> float:
    """Noise for each message such that their weighted mean has the noise that hides any one client.

    With nothing (0) in the place of the update of a client of weight p, weights being public, the mean moves by
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


def epsilon(steps: Sequence[tuple[float, float, int]], delta: float, accountant: str = "rdp") -> float:
    """What releases with Gaussian noise amount to, by an accountant of opacus.

    Args:
        steps: noise multiplier (standard deviation over sensitivity), sampling rate and number of releases.
        delta: the probability with which the bound may fail.
        accountant: ``rdp`` or ``prv``.

    Returns:
        Epsilon; infinite without noise, 0 without a release.
    """
    try:
        from opacus.accountants import create_accountant
    except ImportError as error:
        raise FederationError(
            "Accounting for differential privacy needs opacus: pip install 'fl-lightning[privacy]'."
        ) from error
    if any(noise <= 0 for noise, _, _ in steps):
        return math.inf
    if not steps:
        return 0.0
    made: Any = create_accountant(mechanism=accountant)
    made.history = [(noise, rate, number) for noise, rate, number in steps]
    return float(made.get_epsilon(delta))
