"""Commands in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_lightning.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"


QUICKSTART = str(CONFIGS / "quickstart.yaml")


QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail with one sentence and exit code 2; return the sentence."""
    with pytest.raises(SystemExit) as end:
        main(list(argv))
    assert end.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("fl-lightning: error: ")
    return last
