"""Cryptographic randomness for privacy protections, seeded by the operating system instead of the run's seed.

A stream is an extendable hash (SHAKE-256) of 32 bytes of ``os.urandom`` and a counter, so processes that share the key
draw the same numbers. The generators of NumPy and PyTorch are unsuitable: their output reveals their state.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Number of bytes of a key.
KEY = 32
#: Number of Gaussians summed for one draw.
SUMMED = 4


def new_key() -> bytes:
    """Draw a new secret key."""
    return os.urandom(KEY)


class SecretStream:
    """Random numbers that cannot be predicted without the key.

    Args:
        key: a secret key; None draws a new one.
        purpose: name of the stream; every purpose has its own.

    Example:
        >>> key = new_key()
        >>> same = SecretStream(key).uniform(3) == SecretStream(key).uniform(3)
        >>> bool(same.all())
        True
    """

    def __init__(self, key: bytes | None = None, purpose: str = "") -> None:
        self._key = (new_key() if key is None else key) + purpose.encode()
        self._count = 0

    def words(self, n: int) -> NDArray[np.uint64]:
        """Draw uniform 64-bit integers, shape (n,)."""
        material = hashlib.shake_256(self._key + self._count.to_bytes(8, "little"))
        self._count += 1
        return np.frombuffer(material.digest(8 * n), dtype=np.uint64)

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Draw uniform numbers from (0, 1] with all 53 bits, shape (n,)."""
        words = self.words(n)
        return ((words >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Draw standard normal numbers, float64.

        Each is half the sum of four (Holohan and Braghin, 2021): a sampler cannot return every double, and which ones
        it can return depends on its mean, so the last bits of a single draw would reveal the protected value.
        """
        n = math.prod(shape)
        radius = np.sqrt(-2.0 * np.log(self.uniform(n * SUMMED // 2)))
        angle = 2.0 * np.pi * self.uniform(n * SUMMED // 2)
        drawn = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
        return torch.from_numpy(drawn.reshape(SUMMED, n).sum(0) / math.sqrt(SUMMED)).reshape(tuple(shape))
