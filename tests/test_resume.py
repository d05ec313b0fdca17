"""A run that stops anywhere and is resumed ends like the run that never stopped, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from fl_lightning.engine import CapturedEngine, captured
from fl_lightning.methods import FedAvg, FedProx, Local
from fl_lightning.module import FederatedModule
from fl_lightning.optim import FedAdam
from tests.support.stops import (
    Stop,
    assert_same,
    fail,
    interrupt,
    kill,
    make,
    resumed,
    run,
    state_of,
    stopped,
    terminate,
)

HOOKS = ["on_round_start", "on_client_start", "on_client_end", "on_before_aggregate", "on_round_end"]
LIGHTNING_HOOKS = ["on_train_batch_end", "on_validation_start", "on_train_epoch_end", "on_save_checkpoint"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    states = {}
    for kind in (FedAvg, FedProx, Local):
        method = make(kind)
        run(method, tmp_path_factory.mktemp(kind.__name__))
        states[kind.__name__] = state_of(method)
    return states


@pytest.mark.parametrize("hook", HOOKS + LIGHTNING_HOOKS)
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_resume_after_kill_9_at_every_point(hook: str, times: int, tmp_path: Path, uninterrupted: Any) -> None:
    stopped(make(FedAvg), tmp_path, Stop(hook, times, kill), early=times < 3)
    assert_same(resumed(FedAvg, tmp_path), uninterrupted["FedAvg"])


@pytest.mark.parametrize("act", [kill, interrupt, terminate, fail])
@pytest.mark.parametrize("kind", [FedAvg, FedProx, Local])
def test_resume_after_any_stop_within_a_round(
    act: Any, kind: type[FederatedModule], tmp_path: Path, uninterrupted: Any
) -> None:
    stopped(make(kind), tmp_path, Stop("on_client_end", 5, act))
    assert (tmp_path / "last.ckpt").exists()
    assert not (tmp_path / "epoch=3.ckpt").exists()
    assert_same(resumed(kind, tmp_path), uninterrupted[kind.__name__])


@pytest.mark.parametrize("act", [pytest.param(interrupt, marks=pytest.mark.slow), fail])
@pytest.mark.parametrize("hook", HOOKS)
def test_checkpoint_written_within_a_round(act: Any, hook: str, tmp_path: Path, uninterrupted: Any) -> None:
    """A checkpoint that the exception itself triggers, in the middle of a round, is resumed as well."""
    stopped(make(Local), tmp_path, OnExceptionCheckpoint(tmp_path, "stop"), Stop(hook, 3, act))
    method = make(Local)
    run(method, tmp_path, ckpt_path=str(tmp_path / "stop.ckpt"))
    assert_same(state_of(method), uninterrupted["Local"])


def test_interrupt_while_the_round_is_committed(tmp_path: Path, uninterrupted: Any) -> None:
    """Ctrl-C between the server's step and the snapshots must not split them."""
    method, steps = make(Local), []
    step = method.server_step

    def interrupted(target: dict[str, torch.Tensor]) -> None:
        steps.append(step(target))
        if len(steps) == 2:
            interrupt()

    method.server_step = interrupted  # type: ignore[method-assign]
    stopped(method, tmp_path, OnExceptionCheckpoint(tmp_path, "stop"))
    assert torch.load(tmp_path / "stop.ckpt", weights_only=True)["fl_lightning"]["rounds"] == 2
    again = make(Local)
    run(again, tmp_path, ckpt_path=str(tmp_path / "stop.ckpt"))
    assert_same(state_of(again), uninterrupted["Local"])


def test_server_optimizer_state_is_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"server_optimizer": lambda p: FedAdam(p, lr=0.02)}
    whole = make(FedAvg, **options)
    run(whole, tmp_path / "whole")
    stopped(make(FedAvg, **options), tmp_path / "part", Stop("on_round_end", 3, kill))
    assert_same(resumed(FedAvg, tmp_path / "part", **options), state_of(whole))


def test_captured_runs_resume_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces depend on the round and its clients, so a resumed run traces what the whole one did."""
    monkeypatch.setattr(CapturedEngine, "seldom", 3)
    monkeypatch.setattr(CapturedEngine, "convolved", 1)
    whole = make(Local, engine="captured")
    made: list[int] = []
    trace = captured.Trace.__init__
    monkeypatch.setattr(captured.Trace, "__init__", lambda *args: (made.append(1), trace(*args))[1])
    run(whole, tmp_path / "whole")
    assert made
    stopped(make(Local, engine="captured"), tmp_path / "part", Stop("on_round_start", 4, kill))
    assert_same(resumed(Local, tmp_path / "part", engine="captured"), state_of(whole))


def test_the_choice_of_auto_is_kept(tmp_path: Path) -> None:
    stopped(make(FedAvg, engine="auto"), tmp_path, Stop("on_round_end", 2, kill))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["fl_lightning"]["engine"]
    assert saved in ("sequential", "stacked", "captured")
    other = "stacked" if saved == "sequential" else "sequential"
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    checkpoint["fl_lightning"]["engine"] = other  # a probe would choose the first again
    torch.save(checkpoint, tmp_path / "last.ckpt")
    method = make(FedAvg, engine="auto")
    run(method, tmp_path, ckpt_path=str(tmp_path / "last.ckpt"))
    assert method.engine.choice == other  # type: ignore[attr-defined]
