"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Some virtual machines name AMX among what their processor can do and kill who uses it. Read when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

pytest.register_assert_rewrite("tests.support")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small runs are faster on one thread, and two test processes then share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_race(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the stacked engine where it agrees: which is fastest is measured by tests marked `race` alone."""
    if "race" in request.keywords:
        return
    from fl_lightning.engine import auto

    monkeypatch.setattr(auto, "CANDIDATES", ("stacked",))
    monkeypatch.setattr(auto, "_skip_capture", lambda *_: "")
    monkeypatch.setattr(auto, "_fastest", lambda agreed, steps: (agreed[-1].engine.name, "not raced"))


@pytest.fixture(autouse=True)
def _no_seed() -> Iterator[None]:
    """A seed that a test sets for everything must not leak into the next."""
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that holds the real data sets; without one the test is skipped."""
    for folder in (os.environ.get("FL_LIGHTNING_DATA"), "data"):
        if folder and (Path(folder) / "MNIST" / "raw").is_dir():
            return Path(folder)
    pytest.skip("no real data: set FL_LIGHTNING_DATA to the folder that holds MNIST/raw")
