"""Many clients: memory grows with their number, not with its square. Speed: benchmarks/partitions.py."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from fl_lightning.datamodules import (
    IID,
    ByUser,
    ConceptShift,
    Dirichlet,
    LabelSkew,
    MajorMinor,
    Multimodal,
    PartitionScheme,
    Unimodal,
)

N = 20_000
#: Not DominantClass, which visits client after client and is slow to trace.
SCHEMES: list[PartitionScheme] = [
    IID(N),
    Unimodal(N, 2),
    Unimodal(N, 2, distinct=True),
    Multimodal([[1, 3, 5, 7, 9], [0, 2, 4, 6, 8]], [16_000, 4_000]),
    ConceptShift(LabelSkew("C", N, test_samples=10)),
    MajorMinor(N),
    Dirichlet(N, 1.0, min_samples=2),
    ByUser(None, 2),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_memory_of_many_clients(scheme: PartitionScheme) -> None:
    rng = np.random.default_rng(0)
    labels, users = torch.from_numpy(rng.integers(0, 10, 10 * N)), torch.from_numpy(rng.integers(0, N, 10 * N))
    tracemalloc.start()
    part = scheme(labels, 0, users=users)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(part) > 0.99 * N
    assert peak < 2e8
