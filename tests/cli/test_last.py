"""``last.ckpt`` is the last round, and ``--ckpt_path last`` goes on with the newest run of the configuration."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from fl_lightning.callbacks import FederatedCheckpoint, RunRecord
from fl_lightning.cli import main
from fl_lightning.methods import FedAvg
from tests.support import blobs, fit, mlp, trainer

QUICKSTART = ["fit", "--config", "quickstart", "--quiet", "--model.engine=stacked"]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)


def rounds(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["fl_lightning"]["rounds"])


class Falling(FedAvg):
    """The first round is its best one: it learns backwards after that."""

    def aggregate(self, messages: Any) -> Any:
        towards, now = super().aggregate(messages), self.server_state()
        return {n: v if not self.completed_rounds else 2 * now[n] - v for n, v in towards.items()}


@pytest.mark.parametrize("kind", [FederatedCheckpoint, ModelCheckpoint])
def test_last_is_the_last_round_and_agrees_with_the_record(kind: type[ModelCheckpoint], tmp_path: Path) -> None:
    saver = kind(monitor="test/acc", mode="max", filename="best", save_last=True, dirpath=tmp_path)
    run, method = RunRecord(str(tmp_path)), Falling(mlp(), lr=0.3, engine="stacked")
    fit(method, blobs(), 4, callbacks=[run, saver], enable_checkpointing=True, logger=CSVLogger(tmp_path))
    best, last = rounds(tmp_path / "best.ckpt"), rounds(tmp_path / "last.ckpt")
    assert best < 4
    assert last == (4 if kind is FederatedCheckpoint else best)  # Lightning's own is what was saved last
    again = trainer()
    again.validate(Falling(mlp()), blobs(), str(tmp_path / "last.ckpt"), verbose=False)
    recorded = json.loads((tmp_path / "run.json").read_text())["curves"]["test/acc"]["values"]
    assert (float(again.callback_metrics["test/acc"]) == recorded[-1]) == (kind is FederatedCheckpoint)


def test_a_run_without_validation_has_the_last_round_alone(tmp_path: Path) -> None:
    saver = FederatedCheckpoint(dirpath=tmp_path)
    fit(FedAvg(mlp(), engine="stacked"), blobs(), 2, callbacks=[saver], enable_checkpointing=True, limit_val_batches=0)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    assert rounds(tmp_path / "last.ckpt") == 2


def test_rounds_between_validations_are_saved_too(tmp_path: Path) -> None:
    saver = FederatedCheckpoint(dirpath=tmp_path)
    every: dict[str, Any] = {"check_val_every_n_epoch": 2, "enable_checkpointing": True, "callbacks": [saver]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*could not find the monitored key.*")
        fit(FedAvg(mlp(), engine="stacked"), blobs(val_fraction=0.2), 3, **every)
    assert rounds(tmp_path / "last.ckpt") == 3
    assert rounds(tmp_path / "best.ckpt") == 2


def test_last_goes_on_with_the_newest_run_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    main([*QUICKSTART, "--trainer.max_epochs=2"])
    main([*QUICKSTART, "--trainer.max_epochs=3", "--model.lr=0.2"])  # another one, and newer
    capsys.readouterr()
    main([*QUICKSTART, "--trainer.max_epochs=4", "--ckpt_path", "last"])
    first = "runs/quickstart/version_0/checkpoints/last.ckpt"
    assert f"fl-lightning: resuming from {first}." in capsys.readouterr().err
    main([*QUICKSTART, "--trainer.max_epochs=5", "--ckpt_path", "last"])
    assert "resuming from runs/quickstart/version_2/checkpoints/last.ckpt" in capsys.readouterr().err
    main([*QUICKSTART, "--trainer.max_epochs=5"])
    resumed, whole = (Path(f"runs/quickstart/version_{number}") for number in (3, 4))
    states = [
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (resumed, whole)
    ]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    curves = [json.loads((run / "run.json").read_text())["curves"]["val/acc"] for run in (resumed, whole)]
    assert curves[0] == curves[1]
    assert curves[0]["rounds"] == [0, 1, 2, 3, 4]


def test_last_without_such_a_run_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        main([*QUICKSTART, "--trainer.max_epochs=1", "--ckpt_path", "last"])
    assert "resuming" not in capsys.readouterr().err
    assert rounds(Path("runs/quickstart/version_0/checkpoints/last.ckpt")) == 1
