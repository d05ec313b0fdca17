"""Signals are handled at safe points, and the run resumes bit for bit."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from fl_lightning import signals
from fl_lightning.callbacks import FederatedCallback, FederatedCheckpoint, RunRecord, SignalsCallback
from fl_lightning.methods import SCAFFOLD, FedAvg, Local
from fl_lightning.module import FederatedModule
from fl_lightning.signals import Deferred, check, held, listening
from tests.support import blobs, fit, mlp
from tests.support.stops import Stop, assert_same, state_of

ROUNDS = 4


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    torch.set_num_threads(1)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
    assert not signals._listeners


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_signals_are_recorded_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    deferred = Deferred(signal.SIGTERM, signal.SIGUSR1)
    deferred.install()
    send(signal.SIGUSR1)
    assert deferred.came == signal.SIGUSR1
    send(signal.SIGTERM)
    assert deferred.came == signal.SIGTERM
    send(signal.SIGUSR1)
    assert deferred.came == signal.SIGTERM
    deferred.restore()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_acts_at_once_but_not_within_held() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    deferred = Deferred(signal.SIGINT)
    deferred.install()
    send(signal.SIGINT)
    with held(), held():
        send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    deferred.restore()


def test_ignored_signals_stay_ignored_and_other_threads_install_nothing() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Deferred(signal.SIGINT).install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=Deferred(signal.SIGTERM).install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


def test_check_calls_the_listeners() -> None:
    calls: list[int] = []
    with listening(lambda: calls.append(1)):
        check()
    check()
    assert calls == [1]


@pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
def test_every_local_step_is_a_place_to_stop(engine: str) -> None:
    method, calls = FedAvg(mlp(), batch_size=8, epochs=2, engine=engine), []
    with listening(lambda: calls.append(1)):
        fit(method, blobs((16, 16)), rounds=1)
    around = 3  # before the round, before its stage and after the last
    assert len(calls) == around + (8 if engine == "sequential" else 4)


def make(kind: type[FederatedModule], **options: Any) -> FederatedModule:
    return kind(mlp(), **{"lr": 0.1, "epochs": 2, "batch_size": 8, "engine": "stacked", **options})


def run(method: FederatedModule, folder: Path, *callbacks: Any, ckpt_path: str | None = None, **kwargs: Any) -> None:
    saver = FederatedCheckpoint(dirpath=folder, enable_version_counter=False)
    every = [*callbacks, RunRecord(str(folder)), SignalsCallback(), saver]
    with warnings.catch_warnings():
        for said in ("the run ends with its last complete stage", "exists and is not empty"):
            warnings.filterwarnings("ignore", message=f".*{said}.*")
        fit(method, blobs(fraction=0.75), ROUNDS, ckpt_path, enable_checkpointing=True, callbacks=every, **kwargs)


def curves(folder: Path) -> Any:
    """All that the record of a run has by round, but for times."""
    found = json.loads((folder / "run.json").read_text())
    return {n: c for n, c in found["curves"].items() if not n.startswith("time/")}, found["clients"]


def code_of(method: FederatedModule, folder: Path, *callbacks: Any, **kwargs: Any) -> int:
    """The exit code of a run in a child."""
    folder.mkdir(parents=True, exist_ok=True)
    if (pid := os.fork()) == 0:
        code = 99
        try:
            with open(folder / "stderr", "w") as said:
                sys.stdout = sys.stderr = said
                signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    run(method, folder, *callbacks, **kwargs)
                    code = 0
                except SystemExit as end:
                    code = int(end.code or 0)
                except BaseException:
                    traceback.print_exc(file=said)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class At(FederatedCallback):
    """Sends a signal in the n-th local step."""

    def __init__(self, step: int, number: int) -> None:
        self.left, self.number = step, number

    def on_fit_start(self, *args: Any) -> None:
        signals._listeners.append(self._count)

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            send(self.number)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    states = {}
    for kind in (SCAFFOLD, Local):
        method, folder = make(kind), tmp_path_factory.mktemp(kind.__name__)
        run(method, folder)
        states[kind.__name__], states[f"{kind.__name__} curves"] = state_of(method), curves(folder)
    return states


@pytest.mark.parametrize("kind", [SCAFFOLD, Local])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[] if step == 17 else pytest.mark.slow) for step in (1, 17, 30)]
)
def test_a_signal_within_a_round(
    kind: type[FederatedModule], number: int, code: int, step: int, tmp_path: Path, whole: Any
) -> None:
    assert code_of(make(kind), tmp_path, At(step, number)) == code, (tmp_path / "stderr").read_text()
    again = make(kind)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["fl_lightning"]["rounds"]
    assert saved < ROUNDS
    run(again, tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    assert_same(state_of(again), whole[kind.__name__])


POINTS = [
    "on_round_start",
    "on_client_end",
    "on_before_aggregate",
    "on_round_end",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
]


@pytest.mark.parametrize("hook", POINTS)
def test_sigterm_at_every_point(hook: str, tmp_path: Path, whole: Any) -> None:
    stop = Stop(hook, 2, lambda: send(signal.SIGTERM))
    assert code_of(make(SCAFFOLD), tmp_path, stop) == 143, (tmp_path / "stderr").read_text()
    again = make(SCAFFOLD)
    run(again, tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    assert_same(state_of(again), whole["SCAFFOLD"])
    assert curves(tmp_path) == whole["SCAFFOLD curves"]


def test_a_server_step_and_its_snapshots_are_not_divided(tmp_path: Path, whole: Any) -> None:
    method, steps = make(SCAFFOLD), []
    step = method.server_step

    def struck(target: Any) -> None:
        step(target)
        steps.append(1)
        if len(steps) == 2:
            send(signal.SIGTERM)
            send(signal.SIGINT)
            check()  # a method may train in its aggregate

    method.server_step = struck  # type: ignore[method-assign]
    assert code_of(method, tmp_path) == 143, (tmp_path / "stderr").read_text()
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["fl_lightning"]
    assert saved["rounds"] == 2
    assert max(last for _, _, last in saved["clients"]["counters"].values()) == 1
    again = make(SCAFFOLD)
    run(again, tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    assert_same(state_of(again), whole["SCAFFOLD"])


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_requeues_from_a_checkpoint(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    """A program called scontrol notes what it was asked."""
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": "17", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NAME", "fit")
    options: dict[str, Any] = {"plugins": [SLURMEnvironment()], "default_root_dir": tmp_path}
    assert code_of(make(SCAFFOLD), tmp_path, At(17, number), **options) == 128 + number
    assert (tmp_path / "asked").exists() == (number == signal.SIGUSR1)
    assert not (tmp_path / "asked").exists() or (tmp_path / "asked").read_text() == "requeue 17\n"
    again = make(SCAFFOLD)
    run(again, tmp_path / "again", default_root_dir=tmp_path, plugins=[SLURMEnvironment()])  # from the one it finds
    assert_same(state_of(again), whole["SCAFFOLD"])
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()


def test_lightnings_handlers_are_used_if_the_effect_is_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_LIGHTNING_LEAVE", "signals")
    assert code_of(make(SCAFFOLD), tmp_path, Stop("on_round_start", 2, lambda: send(signal.SIGTERM))) == 0
