"""A federated run through Lightning's ddp: clients shared out over ranks, the same result on each."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg
from fl_lightning.parties import Returned
from fl_lightning.simulation import RankedClients
from fl_lightning.snapshots import ClientSnapshot
from fl_lightning.wire import Message
from tests.support import blobs, fit, largest_difference, mlp
from tests.support.ddp_run import main

ROOT = Path(__file__).parent.parent


def run(kind: str, engine: str, devices: int, path: Path) -> list[dict[str, Any]]:
    if devices == 1:
        main(kind, engine, 1, str(path))
    else:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.support.ddp_run", kind, engine, str(devices), str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, timeout=300)
    return [torch.load(f"{path}.{rank}", weights_only=True) for rank in range(devices)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine"), [("SCAFFOLD", "sequential"), ("FedAvg", "auto"), ("private", "sequential")]
)
def test_two_ranks_agree_with_one_process(kind: str, engine: str, tmp_path: Path) -> None:
    (alone,) = run(kind, engine, 1, tmp_path / "one")
    first, second = run(kind, engine, 2, tmp_path / "two")
    assert largest_difference(first["weights"], second["weights"]) == 0.0
    assert first["choice"] == second["choice"]
    assert first["weights"].keys() == alone["weights"].keys()
    bound = 0.0 if engine == "sequential" else 1e-9
    assert largest_difference(first["weights"], alone["weights"]) <= bound
    assert first["acc"] == second["acc"] == alone["acc"]
    assert first["up"] == alone["up"]
    assert first["ledger"] == second["ledger"] == alone["ledger"]


def test_a_message_is_pickled_without_the_stack_it_is_a_view_of(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = torch.arange(16000.0).view(16, 1000)
    returned = [Returned(Message(client, {"w": stack[client]}, 1)) for client in reversed(range(16))]
    sent: list[int] = []

    def gather(parts: list[Any], own: Any) -> None:
        sent.extend(len(pickle.dumps(one)) for one in own[0])
        parts[:] = [own, ([], {3: ClientSnapshot(rounds=1)})]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    method: Any = FedAvg(mlp())
    method._trainer = SimpleNamespace(world_size=2)
    clients = RankedClients(method)
    received = clients.gather(returned)
    assert max(sent) < 2 * stack[0].nbytes
    assert torch.equal(torch.stack([one.message.tensors["w"] for one in received]), stack)
    clients.commit([3], 0)
    assert method.snapshots[3].rounds == 1


def test_a_strategy_that_shards_the_model_is_refused() -> None:
    with pytest.raises(FederationError, match="distributes clients, not the model: Sharded cannot be used"):
        fit(FedAvg(mlp()), blobs(), rounds=1, strategy=Sharded(), precision="32-true")


class Sharded(FSDPStrategy):
    """One that would run here, on one CPU."""
