"""Hostile clients and their poisons of samples and updates, as functions of tensors.

Updates are rows: a client's sent minus received entries, flattened.
"""

from __future__ import annotations

import torch
from scipy.stats import norm
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.errors import FederationError

#: Number of bisection steps for the largest perturbation.
HALVINGS = 40


def hostile_clients(seed: int, clients: int, share: float) -> list[int]:
    """Choose hostile clients as a pure function of the seed; the share is rounded to at least one client.

    Example:
        >>> hostile_clients(0, 10, 0.3) == hostile_clients(0, 10, 0.3), len(hostile_clients(1, 10, 0.3))
        (True, 3)
    """
    if not 0 < share <= 1:
        raise FederationError(f"share must be greater than 0 and at most 1, not {share}.")
    order = seeding.permutation(seeding.stream(seed, "hostile"), clients)
    return sorted(order[: max(1, round(share * clients))].tolist())


def flipped(labels: Tensor, classes: int) -> Tensor:
    """Flip every label to classes - 1 - y.

    Example:
        >>> flipped(torch.tensor([0, 1, 9]), 10)
        tensor([9, 8, 0])
    """
    return classes - 1 - labels


def stamped(inputs: Tensor, value: float, size: int = 3) -> Tensor:
    """Return copies with a trigger: a square in the lower right corner of images, the last features otherwise.

    Args:
        inputs: samples as stored, shape (n, ...).
        value: value of the trigger, in the units of stored samples.
        size: side length of the trigger.

    Example:
        >>> stamped(torch.zeros(1, 4), 1.0, 2)
        tensor([[0., 0., 1., 1.]])
    """
    marked = inputs.clone()
    if inputs.dim() >= 4:
        marked[..., -size:, -size:] = value
    else:
        marked[..., -size:] = value
    return marked


def little(honest: Tensor, hostile: int, clients: int) -> Tensor:
    """A little is enough (Baruch et al., 2019): the mean minus the most standard deviations that keep a majority.

    Args:
        honest: updates to compute mean and standard deviation from, shape (n, D).
        hostile: number of hostile clients.
        clients: number of clients of the round.

    Example:
        >>> round(little_factor(24, 50), 4)
        1.4261
    """
    return honest.mean(0) - little_factor(hostile, clients) * honest.std(0, unbiased=False)


def little_factor(hostile: int, clients: int) -> float:
    """Return the number of standard deviations: enough honest clients for a majority are further out."""
    supporters = clients // 2 + 1 - hostile
    others = clients - hostile
    if not others > 0:
        raise FederationError("A little is enough needs an honest client: set share below 1.")
    return float(norm.ppf(min(max((others - supporters) / others, 0.5), 1 - 1e-6)))


def min_max(honest: Tensor) -> Tensor:
    """Return the update furthest from the mean whose distances to others do not exceed the largest among them.

    Shejwalkar and Houmansadr (2021), with the negative standard deviation as the direction.

    Args:
        honest: updates to hide among, shape (n, D).
    """
    mean, direction = honest.mean(0), -honest.std(0, unbiased=False)
    if not bool(direction.any()):
        return mean
    most = torch.cdist(honest, honest, compute_mode="donot_use_mm_for_euclid_dist").max()

    def fits(factor: float) -> bool:
        return bool((honest - mean - factor * direction).norm(dim=1).max() <= most)

    low, high = 0.0, 1.0
    while fits(high) and high < 1e12:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return mean + low * direction
