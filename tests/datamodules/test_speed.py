"""A million labels over a hundred thousand clients."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
import torch

from fl_lightning.datamodules import (
    IID,
    ByUser,
    ConceptShift,
    Dirichlet,
    DominantClass,
    LabelSkew,
    MajorMinor,
    Multimodal,
    PartitionScheme,
    Unimodal,
)

N = 100_000
SCHEMES: list[PartitionScheme] = [
    IID(N),
    Unimodal(N, 2),
    Unimodal(N, 2, distinct=True),
    Multimodal([[1, 3, 5, 7, 9], [0, 2, 4, 6, 8]], [80_000, 20_000]),
    ConceptShift(LabelSkew("C", N, test_samples=10)),
    DominantClass(N, 0.5, 50_000),
    MajorMinor(N),
    Dirichlet(N, 1.0, min_samples=2),
    ByUser(None, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_a_million_labels_over_a_hundred_thousand_clients(scheme: PartitionScheme) -> None:
    rng = np.random.default_rng(0)
    labels, users = torch.from_numpy(rng.integers(0, 10, 1_000_000)), torch.from_numpy(rng.integers(0, N, 1_000_000))
    started = time.perf_counter()
    part = scheme(labels, 0, users=users)
    seconds = time.perf_counter() - started
    assert len(part) > 99_000
    assert seconds < 10
    if not isinstance(scheme, DominantClass):  # it visits client after client, which is slow to trace
        tracemalloc.start()
        scheme(labels, 0, users=users)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1e9
