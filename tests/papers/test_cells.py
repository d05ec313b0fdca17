"""Cells as cached and resumable runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.cli.lightning import FederatedCLI
from fl_lightning.papers import cells
from tests.support.tiny import GLOBAL, TINY, run


def test_best_and_final_accuracy_rounds_and_bytes_of_one_agent(tmp_path: Path) -> None:
    config = json.loads(json.dumps({**TINY, "trainer": {"max_epochs": 3}}))
    config["data"]["init_args"]["eval_only"] = [2]
    result = run(tmp_path, config, 0)
    curve, metrics = result["curves"]["local_test_acc"], result["metrics"]
    assert [client is not None for client in result["clients"]] == [client == 2 for client in range(12)]
    assert metrics["local_test_acc"] == pytest.approx(result["clients"][2], abs=1e-3)
    assert metrics["best_acc"] == max(curve)
    assert metrics["bytes_per_round"] == 2 * 6 * 4 * metrics["parameters"]  # six clients, up and down
    assert metrics.get("rounds_to_98") == next((i for i, acc in enumerate(curve, 1) if acc >= 98), None)


def test_a_run_is_resumed_cached_and_the_same_as_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", TINY, 1)
    assert whole["rounds"] == 13
    assert {len(curve) for curve in whole["curves"].values()} == {13}

    noted = cells.Recorder.on_validation_end

    def stops(self: Any, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 11:
            raise RuntimeError("power cut")
        noted(self, trainer, pl_module)

    monkeypatch.setattr(cells.Recorder, "on_validation_end", stops)
    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "part", TINY, 1)
    assert cells.cached(tmp_path / "part", TINY, 1) is None
    monkeypatch.undo()
    part = run(tmp_path / "part", TINY, 1)
    assert part["curves"] == whole["curves"]
    assert part["metrics"] == whole["metrics"]
    assert part["clients"] == whole["clients"]

    monkeypatch.setattr(FederatedCLI, "__init__", lambda *a, **k: pytest.fail("a cached run was run again"))
    assert run(tmp_path / "part", TINY, 1) == part


def test_sub_populations_of_a_run(tmp_path: Path) -> None:
    result = run(tmp_path, {**TINY, "trainer": {"max_epochs": 2}}, 0)
    scores, metrics = result["clients"], result["metrics"]
    majority, minority = sum(scores[:8]) / 8, sum(scores[8:]) / 4
    assert metrics["majority"] == pytest.approx(majority, abs=1e-3)
    assert metrics["minority"] == pytest.approx(minority, abs=1e-3)
    assert metrics["gap"] == pytest.approx(majority - minority, abs=1e-3)
    assert metrics["local_test_acc"] == pytest.approx((8 * majority + 4 * minority) / 12, abs=1e-3)
    assert metrics["variance"] >= 8 * 4 / 12**2 * metrics["gap"] ** 2 - 1e-3
    assert metrics["parameters"] == 64 * 8 + 8 * 10


def test_global_accuracy_loss_weights_and_times_of_a_run(tmp_path: Path) -> None:
    """The clients' test sets make up the global one: its accuracy is their mean, weighted by their sizes."""
    result = run(tmp_path, GLOBAL, 0)
    curves, times = result["curves"], result["times"]
    for name in ("global_test_acc", "local_test_acc", "train_loss", "fusion/largest", "fusion/effective"):
        assert len(curves[name]) == 3
    assert {len(times[name]) for name in ("elapsed", "clients", "server")} == {3}
    assert result["metrics"]["global_test_acc"] == curves["global_test_acc"][-1]
    assert result["metrics"]["global_test_acc_last5"] == pytest.approx(sum(curves["global_test_acc"]) / 3)
    assert abs(curves["global_test_acc"][-1] - curves["local_test_acc"][-1]) < 2
    assert len(set(curves["global_test_acc"])) > 1
    assert times["elapsed"] == sorted(times["elapsed"])
    assert curves["train_loss"][-1] < curves["train_loss"][0]
