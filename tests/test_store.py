"""Snapshots on disk: the same run as with snapshots in memory."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedPer, Local
from fl_lightning.module import FederatedModule
from fl_lightning.snapshots import ClientSnapshot, DiskSnapshotStore
from tests.support import blobs, fit, mlp, trainer
from tests.support.engines import differ


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


def filled(store: DiskSnapshotStore, clients: Iterable[int], add: float = 0.0) -> DiskSnapshotStore:
    for client in clients:
        store[client] = ClientSnapshot({"w": torch.full((1000,), client + add)})
    return store


def held(store: DiskSnapshotStore) -> dict[int, float]:
    return {client: float(store[client].private["w"].mean()) for client in store}


def test_a_new_client_gets_a_new_row(tmp_path: Path) -> None:
    store = filled(DiskSnapshotStore(tmp_path), (0, 1))
    del store[0]
    filled(store, (2, 0))
    assert held(store) == {0: 0.0, 1: 1.0, 2: 2.0}


def test_stores_in_one_folder_are_independent(tmp_path: Path) -> None:
    """Files of several ranks, or of two runs: a mapped one is neither cut short nor written to."""
    first, second = DiskSnapshotStore(tmp_path), DiskSnapshotStore(tmp_path)
    filled(first, range(100))
    filled(second, range(33), add=0.5)
    assert held(first) == {client: float(client) for client in range(100)}
    assert held(filled(second, range(33, 40), add=0.5)) == {client: client + 0.5 for client in range(40)}
    twin = copy.deepcopy(first)
    filled(twin, range(200), add=0.25)
    assert held(first) == {client: float(client) for client in range(100)}
    assert held(twin) == {client: client + 0.25 for client in range(200)}
    del first, second, twin
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_has_files_of_its_own(tmp_path: Path) -> None:
    store = filled(DiskSnapshotStore(tmp_path), range(16))
    child = os.fork()
    if child == 0:
        right = held(filled(store, (3,), add=0.5)) == {c: c + 0.5 * (c == 3) for c in range(16)}
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert held(filled(store, range(16, 40))) == {client: float(client) for client in range(40)}


def test_entries_must_be_those_of_all_clients_and_the_run_on_a_cpu(tmp_path: Path) -> None:
    store = DiskSnapshotStore(tmp_path)
    store[0] = ClientSnapshot({"w": torch.zeros(2)})
    with pytest.raises(FederationError, match="keep the same entries"):
        store[1] = ClientSnapshot({"v": torch.zeros(2)})
    with pytest.raises(FederationError, match="works on a CPU, not on cuda"):
        store.to(torch.device("cuda"), torch.float32)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize(("before", "after"), [("bf16-true", "32-true"), ("32-true", "bf16-true")])
def test_clients_that_trained_in_one_precision_are_tested_in_another(
    before: str, after: str, on_disk: bool, tmp_path: Path
) -> None:
    made = [
        FedPer(mlp(), lr=0.1, batch_size=8, engine="sequential", store=str(tmp_path / name) if on_disk else None)
        for name in ("one", "other")
    ]
    fit(made[0], blobs(), rounds=1, precision=before).save_checkpoint(tmp_path / "clients.ckpt")
    run = trainer(precision=after)
    run.test(made[1], datamodule=blobs(), ckpt_path=tmp_path / "clients.ckpt", verbose=False)
    own, other = (method.snapshots[0].private["head.weight"] for method in made)
    assert other.dtype == made[1].net.head.weight.dtype == (torch.bfloat16 if after == "bf16-true" else torch.float32)
    assert torch.equal(own.to(other.dtype), other)


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
