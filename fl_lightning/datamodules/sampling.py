"""Who trains in a round."""

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
    """The clients that a round draws; of ``poisson`` sampling possibly none.

    Args:
        clients: their number N.
        fraction: share of them that trains.
        sampling: ``fixed`` draws ``max(1, round(fraction * N))`` without replacement, ``poisson`` each client for
            itself with the probability ``fraction``.
        seeded: the round's generator.
        key: the round's secret key, which then decides instead.

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
    """The clients that are drawn; where none is, one whose update must not count, so that the round has a client."""
    return chosen or [round % clients]
