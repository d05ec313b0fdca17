"""A user's own file on the command line: patients.csv, the hospital's column, how long they stay."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stays are whole days, one at least."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    with open("patients.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["hospital", "age", "sex", "los"])
        for i in range(80):
            age = int(rng.integers(20, 90))
            table.writerow(["NSWE"[i % 4], age, "fm"[i % 2], 1 + age // 10 + int(rng.integers(0, 3))])


def test_a_regression_from_file_to_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    """The net takes its measure from the table and the task, the best round is that of the least error."""
    what = ["--data", "Table", "--data.path", "patients.csv", "--data.client", "hospital", "--data.target", "los"]
    what += ["--model", "FedAvg", "--model.net", "MLP", "--model.task", "Regression", "--model.optimizer", "AdamW"]
    what += ["--model.keep_optimizer", "true", "--model.lr_schedule", "Cosine", "--model.engine", "sequential"]
    what += ["--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", "--quiet"]
    main(["fit", *what])
    (folder,) = Path("runs/FedAvg").iterdir()
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    settings = json.loads((folder / "run.json").read_text())["settings"]
    assert (settings["net.in_features"], settings["net.num_classes"]) == (3, 1)
    main(["predict", *what, "--ckpt_path", str(folder / "checkpoints" / "best.ckpt")])
    rows = list(csv.DictReader(Path("runs/FedAvg/version_1/predictions.csv").read_text().splitlines()))
    assert list(rows[0]) == ["client", "sample", "target", "predicted"]
    assert {row["target"] for row in rows} <= {str(days) for days in range(1, 12)}
    assert len({row["predicted"] for row in rows}) > 4
    main(["compare", "runs", "--quiet"])
    assert "| mean |" in Path("comparison/table.md").read_text()


def test_an_unknown_column_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    what = ["--data", "Table", "--data.path", "patients.csv", "--data.client", "hospitl", "--data.target", "los"]
    with pytest.raises(SystemExit):
        main(["fit", *what, "--model", "FedAvg", "--model.net", "MLP", "--model.task", "Regression"])
    assert "The table has no column 'hospitl': did you mean hospital?" in capsys.readouterr().err
