"""ClustersCallback: what is logged and written, also after a resume."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning.callbacks import ClustersCallback
from fl_lightning.callbacks.clusters import _agreement
from fl_lightning.errors import FederationError
from fl_lightning.methods import IFCA, FedAvg, FedCluster, FeSEM
from tests.support import blobs, fit, mlp, planted


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a logger write where they are started."""
    monkeypatch.chdir(tmp_path)


def fesem() -> FeSEM:
    return FeSEM(mlp(), clusters=2, centres="same", lr=0.3, batch_size=8, engine="stacked")


def test_sizes_moves_and_agreement(tmp_path: Path) -> None:
    method, callback = fesem(), ClustersCallback(folder=str(tmp_path))
    kinds = ["even", "odd"] * 6
    run = fit(method, planted(12, meta={"kind": kinds}), rounds=2, callbacks=[callback])
    logs = {n.removeprefix("clusters/"): float(v) for n, v in run.callback_metrics.items() if n.startswith("clusters/")}
    first, second = callback.history[0], callback.history[1]
    assert second == method.assignment()
    moved = sum(a != b for a, b in zip(first, second, strict=True)) / 12
    assert moved > 0
    assert logs == {"size_0": 6, "size_1": 6, "used": 2, "moved": pytest.approx(moved), "nmi_kind": pytest.approx(1)}
    with (tmp_path / "clusters.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["round", *map(str, range(12))]
    assert [[int(x) for x in row] for row in rows[1:]] == [[0, *first], [1, *second]]


def test_a_callback_that_is_used_again_holds_the_last_run_alone() -> None:
    callback = ClustersCallback()
    for rounds in (2, 1):
        fit(fesem(), planted(4), rounds=rounds, callbacks=[callback])
    assert list(callback.history) == [0]


def test_every_so_many_rounds_and_resumed(tmp_path: Path) -> None:
    whole = ClustersCallback(every=2, folder=str(tmp_path / "whole"))
    fit(fesem(), planted(12), rounds=4, callbacks=[whole])
    assert sorted(whole.history) == [1, 3]
    saver = ModelCheckpoint(tmp_path, filename="run", save_on_train_epoch_end=True)
    fit(fesem(), planted(12), rounds=2, enable_checkpointing=True, callbacks=[ClustersCallback(every=2), saver])
    again = ClustersCallback(every=2, folder=str(tmp_path / "again"))
    fit(fesem(), planted(12), rounds=4, ckpt_path=str(tmp_path / "run.ckpt"), callbacks=[again])
    assert again.history == whole.history
    tables = [(tmp_path / name / "clusters.csv").read_bytes() for name in ("whole", "again")]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("kind", [IFCA, FedCluster])
def test_other_methods_with_clusters(kind: type[IFCA]) -> None:
    callback = ClustersCallback()
    method = kind(mlp(), clusters=2, batch_size=8, engine="stacked")
    run = fit(method, planted(), rounds=1, callbacks=[callback])
    assert sum(float(run.callback_metrics[f"clusters/size_{q}"]) for q in range(2)) == 8
    assert callback.history == {0: method.assignment()}


def test_agreement() -> None:
    assert _agreement(["a", "a", "b", "b"], [1, 1, 0, 0]) == pytest.approx(1)
    assert _agreement([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(0)


def test_refusals() -> None:
    with pytest.raises(FederationError, match="needs a method with clusters, such as IFCA, not FedAvg"):
        fit(FedAvg(mlp()), blobs(), rounds=1, callbacks=[ClustersCallback()])
    with pytest.raises(FederationError, match="every must be 1 or more"):
        ClustersCallback(every=0)
