"""Snapshots on disk: the same run as with snapshots in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning.client import ClientSnapshot, DiskSnapshotStore
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, Local
from fl_lightning.module import FederatedModule
from tests.engine.test_equality import differ
from tests.support import blobs, fit, mlp


def trained(kind: type[FederatedModule], rounds: int = 3, **options: Any) -> FederatedModule:
    ckpt, keep = options.pop("ckpt", None), options.pop("keep", [])
    method = kind(mlp(), lr=0.1, batch_size=8, engine="sequential", **options)
    data = blobs((40, 27, 33, 16, 21), fraction=0.6)
    fit(method, data, rounds=rounds, ckpt_path=ckpt, callbacks=keep, enable_checkpointing=bool(keep))
    return method


@pytest.mark.parametrize("kind", [Local, SCAFFOLD])
def test_a_run_with_snapshots_on_disk_is_the_same_and_resumes(kind: type[FederatedModule], tmp_path: Path) -> None:
    whole, disk = trained(kind), trained(kind, store=str(tmp_path / "a"))
    assert differ(whole, disk) == 0.0
    keep = ModelCheckpoint(tmp_path, save_last=True)
    trained(kind, rounds=2, store=str(tmp_path / "b"), keep=[keep])
    resumed = trained(kind, store=str(tmp_path / "c"), ckpt=str(tmp_path / "last.ckpt"))
    assert differ(whole, resumed) == 0.0
    in_memory = trained(kind, ckpt=str(tmp_path / "last.ckpt"))
    assert differ(whole, in_memory) == 0.0


def test_rows_survive_growth_and_clients_may_come_in_any_order(tmp_path: Path) -> None:
    store = DiskSnapshotStore(tmp_path)
    values = {client: torch.full((2, 3), float(client)) for client in range(99, -1, -1)}
    for client, value in values.items():
        store[client] = ClientSnapshot({"w": value, "n": torch.tensor(client)}, steps=client)
    assert list(store) == list(range(100))
    for client, value in values.items():
        assert torch.equal(store[client].private["w"], value)
        assert int(store[client].private["n"]) == store[client].steps == client
    assert store[100].private == {}


def test_entries_must_be_those_of_all_clients_and_the_run_on_a_cpu(tmp_path: Path) -> None:
    store = DiskSnapshotStore(tmp_path)
    store[0] = ClientSnapshot({"w": torch.zeros(2)})
    with pytest.raises(FederationError, match="keep the same entries"):
        store[1] = ClientSnapshot({"v": torch.zeros(2)})
    with pytest.raises(FederationError, match="serves runs on a CPU, not on cuda"):
        store.to(torch.device("cuda"), torch.float32)


def test_entries_take_the_precision_of_the_run(tmp_path: Path) -> None:
    store = DiskSnapshotStore(tmp_path)
    values = [torch.linspace(0, 1, 3, dtype=torch.float64) + client for client in range(20)]
    for client, value in enumerate(values):
        store[client] = ClientSnapshot({"w": value, "n": torch.tensor(client)})
    store.to(torch.device("cpu"), torch.float32)
    store[20] = ClientSnapshot({"w": torch.zeros(3), "n": torch.tensor(20)})
    for client, value in enumerate(values):
        assert store[client].private["w"].dtype == torch.float32
        assert torch.equal(store[client].private["w"], value.float())
        assert int(store[client].private["n"]) == client
