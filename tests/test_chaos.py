"""One trial of the script that kills runs at random."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "chaos.py"


def test_a_run_that_is_killed_ends_exactly(tmp_path: Path) -> None:
    chaos = run_path(str(SCRIPT))["Chaos"](tmp_path, seed=0)
    chaos.trial("kill", 0, 1)
    assert chaos.counts["kill"]["exact"] == 1
    assert not chaos.counts["kill"]["torn"]
