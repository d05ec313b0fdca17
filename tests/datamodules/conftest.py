"""What the data tests share: where real data is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that holds the real data sets; without one the test is skipped."""
    for folder in (os.environ.get("FL_LIGHTNING_DATA"), "data"):
        if folder and (Path(folder) / "MNIST" / "raw").is_dir():
            return Path(folder)
    pytest.skip("no real data: set FL_LIGHTNING_DATA to the folder that holds MNIST/raw")
