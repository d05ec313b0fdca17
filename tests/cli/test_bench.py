"""``fl-lightning bench`` on something tiny; what it says of speed is not tested."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.bench import plain
from fl_lightning.bench.data import images
from fl_lightning.bench.workloads import Workload, own_loop
from fl_lightning.cli import bench, main
from fl_lightning.methods import FedAvg, WAFFLe
from fl_lightning.nets import MLP

ROOT = Path(__file__).parents[2]


def tiny() -> Any:
    return images((1, 4, 4), clients=4, sizes=(9, 12), fraction=0.5)


def fedavg(**options: Any) -> FedAvg:
    return FedAvg(MLP(in_features=16, hidden=(8,)), lr=0.1, epochs=2, batch_size=4, **options)


def waffle(**options: Any) -> WAFFLe:
    net = MLP(in_features=16, hidden=(8,))
    return WAFFLe(net, {"fc1": 4}, lr=0.1, epochs=2, batch_size=4, **options)


def test_the_last_line_has_a_ratio_for_every_workload(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = {"mnist-mlp": Workload(tiny, fedavg, plain.sgd, 1), "waffle-mlp": Workload(tiny, waffle, plain.waffle, 1)}
    monkeypatch.setattr(bench, "WORKLOADS", loads)
    main(["bench", "--json", "--repeats", "1", "--output", str(tmp_path / "speed.json")])
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["workloads"].keys() == loads.keys()
    assert all(row["ratio"] > 0 for row in last["workloads"].values())
    kept = json.loads((tmp_path / "speed.json").read_text())["workloads"]["mnist-mlp"]
    assert {"ratios", "steps_per_second", "engine", "validation_share", "peak_memory_mb"} <= kept.keys()


@pytest.mark.parametrize(("make", "loop"), [(fedavg, plain.sgd), (waffle, plain.waffle), (waffle, own_loop)])
def test_plain_loops_take_the_steps_that_clients_take(make: Any, loop: Any) -> None:
    data, method = tiny(), make()
    federation = data.federation
    x = federation.features(federation.inputs, method.compute_dtype)
    steps = loop(method, federation, x, [0, 3])
    assert steps == sum(2 * -(-len(federation.train[client]) // 4) for client in (0, 3))


def test_the_page_has_what_the_files_have() -> None:
    spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    text = page.PAGE.read_text()
    assert page.written(text) == text, "run python benchmarks/page.py"
