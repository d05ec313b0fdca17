"""Sampling of cohorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.secret import SecretStream

Sampling = Literal["fixed", "poisson"]


def drawn(
    clients: int, fraction: float, sampling: Sampling, seeded: Callable[[], np.random.Generator], key: bytes | None
) -> list[int]:
    """Draw the clients of a round; possibly none with ``poisson`` sampling.

    Args:
        clients: number of clients N.
        fraction: fraction of clients that train.
        sampling: ``fixed`` draws ``max(1, round(fraction * N))`` without replacement, ``poisson`` each client
            independently with probability ``fraction``.
        seeded: factory of the round's generator.
        key: the round's secret key; if given, used instead of ``seeded``.

    Example:
        >>> len(drawn(10, 0.3, "fixed", np.random.default_rng, None))
        3
        >>> drawn(3, 1.0, "poisson", np.random.default_rng, b"key")
        [0, 1, 2]
    """
    size = max(1, round(fraction * clients))
    if sampling == "fixed" and key is None:
        chosen: list[int] = seeded().choice(clients, size, replace=False).tolist()
        return chosen
    draws: NDArray[np.float64] = seeded().random(clients) if key is None else SecretStream(key).uniform(clients)
    if sampling == "fixed":
        return [int(client) for client in draws.argsort()[:size]]
    return np.flatnonzero(draws <= fraction).tolist()


def trained(chosen: list[int], clients: int, round: int) -> list[int]:
    """Return the drawn clients; if there are none, one client whose update must not count."""
    return chosen or [round % clients]
