"""A record is what its configuration comes to today."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_lightning.papers.environment import environment
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import config_of, select, table
from tests.support.tiny import run

ROOT = Path(__file__).parents[2]
#: What has to be alike for numbers to be the same to the last digit.
SAME = ("packages", "processor", "python", "vectors")


def test_a_run_again_is_its_record(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last digit where processor and versions are the record's, to rounding elsewhere."""
    monkeypatch.setenv("FL_LIGHTNING_DATA", str(real_data))
    asked = {"partition": "alike", "classes": "2", "samples": "20", "method": "local", "metric": "local_test_acc"}
    (cell,) = select(table("map/mnist"), asked)
    record = Records(ROOT / "results").result(config_of(cell), 0)
    assert record is not None
    again, here = run(tmp_path, config_of(cell)), environment()
    alike = all(record["environment"][key] == here[key] for key in SAME)
    for name in ("local_test_acc", "train_loss"):
        tolerance = 0.0 if alike else 0.5
        assert again["curves"][name] == pytest.approx(record["curves"][name], abs=tolerance)
    assert again["metrics"]["parameters"] == record["metrics"]["parameters"]
