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
from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedPer
from fl_lightning.module import FederatedModule
from tests.support import CLASSES, blobs, fit, mlp, trainer
from tests.support.matrix import PROBLEMS, attempt


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


def written(task: str, path: Path) -> tuple[FederatedModule, TensorFederation]:
    """Predictions of a method that was fitted to a task."""
    data, method = PROBLEMS[task].data(), attempt(task=task, method="FedPer", optimizer="Adam")
    assert isinstance(method, FederatedModule)
    trainer(callbacks=[PredictionWriter(str(path))]).predict(method, datamodule=data, return_predictions=False)
    return method, data


@pytest.mark.parametrize("task", ["MultiLabel", "Regression", "NextToken"])
def test_tables_of_other_tasks(task: str, tmp_path: Path) -> None:
    """Targets and predictions are what the task says of an ordinary forward pass; no probability is made up."""
    method, data = written(task, tmp_path / "p.csv")
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert ("p0" in rows[0]) is (task == "MultiLabel")
    federation, start = data.federation, 0
    for client, index in enumerate(federation.test):
        method.net.load_state_dict(method.personal_state(client))
        with torch.no_grad():
            x = federation.inputs[index]
            output = method.net(x.double() if x.is_floating_point() else x)
        wanted = {"target": federation.targets[index], "predicted": method.task.predict(output)}
        if task == "MultiLabel":
            wanted["p"] = output.sigmoid()
        for name, values in wanted.items():
            own = values.reshape(len(index), -1)
            columns = [name] if values.dim() == 1 else [f"{name}{k}" for k in range(own.shape[1])]
            found = [[float(row[column]) for column in columns] for row in rows[start : start + len(index)]]
            np.testing.assert_allclose(found, own.numpy(), atol=1e-12)
        start += len(index)
    assert start == len(rows)


def test_masks_are_arrays(tmp_path: Path) -> None:
    _, data = written("Segmentation", tmp_path / "p.npz")
    found = np.load(tmp_path / "p.npz")
    assert found["predicted"].shape == found["target"].shape == (12, 5, 4)
    federation = data.federation
    assert np.array_equal(found["target"], federation.targets[federation.test.flat])
    assert found["client"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(FederationError, match=r"p\.csv cannot hold predictions of shape \(5, 4\): give .* \.npz"):
        written("Segmentation", tmp_path / "p.csv")
    writer = PredictionWriter()
    run = trainer(callbacks=[writer], default_root_dir=tmp_path)
    method = attempt("FedAvg", "Segmentation", "SGD")
    assert isinstance(method, FederatedModule)
    run.predict(method, datamodule=PROBLEMS["Segmentation"].data(), return_predictions=False)
    assert writer.path == tmp_path / "predictions.npz"
