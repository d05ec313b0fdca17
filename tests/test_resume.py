"""A run that stops anywhere and is resumed ends like the run that never stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from fl_lightning import methods
from fl_lightning.engine import CapturedEngine, captured
from fl_lightning.methods import FedAvg, FedProx, Local
from fl_lightning.module import FederatedModule
from fl_lightning.optim import FedAdam
from tests.support import cases
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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of uninterrupted runs by the method's name."""
    torch.set_num_threads(1)

    class States(dict[str, dict[str, Any]]):
        def __missing__(self, name: str) -> dict[str, Any]:
            method = make(getattr(methods, name))
            run(method, tmp_path_factory.mktemp(name))
            self[name] = state_of(method)
            return self[name]

    return States()


def kills() -> Iterator[Any]:
    """Every hook, one call of a hook of either kind for the quick tests."""
    for hook in HOOKS + LIGHTNING_HOOKS:
        for times in (1, 2, 3):
            quick = times == 2 and hook in ("on_before_aggregate", "on_save_checkpoint")
            yield pytest.param(hook, times, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("hook", "times"), list(kills()))
def test_resume_after_kill_9_at_every_point(hook: str, times: int, tmp_path: Path, uninterrupted: Any) -> None:
    stopped(make(FedAvg), tmp_path, Stop(hook, times, kill), early=times < 3)
    assert_same(resumed(FedAvg, tmp_path), uninterrupted["FedAvg"])


@pytest.mark.parametrize("act", [kill, interrupt, terminate, fail])
@pytest.mark.parametrize("kind", [FedAvg, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (FedProx, Local))])
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


FROZEN = {"inference": {"components": 3, "steps": 10, "basis": "frozen", "weights": "sampled"}}
SCHEDULE = {"warmup": 1, "refit_every": 2, "latents": "per_client"}
CACHED = {"schedule": "joint", "evaluation": {"dictionary": "cached"}}
#: Every method and variant, and what else a method may have to bring back.
VARIANTS = [
    *cases.CASES,
    cases.Case("FedDAF-frozen", "FedDAF", {**SCHEDULE, **FROZEN}, ("norm",)),
    cases.Case("WAFFLe-joint-cached", "WAFFLe", {**cases.FACTORS, **CACHED}),
]


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_every_variant_goes_on_where_it_was_stopped(case: cases.Case, tmp_path: Path) -> None:
    """In its third round: from the checkpoint of the second, as after a kill, and from that of the stop itself."""
    expected, stop = whole(case, tmp_path), Stop("on_client_end", 1, fail, round=2)
    with pytest.raises(RuntimeError, match="client lost"):
        run(variant(case), tmp_path, OnExceptionCheckpoint(tmp_path, "stop"), stop, data=cases.data(case))
    for name in ("last.ckpt", "stop.ckpt"):
        assert torch.load(tmp_path / name, weights_only=True)["fl_lightning"]["rounds"] == 2
        assert_same(again(case, tmp_path / name), expected)
    loaded = type(variant(case)).load_from_checkpoint(tmp_path / "whole" / "last.ckpt", net=cases.NETS[net_of(case)]())
    assert_same(
        state_of(loaded), {name: found for name, found in expected.items() if not name.startswith("/personal/")}
    )


def net_of(case: cases.Case) -> str:
    return "norm" if "norm" in case.nets else case.nets[0]


def variant(case: cases.Case) -> FederatedModule:
    """The case on its net with BatchNorm, where it has one."""
    return case.make(net_of(case), case.policies[0])


def whole(case: cases.Case, folder: Path) -> dict[str, Any]:
    """All that the case leaves when nothing stops it."""
    method = variant(case)
    run(method, folder / "whole", data=cases.data(case))
    return state_of(method)


def again(case: cases.Case, path: Path) -> dict[str, Any]:
    """All that the case leaves when it goes on from a checkpoint, if it had written one."""
    method = variant(case)
    run(method, path.parent, ckpt_path=str(path) if path.exists() else None, data=cases.data(case))
    return state_of(method)


#: Variants with several stages in a round: a hook's call in a round, and the stages that are over then.
STAGED = {"FedGroup": (0, 2, 1), "FedCluster": (2, 2, 1), "FedCluster-dominant": (1, 2, 1)}


@pytest.mark.parametrize("name", STAGED)
def test_stages_that_were_over_stay_so(name: str, tmp_path: Path) -> None:
    """Also those of a cold start, in the first round."""
    case = replace(next(case for case in cases.CASES if case.name == name), fraction=1.0)
    round, times, stages = STAGED[name]
    expected, stop = whole(case, tmp_path), Stop("on_before_aggregate", times, fail, round)
    with pytest.raises(RuntimeError, match="client lost"):
        run(variant(case), tmp_path, OnExceptionCheckpoint(tmp_path, "stop"), stop, data=cases.data(case))
    saved = torch.load(tmp_path / "stop.ckpt", weights_only=True)["fl_lightning"]
    assert (saved["rounds"], saved["stages"]) == (round, stages)
    assert_same(again(case, tmp_path / "stop.ckpt"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_every_variant_killed_at_every_hook(case: cases.Case, tmp_path: Path) -> None:
    expected = whole(case, tmp_path)
    for hook in HOOKS + LIGHTNING_HOOKS:
        folder = tmp_path / hook
        stopped(variant(case), folder, Stop(hook, 1, kill, round=2), data=cases.data(case))
        assert_same(again(case, folder / "last.ckpt"), expected)
