"""Headline metrics other than accuracy: fairness, records, progress, dashboard and comparison of a regression."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning.callbacks import Dashboard, FairnessCallback, FederatedCheckpoint, RunRecord
from fl_lightning.cli import main
from fl_lightning.datamodules import IID, TensorFederation
from fl_lightning.measure import ACCURACY, Measure
from fl_lightning.methods import FedAvg
from fl_lightning.metrics import fairness_summary, worst_decile
from fl_lightning.nets import MLP
from fl_lightning.progress import RoundProgress
from fl_lightning.tasks import Classification, MultiLabel, NextToken, Regression, Segmentation
from tests.support import fit

SITES = ("a", "a", "a", "b")
RMSE = Measure("rmse", higher_is_better=False, share=False)


def sites() -> TensorFederation:
    """Four sites, of which the last has noisy targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=generator)
    y = 20 * x.sum(1)
    y[60:] += 30 * torch.randn(20, generator=generator)
    train, test = ([list(range(20 * k + a, 20 * k + b)) for k in range(4)] for a, b in ((0, 12), (12, 20)))
    return TensorFederation(x, y, train=train, test=test, val_fraction=0, meta={"mode": SITES})


def regression(**options: Any) -> FedAvg:
    settings: dict[str, Any] = {"lr": 0.01, "epochs": 2, "batch_size": 6, "engine": "sequential", "seed": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FedAvg(MLP(3, (), 1, bias=True), task="Regression", **{**settings, **options})


def test_measures_of_the_tasks() -> None:
    assert Classification().measure == ACCURACY
    assert Regression().measure == RMSE
    assert Regression(headline="r2").measure == Measure("r2", True, False)
    assert MultiLabel().measure == Measure("f1")
    assert Segmentation().measure == Measure("iou")
    assert NextToken().measure == Measure("perplexity", False, False)


def test_fairness_of_errors_by_hand() -> None:
    """Less is better: the worst are the greatest, and a gap or gain above 0 is in favour."""
    errors, groups = torch.tensor([1.0, 2.0, 3.0, 10.0, torch.nan]), torch.tensor([0, 0, 0, 1, 1])
    found = fairness_summary(errors, groups, local=torch.tensor([2.0, 2.0, 2.0, 20.0, 1.0]), measure=RMSE)
    wanted = {"variance": np.var([1, 2, 3, 10]), "worst10": 10, "jain": 16**2 / (4 * 114), "gap": 8}
    assert {name: float(found[name]) for name in wanted} == pytest.approx(wanted)
    assert float(found["local_gap"]) == pytest.approx((1 + 0 - 1 + 10) / 4)
    assert float(found["local_worse"]) == 0.25
    assert float(worst_decile(errors)) == 1.0


def test_callbacks_follow_the_headline_metric(tmp_path: Path) -> None:
    method, alone = regression(), [30.0, 30.0, 30.0, 1.0]
    callbacks = [FairnessCallback(local=alone), RunRecord(), Dashboard(tsne=False)]
    loggers = [TensorBoardLogger(tmp_path, "tb"), CSVLogger(tmp_path, "csv")]
    logged = fit(method, sites(), 2, callbacks=callbacks, logger=loggers).callback_metrics
    assert not [name for name in logged if "acc" in name]
    errors = method.evaluator.scores["test"]
    assert float(errors[3]) == max(errors)
    assert float(logged["test/variance"]) == pytest.approx(float(errors.var(correction=0)))
    assert float(logged["test/gap"]) == pytest.approx(float(errors[3] - errors[:3].mean()))
    assert float(logged["test/rmse_majority"]) == pytest.approx(float(errors[:3].mean()))
    assert float(logged["test/rmse_worst10"]) == pytest.approx(float(errors[3]))
    assert float(logged["test/rmse_median"]) == pytest.approx(float(errors.median()), rel=0.5)
    assert float(logged["test/local_gap"]) == pytest.approx(float((torch.tensor(alone) - errors).mean()))
    assert "test/variance_corrected" not in logged
    folder = Path(loggers[0].log_dir)
    table = (folder / "fairness_test.md").read_text().splitlines()
    assert table[0].startswith("| population | clients | RMSE | RMSE (95%) | worst tenth")
    assert float(table[2].split("|")[5]) == pytest.approx(float(errors[3]), rel=1e-4)
    record = json.loads((folder / "run.json").read_text())
    assert record["measure"] == {"name": "rmse", "higher_is_better": False, "share": False}
    assert record["clients"]["accuracy"][-1] == pytest.approx(errors.tolist(), rel=1e-4)
    assert "test/rmse_worst10" in (Path(loggers[1].log_dir) / "metrics.csv").read_text().splitlines()[0]
    events = EventAccumulator(str(folder))
    events.Reload()
    assert "clients/RMSE_by_round" in events.Tags()["images"]
    layout = str(events.Tensors(next(tag for tag in events.Tags()["tensors"] if "custom_scalars" in tag))[0])
    assert "test/rmse_worst10$" in layout
    assert "acc" not in layout


def test_runs_are_compared_by_the_headline_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest error is set in bold, nothing is in percent, and other metrics have a column."""
    monkeypatch.chdir(tmp_path)
    for rate, seed in ((0.01, 0), (0.01, 1), (0.001, 0), (0.001, 1)):
        name = f"{rate}-{seed}"
        callbacks = [RunRecord(f"runs/{name}")]
        fit(regression(lr=rate, seed=seed), sites(), 2, callbacks=callbacks, logger=CSVLogger(tmp_path, name))
    main(["compare", "runs", "--quiet"])
    lines = Path("comparison/table.md").read_text().splitlines()
    assert lines[0].startswith("Last round, RMSE on the clients' own test samples")
    heads, slow, fast = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[2], lines[4], lines[5]))
    assert heads == ["run", "mean", "worst tenth", "variance", "mean MAE", "mean R²", "rounds"]
    mean, worst = (re.fullmatch(r"\*\*(.+)\*\*", cell) for cell in fast[1:3])
    assert mean is not None
    assert worst is not None
    assert float(mean[1].split()[0]) < float(slow[1].split()[0])
    assert float(worst[1].split()[0]) > float(mean[1].split()[0])
    report = Path("comparison/report.html").read_text()
    assert "How many clients end with which RMSE" in report
    assert "accuracy" not in report.lower()


@pytest.mark.parametrize("headline", ["rmse", "r2"])
def test_the_best_round_is_that_of_the_headline_metric(headline: str, tmp_path: Path) -> None:
    """Also after a resume, whatever way is better."""
    values: list[float] = []

    def run(rounds: int, **more: Any) -> FederatedCheckpoint:
        best = FederatedCheckpoint(dirpath=tmp_path)
        method = regression(lr=0.05, momentum=0.9)
        method.task = Regression(headline=headline)
        data = TensorFederation(sites().inputs, sites().targets, partition=IID(4), seed=0)
        fit(method, data, rounds, callbacks=[best, Noted(f"val/{headline}", values)], **more)
        return best

    run(3, enable_checkpointing=True)
    best = run(6, enable_checkpointing=True, ckpt_path=str(tmp_path / "last.ckpt"))
    assert best.monitor == f"val/{headline}"
    assert len(values) == 6
    assert float(best.best_model_score) == pytest.approx(min(values) if headline == "rmse" else max(values))


class Noted(Callback):
    """Notes a metric after every validation."""

    def __init__(self, name: str, values: list[float]) -> None:
        self.name, self.values = name, values

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics[self.name]))


def test_progress_names_what_counts() -> None:
    bar = RoundProgress(quiet=True)
    run = fit(regression(), sites(), 1, callbacks=[bar], enable_progress_bar=True)
    assert bar._score == f"test RMSE {float(run.callback_metrics['test/rmse']):.4g}"
