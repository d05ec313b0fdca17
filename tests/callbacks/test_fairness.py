"""FairnessCallback in real runs: what it logs and writes equals what is computed by hand."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning.callbacks import FairnessCallback
from fl_lightning.datamodules import Digits, Multimodal, TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedPer, Local
from fl_lightning.nets import MLP
from tests.support import CLASSES, blobs, fit, mlp, trainer

MODES = [0, 1, 0, 0, 1, 0]


def federation(**kwargs: Any) -> TensorFederation:
    """Six clients in two modes."""
    inner = blobs((24, 16, 20, 24, 8, 16)).federation
    lists: dict[str, Any] = {"train": list(inner.train), "test": list(inner.test)}
    meta = kwargs.pop("meta", {"mode": MODES})
    return TensorFederation(
        inner.inputs, inner.targets, **lists, num_classes=CLASSES, meta=meta, **{"val_fraction": 0, **kwargs}
    )


def by_hand(scores: torch.Tensor) -> dict[str, float]:
    a = scores.numpy()
    major, minor = a[np.array(MODES) == 0], a[np.array(MODES) == 1]
    share = a / a.sum()
    share = share[share > 0]
    return {
        "acc_majority": np.nanmean(major),
        "acc_minority": np.nanmean(minor),
        "gap": np.nanmean(major) - np.nanmean(minor),
        "variance": np.nanvar(100 * a),
        "jain": np.nanmean(a) ** 2 / np.nanmean(a**2),
        "entropy": -(share * np.log(share)).sum() / np.log(len(a)),
    }


def test_logs_every_round_and_at_the_test(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Look(FairnessCallback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_validation_end(trainer, pl_module)
            seen.append(pl_module.evaluator.scores["test"])

    board, sheet = TensorBoardLogger(tmp_path, "tb"), CSVLogger(tmp_path, "csv")
    method, data = FedPer(mlp(), lr=0.05), federation()
    run = fit(method, data, rounds=3, callbacks=[Look()], logger=[board, sheet], log_every_n_steps=1)
    assert len(seen) == 3
    rows = [row for row in csv.DictReader(open(Path(sheet.log_dir) / "metrics.csv")) if row["test/gap"]]  # noqa: SIM115
    for row, scores in zip(rows, seen, strict=True):
        assert {k: float(row[f"test/{k}"]) for k in by_hand(scores)} == pytest.approx(by_hand(scores))
    metrics = {k: float(run.callback_metrics[f"test/{k}"]) for k in by_hand(seen[-1])}
    assert metrics == pytest.approx(by_hand(seen[-1]))

    events = EventAccumulator(board.log_dir, size_guidance={"histograms": 0}).Reload()
    assert events.Tags()["histograms"] == ["percent/test/acc_clients"]
    histograms, curve = events.Histograms("percent/test/acc_clients"), events.Scalars("test/acc_majority")
    assert [h.step for h in histograms] == [s.step for s in curve]
    assert [h.histogram_value.num for h in histograms] == [6, 6, 6]
    assert histograms[-1].histogram_value.sum == pytest.approx(100 * float(seen[-1].sum()))

    (tested,) = trainer(callbacks=[FairnessCallback()], logger=False, default_root_dir=tmp_path).test(
        method, datamodule=data, verbose=False
    )
    expected = by_hand(method.evaluator.scores["test"])
    assert {k: tested[f"test/{k}"] for k in expected} == pytest.approx(expected)
    assert (tmp_path / "fairness_test.csv").exists()


def test_table(tmp_path: Path) -> None:
    method = FedAvg(mlp(), lr=0.05)
    logger = CSVLogger(tmp_path)
    fit(method, federation(), rounds=2, callbacks=[FairnessCallback()], logger=logger)
    scores = method.evaluator.scores["test"]
    hand = by_hand(scores)
    rows = list(csv.DictReader(open(Path(logger.log_dir) / "fairness_test.csv")))  # noqa: SIM115
    assert [row["population"] for row in rows] == ["all", "majority", "minority", "gap"]
    assert [row["clients"] for row in rows] == ["6", "4", "2", ""]
    wanted = [float(scores.mean()), hand["acc_majority"], hand["acc_minority"], hand["gap"]]
    assert [float(row["accuracy"]) for row in rows] == pytest.approx([100 * value for value in wanted], abs=0.006)
    assert float(rows[0]["variance"]) == pytest.approx(hand["variance"], abs=0.006)
    assert float(rows[0]["Jain index"]) == pytest.approx(hand["jain"], abs=1e-4)
    assert float(rows[0]["entropy"]) == pytest.approx(hand["entropy"], abs=1e-4)
    assert float(rows[0]["worst tenth"]) == pytest.approx(100 * float(scores.min()), abs=0.006)
    minority = 100 * scores[torch.tensor(MODES) == 1]
    assert float(rows[2]["variance"]) == pytest.approx(float(minority.var(correction=0)), abs=0.006)
    text = (Path(logger.log_dir) / "fairness_test.md").read_text().splitlines()
    assert [re.findall(r"[^|]+", line)[0].strip() for line in text] == [
        "population",
        "---",
        *("all", "majority", "minority", "gap"),
    ]
    assert len({line.count("|") for line in text}) == 1


def test_gain_over_local(tmp_path: Path) -> None:
    """Local's accuracies come from its checkpoint or as a list."""
    local = Local(mlp(), lr=0.05)
    run = fit(local, federation(), rounds=2, callbacks=[FairnessCallback(folder=str(tmp_path))])
    run.save_checkpoint(tmp_path / "local.ckpt")
    alone = local.evaluator.scores["test"]
    for given in (str(tmp_path / "local.ckpt"), alone.tolist()):
        method = FedAvg(mlp(), lr=0.05)
        run = fit(method, federation(), callbacks=[FairnessCallback(local=given, folder=str(tmp_path))])
        gained = method.evaluator.scores["test"] - alone
        assert float(run.callback_metrics["test/local_gap"]) == pytest.approx(float(gained.mean()))
        assert float(run.callback_metrics["test/local_worse"]) == pytest.approx(float((gained < 0).double().mean()))
        at_test = trainer(callbacks=[FairnessCallback(local=given, folder=str(tmp_path))])
        (tested,) = at_test.test(method, datamodule=federation(), verbose=False)
        assert tested["test/local_gap"] == pytest.approx(float(gained.mean()))
    (row, *_) = csv.DictReader(open(tmp_path / "fairness_test.csv"))  # noqa: SIM115
    assert float(row["gain over Local"]) == pytest.approx(100 * float(gained.mean()), abs=0.006)


@pytest.mark.parametrize("limit", [1, 2])
def test_clients_that_were_not_evaluated_are_left_out(limit: int, tmp_path: Path) -> None:
    method = FedAvg(mlp(), lr=0.05)
    callback = FairnessCallback(folder=str(tmp_path))
    run = fit(method, federation(eval_clients=2), callbacks=[callback], limit_val_batches=limit)
    scores = method.evaluator.scores["test"]
    assert int(scores.isnan().sum()) == 6 - 2 * limit
    hand = by_hand(scores)
    for name in ("acc_majority", "acc_minority", "gap", "variance", "jain"):
        assert float(run.callback_metrics[f"test/{name}"]) == pytest.approx(hand[name])
    rows = list(csv.DictReader(open(tmp_path / "fairness_test.csv")))  # noqa: SIM115
    assert int(rows[0]["clients"]) == 2 * limit


def test_without_groups_and_with_many(tmp_path: Path) -> None:
    run = fit(FedAvg(mlp()), federation(meta={}), 1, callbacks=[FairnessCallback(folder=str(tmp_path))])
    assert "test/variance" in run.callback_metrics
    assert not {"test/gap", "test/acc_majority"} & set(run.callback_metrics)
    assert len((tmp_path / "fairness_test.csv").read_text().splitlines()) == 2

    users = {"user": ["a", "b", "c", "a", "b", "a"]}
    callback = FairnessCallback("user", folder=str(tmp_path))
    method = FedAvg(mlp(), lr=0.05)
    run = fit(method, federation(meta=users), 1, callbacks=[callback])
    scores = method.evaluator.scores["test"]
    assert float(run.callback_metrics["test/acc_user_c"]) == pytest.approx(float(scores[2]))
    assert float(run.callback_metrics["test/gap"]) == pytest.approx(float(scores[[0, 3, 5]].mean() - scores[2]))
    rows = list(csv.DictReader(open(tmp_path / "fairness_test.csv")))  # noqa: SIM115
    assert [row["population"] for row in rows] == ["all", "user_a", "user_b", "user_c", "gap"]


def test_multimodal_digits_and_other_callbacks(tmp_path: Path) -> None:
    """With the partition that notes modes, and a stock callback that monitors what is logged here."""
    scheme = Multimodal(modes=[[1, 3, 5, 7, 9], [0, 2, 4, 6, 8]], clients=[10, 5])
    stop = EarlyStopping("val/gap", patience=50)
    method = FedAvg(MLP(64, (16,)), lr=0.1)
    run = fit(method, Digits(partition=scheme), 2, callbacks=[FairnessCallback(folder=str(tmp_path)), stop])
    scores = method.evaluator.scores["val"]
    expected = float(scores[:10].mean() - scores[10:].mean())
    assert float(run.callback_metrics["val/gap"]) == pytest.approx(expected)
    assert float(stop.best_score) <= expected + 1e-9


def test_validate_writes_a_table_and_a_dry_run_does_not(tmp_path: Path) -> None:
    method = FedAvg(mlp())
    fit(method, federation(), callbacks=[FairnessCallback(folder=str(tmp_path / "dry"))], fast_dev_run=True)
    assert not (tmp_path / "dry").exists()
    callback = FairnessCallback(folder=str(tmp_path))
    trainer(callbacks=[callback]).validate(method, datamodule=federation(), verbose=False)
    assert (tmp_path / "fairness_test.md").exists()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="needs a federated method, not BoringModel"):
        trainer(callbacks=[FairnessCallback()], precision="32-true").fit(BoringModel())
    with pytest.raises(FederationError, match="There are 2 Local accuracies for 6 clients"):
        fit(FedAvg(mlp()), federation(), callbacks=[FairnessCallback(local=[0.5, 0.5])])
    with pytest.raises(FederationError, match="There is no checkpoint"):
        fit(FedAvg(mlp()), federation(), callbacks=[FairnessCallback(local=str(tmp_path / "none.ckpt"))])
    (tmp_path / "bad.ckpt").write_text("no")
    with pytest.raises(FederationError, match="is not a checkpoint of fl_lightning"):
        fit(FedAvg(mlp()), federation(), callbacks=[FairnessCallback(local=str(tmp_path / "bad.ckpt"))])
    run = fit(FedAvg(mlp()), federation(), 1)
    run.save_checkpoint(tmp_path / "avg.ckpt")
    with pytest.raises(FederationError, match="is of FedAvg, not of Local"):
        fit(FedAvg(mlp()), federation(), callbacks=[FairnessCallback(local=str(tmp_path / "avg.ckpt"))])
