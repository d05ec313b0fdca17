"""Clients shared out to worker processes: the same results, and what happens when a process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from fl_lightning import signals
from fl_lightning.callbacks import FederatedCallback
from fl_lightning.engine import Batch, WorkerEngine, make_engine
from fl_lightning.engine.workers import _Worker
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedAvg, Local, WAFFLe
from fl_lightning.module import FederatedModule
from fl_lightning.wire import State
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, weights
from tests.support.engines import differ, seeded

SETTINGS: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 8}


def trained(kind: type[FederatedModule], workers: int, **options: Any) -> FederatedModule:
    method = kind(mlp(), **{**SETTINGS, "engine": "captured", "workers": workers, **options})
    fit(method, blobs((40, 27, 33, 16, 21), fraction=0.8), rounds=3)
    return method


@pytest.mark.parametrize(
    ("kind", "options"),
    [(FedAvg, {}), (SCAFFOLD, {"momentum": 0.9}), (WAFFLe, {"factors": {"fc1": 6}})],
    ids=["FedAvg", "SCAFFOLD", "WAFFLe"],
)
def test_workers_agree_with_one_process(kind: type[FederatedModule], options: dict[str, Any]) -> None:
    one, two, three = (trained(kind, n, **options) for n in (1, 2, 3))
    assert max(differ(one, two), differ(one, three)) < 1e-9
    assert two.snapshots[0].steps == one.snapshots[0].steps


def test_sequential_workers_agree_bit_for_bit() -> None:
    one, two = (trained(Local, n, engine="sequential") for n in (1, 2))
    assert differ(one, two) == 0.0


class Scaled(nn.Module):
    """Makes a tensor of the default precision in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * torch.full((FEATURES,), 1 / 3))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "32-true"])
def test_workers_compute_with_the_trainers_precision(precision: str) -> None:
    methods = [FedAvg(seeded(Scaled), **SETTINGS, engine="sequential", workers=n) for n in (1, 2)]
    for method in methods:
        fit(method, blobs(), rounds=2, precision=precision)
    assert largest_difference(*map(weights, methods)) == 0.0


def test_auto_chooses_once_for_all_workers_and_the_checkpoint_keeps_it(tmp_path: Path) -> None:
    method = FedAvg(mlp(), **SETTINGS, workers=2)
    keep = ModelCheckpoint(tmp_path, save_last=True)
    fit(method, blobs(), rounds=2, callbacks=[keep], enable_checkpointing=True)
    assert method.engine.choice in ("sequential", "stacked", "captured")
    other = FedAvg(mlp(), **SETTINGS, workers=2)
    fit(other, blobs(), rounds=2, ckpt_path=str(tmp_path / "last.ckpt"))
    assert other.engine.choice == method.engine.choice
    assert largest_difference(weights(other), weights(method)) == 0.0


class Killer(FederatedCallback):
    """Kills a worker in the middle of the run, once or whenever it comes back."""

    def __init__(self, always: bool) -> None:
        self.always = always

    def on_round_start(self, trainer: Any, pl_module: Any, round: int, cohort: list[int]) -> None:
        if round == 1:
            worker = pl_module.engine._pool[0]
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()
            if self.always:
                worker._launch = lambda: None


@pytest.mark.filterwarnings("ignore:Worker 0")
def test_a_worker_that_dies_is_restarted_once() -> None:
    method = FedAvg(mlp(), **SETTINGS, engine="captured", workers=2)
    with pytest.warns(UserWarning, match=r"Worker 0 \(process \d+\) died"):
        fit(method, blobs(), rounds=3, callbacks=[Killer(always=False)])
    whole = FedAvg(mlp(), **SETTINGS, engine="captured", workers=2)
    fit(whole, blobs(), rounds=3)
    assert largest_difference(weights(method), weights(whole)) == 0.0


@pytest.mark.filterwarnings("ignore:Worker 0")
def test_a_worker_that_dies_again_ends_the_run_with_its_name_and_a_resume_is_exact(tmp_path: Path) -> None:
    method = FedAvg(mlp(), **SETTINGS, engine="captured", workers=2)
    keep = ModelCheckpoint(tmp_path, save_last=True)
    with pytest.raises(FederationError, match=r"Worker 0 .* died twice .* clients 0, .*checkpoint is intact"):
        fit(method, blobs(), rounds=3, callbacks=[Killer(always=True), keep], enable_checkpointing=True)
    resumed, whole = (FedAvg(mlp(), **SETTINGS, engine="captured", workers=2) for _ in range(2))
    fit(resumed, blobs(), rounds=3, ckpt_path=str(tmp_path / "last.ckpt"))
    fit(whole, blobs(), rounds=3)
    assert largest_difference(weights(resumed), weights(whole)) == 0.0


@pytest.mark.parametrize(("code", "says"), [(1, "could not start.*if __name__ == '__main__'"), (-9, "died twice")])
@pytest.mark.filterwarnings("ignore:Worker 0")
def test_a_worker_that_cannot_start_is_not_restarted(code: int, says: str) -> None:
    class Gone(_Worker):
        def _launch(self) -> None:
            self.connection, other = torch.multiprocessing.Pipe()
            self.process = SimpleNamespace(pid=1, exitcode=code, join=lambda timeout: None)
            other.close()

    worker = Gone(0, (), 60.0)
    worker.begin(SimpleNamespace(clients=[0]))  # type: ignore[arg-type]
    with pytest.raises(FederationError, match=says):
        worker.results()


class Broken(FedAvg):
    """Fails in a worker."""

    def client_loss(self, state: State, batch: Batch) -> tuple[torch.Tensor, State]:
        raise ValueError("no such loss")


def test_an_error_in_a_worker_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no such loss") as caught:
        fit(Broken(mlp(), **SETTINGS, engine="sequential", workers=2), blobs(), rounds=1)
    assert "in client_loss" in str(caught.value.__cause__)


class TwoReasonsError(Exception):
    """Cannot be made again from its text."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


class Awkward(FedAvg):
    """Fails in a worker with an error that cannot be read again, or not even be written."""

    def client_loss(self, state: State, batch: Batch) -> tuple[torch.Tensor, State]:
        error: Exception = TwoReasonsError("this", "that")
        if self.local.lr > 0.5:
            error = ValueError("this and that")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error


@pytest.mark.parametrize(("lr", "name"), [(0.1, "TwoReasonsError"), (0.9, "ValueError")])
def test_an_error_that_cannot_be_sent_keeps_its_reason(lr: float, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: this and that") as caught:
        fit(Awkward(mlp(), **{**SETTINGS, "lr": lr}, engine="sequential", workers=2), blobs(), rounds=1)
    assert "in client_loss" in str(caught.value.__cause__)


def test_workers_are_stopped_with_the_run() -> None:
    method = FedAvg(mlp(), **SETTINGS, engine="sequential", workers=2)
    seen: list[Any] = []

    class Look(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, messages: Any) -> None:
            seen.extend(worker.process for worker in pl_module.engine._pool)

    fit(method, blobs(), rounds=1, callbacks=[Look()])
    assert isinstance(method.engine, WorkerEngine)
    assert len(seen) == 2
    assert not any(process.is_alive() for process in seen)


def test_a_method_that_cannot_be_sent_is_refused_in_a_sentence() -> None:
    class Inner(FedAvg):
        pass

    with pytest.raises(FederationError, match=r"Inner cannot be sent to worker processes .*workers=1"):
        fit(Inner(mlp(), **SETTINGS, engine="sequential", workers=2), blobs(), rounds=1)
    with pytest.raises(FederationError, match="workers must be 1 or more, not 0"):
        FedAvg(mlp(), workers=0)


class Stopper(FederatedCallback):
    """Stops a worker before the second round."""

    def on_round_start(self, trainer: Any, pl_module: Any, round: int, cohort: list[int]) -> None:
        if round == 1:
            os.kill(pl_module.engine._pool[1].process.pid, signal.SIGSTOP)


def test_a_worker_that_hangs_ends_the_run_with_its_name_and_is_gone() -> None:
    method = FedAvg(mlp(), **SETTINGS, engine="sequential", workers=2)
    method.engine = make_engine("sequential", workers=2, timeout=0.5)
    seen: list[Any] = []

    class Look(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, messages: Any) -> None:
            seen.extend(worker.process for worker in pl_module.engine._pool)

    with pytest.raises(
        FederationError, match=r"Worker 1 \(process \d+\) has taken no step for 0\.5 seconds while training"
    ):
        fit(method, blobs(), rounds=3, callbacks=[Stopper(), Look()])
    method.engine.reset()
    assert len(seen) == 2
    assert not any(process.is_alive() for process in seen)


class Slow(FedAvg):
    """Takes longer than the time limit for its steps together, and much less for each."""

    def client_loss(self, state: State, batch: Batch) -> tuple[torch.Tensor, State]:
        time.sleep(0.1)
        return super().client_loss(state, batch)


def test_a_slow_worker_does_not_hang() -> None:
    method = Slow(mlp(), **SETTINGS, engine="sequential")
    method.engine = make_engine("sequential", workers=2, timeout=1.0)
    fit(method, blobs(), rounds=1)  # 14 steps in one worker
    assert method.completed_rounds == 1


def test_signals_are_handled_while_workers_train() -> None:
    def stop() -> None:
        raise SystemExit(143)

    method = Slow(mlp(), **SETTINGS, engine="sequential", workers=2)
    with pytest.raises(SystemExit), signals.listening(stop):
        fit(method, blobs(), rounds=1)
    method.engine.reset()


PARENT = """
import os, signal, sys, time
from fl_lightning.callbacks import FederatedCallback
from fl_lightning.methods import FedAvg
from tests.support import blobs, fit, mlp

class Wait(FederatedCallback):
    def on_round_end(self, trainer, module, messages):
        pids = [worker.process.pid for worker in module.engine._pool]
        os.kill(pids[0], signal.SIGSTOP)
        print(*pids, flush=True)
        time.sleep(60)

if __name__ == "__main__":
    fit(FedAvg(mlp(), engine="sequential", workers=2), blobs(), rounds=1, callbacks=[Wait()])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process ends with its parent on Linux alone")
def test_no_process_survives_a_run_that_is_killed_while_a_worker_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = str(Path(__file__).parent.parent.parent)
    run = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert run.stdout is not None
    workers = list(map(int, run.stdout.readline().split()))
    assert len(workers) == 2
    run.kill()
    run.wait()
    end = time.monotonic() + 30
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def alive(process: int) -> bool:
    """Whether it runs or is stopped; one that only waits for its exit code to be read is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
