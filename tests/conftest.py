"""Settings of all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small runs are faster on one thread, and two test processes then share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that an earlier test set for everything must not leak."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
