"""RNG streams from (seed, purpose, round, client).

No result depends on a global generator: each purpose, round and client has its own stream. The draws therefore do not
depend on the order in which clients are trained, on how many are trained at once, or on the device. Streams are NumPy
generators, drawn on the host and moved to the device (``torch.Generator`` keeps only 32 bits of its seed, so derived
streams would collide).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import FederationError


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return the generator for one purpose, round and client of a run.

    Args:
        seed: the run's seed.
        purpose: name of the stream, such as ``"batches"``, ``"sampling"`` or ``"noise"``.
        round: the round, from 0.
        client: the client's number.

    Example:
        >>> a, b = stream(1, "batches", 3, 7), stream(1, "batches", 3, 7)
        >>> bool((a.permutation(10) == b.permutation(10)).all())
        True
    """
    if seed < 0:
        raise FederationError(f"seed must be 0 or more, not {seed}.")
    entropy = (seed, zlib.crc32(purpose.encode()), round, client)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def permutation(rng: np.random.Generator, n: int) -> Tensor:
    """Draw a random permutation of ``range(n)`` as int64, shape (n,)."""
    return torch.from_numpy(rng.permutation(n))


def uniform(rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniformly from [0, 1), always in float64 first, so that every precision gets the same numbers."""
    return torch.from_numpy(rng.random(tuple(shape))).to(dtype)


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normal numbers, always in float64 first, so that every precision gets the same numbers."""
    return torch.from_numpy(rng.standard_normal(tuple(shape))).to(dtype)


def default_seed() -> int:
    """Return the seed of ``lightning.seed_everything`` if it was called, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
