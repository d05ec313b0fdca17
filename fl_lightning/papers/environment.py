"""Machine and code versions of a record."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

#: Packages whose versions affect the result of a run.
PACKAGES = ("fl-lightning", "lightning", "numpy", "torch")


def environment() -> dict[str, Any]:
    """Return commit, package versions, processor, number of threads and date."""
    return {
        "commit": commit(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "processor": processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def commit(folder: Path) -> str | None:
    """Return the git commit of a folder, with ``-dirty`` if tracked files differ; None outside of git."""
    asked = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """Return the processor's name as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
