"""Predictions in a table."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning.callbacks import PredictionWriter
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedPer
from tests.support import CLASSES, blobs, fit, mlp, trainer


def test_every_test_sample_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Classes and probabilities are those of each client's own model, by an ordinary forward pass."""
    data, method = blobs(eval_clients=3), FedPer(mlp(), lr=0.1, engine="stacked")
    fit(method, data, rounds=1)
    path = tmp_path / "new" / "p.csv"
    trainer(callbacks=[PredictionWriter(str(path))]).predict(method, datamodule=data, return_predictions=False)
    assert f"Predictions of 4 clients: {path}" in capsys.readouterr().out
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["client", "sample", "label", "predicted", *(f"p{k}" for k in range(CLASSES))]
    assert [int(row["client"]) for row in rows] == [client for client in range(4) for _ in range(10)]
    federation = data.federation
    assert [int(row["sample"]) for row in rows] == federation.test.flat.tolist()
    assert [int(row["label"]) for row in rows] == federation.targets[federation.test.flat].tolist()
    for client in range(4):
        method.net.load_state_dict(method.personal_state(client))
        with torch.no_grad():
            expected = nn.functional.softmax(method.net(federation.inputs[federation.test[client]].double()), 1)
        own = [row for row in rows if int(row["client"]) == client]
        found = np.array([[float(row[f"p{k}"]) for k in range(CLASSES)] for row in own])
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-12)
        assert [int(row["predicted"]) for row in own] == expected.argmax(1).tolist()


def test_without_a_name_it_lies_in_the_log_folder(tmp_path: Path) -> None:
    writer = PredictionWriter()
    run = trainer(callbacks=[writer], default_root_dir=tmp_path)
    run.predict(FedPer(mlp(), engine="stacked"), datamodule=blobs(eval_only=[2, 0]), return_predictions=False)
    assert writer.path == tmp_path / "predictions.csv"
    assert len(writer.path.read_text().splitlines()) == 21


def test_parquet_needs_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FederationError, match="needs pyarrow"):
        PredictionWriter("p.parquet")
