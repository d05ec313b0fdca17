"""Pictures, settings and names in every logger; MLflow and Weights & Biases where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger

from fl_lightning.callbacks import Dashboard
from fl_lightning.loggers import title_of
from fl_lightning.methods import FedAvg, Local
from fl_lightning.module import FederatedModule
from tests.support import blobs, fit, mlp

PICTURES = {"partition", "accuracy_by_round", "tsne_of_updates"}


def run(logger: Any, method: FederatedModule | None = None, rounds: int = 2) -> None:
    method = method or FedAvg(mlp(), lr=0.1, engine="stacked")
    fit(method, blobs(), rounds, callbacks=[Dashboard()], logger=logger, log_every_n_steps=1)


def test_files_of_the_csv_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    run(logger)
    folder = Path(logger.log_dir)
    assert {path.stem.rpartition("-")[0] for path in folder.rglob("pictures/**/*.png")} == PICTURES
    settings = yaml.safe_load((folder / "hparams.yaml").read_text())
    known = {"method": "FedAvg", "net": "MLP", "data": "TensorFederation", "partition": "own indices", "rounds": 2}
    assert known.items() <= settings.items()
    header = (folder / "metrics.csv").read_text().splitlines()[0]
    assert "test/acc" in header.split(",")
    assert "percent/" not in header, "what is logged stays as it is"


def test_names_of_runs() -> None:
    assert title_of({"method": "Local", "partition": "IID(clients=2)", "net": None}) == "Local, IID"


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    where = f"sqlite:///{tmp_path / 'mlflow.db'}"

    def logger(**more: Any) -> MLFlowLogger:
        return MLFlowLogger("tests", tracking_uri=where, artifact_location=str(tmp_path / "artifacts"), **more)

    first = logger()
    run(first, Local(mlp(), clients=[0, 1], engine="stacked"))
    client: Any = first.experiment
    found = client.get_run(first.run_id)
    assert found.info.run_name == "Local, MLP, TensorFederation, own indices"
    assert found.data.params["method"] == "Local"
    assert found.data.params["net"] == "MLP"
    assert found.data.params["clients"] == "[0, 1]", "Local's own"
    assert found.data.params["run.clients"] == "4"
    assert found.data.metrics["test/acc"] <= 1
    names = {
        Path(file.path).stem.rpartition("-")[0] for file in client.list_artifacts(first.run_id, "pictures/clients")
    }
    assert "accuracy_by_round" in names
    run(logger(run_id=first.run_id), Local(mlp(), clients=[0, 1], engine="stacked"), rounds=3)  # other settings
    named = logger(run_name="mine")
    run(named)
    assert client.get_run(named.run_id).info.run_name == "mine"


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    run(logger)
    experiment: Any = logger.experiment
    assert experiment.name == "FedAvg, MLP, TensorFederation, own indices"
    assert {"method": "FedAvg", "net": "MLP", "partition": "own indices"}.items() <= dict(experiment.config).items()
    wandb.finish()
    images = {path.name.rpartition("_")[0].rpartition("_")[0] for path in tmp_path.rglob("files/media/images/**/*.png")}
    assert images == PICTURES
    named = WandbLogger(save_dir=tmp_path, offline=True, name="mine")
    run(named)
    assert named.experiment.name == "mine"
    wandb.finish()
