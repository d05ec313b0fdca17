"""Rounds of several stages, and phases with a fixed number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

from fl_lightning.callbacks import FederatedCallback, LedgerCallback
from fl_lightning.engine import CapturedEngine, LocalMethod, Phase
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg
from fl_lightning.methods.lib.adaptation import fitting
from fl_lightning.parties import Me, Reply, Stage
from fl_lightning.wire import Message, State
from tests.support import blobs, fit, largest_difference, mlp, untimed, weights
from tests.support.engines import Dropped, seeded
from tests.support.stops import Stop, assert_same, fail, interrupt, kill, make, run, state_of, stopped


class Halves(FedAvg):
    """The cohort in two halves; before them, in the first round, one step of everybody of which nothing is kept."""

    probed = 0

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        cohort = sorted(cohort)
        halves = [Stage([], "nobody"), Stage(cohort[::2], "first"), Stage(cohort[1::2], "second")]
        if round:
            return halves
        return [Stage(range(len(self.roster)), "probe", absorb=self.count), *halves]

    def plan(self, me: Me) -> LocalMethod:
        return fitting(self, self.trainable_names, 1, 1, "probe") if me.stage == "probe" else super().plan(me)

    def leave(self, state: State, received: State, me: Me) -> Reply:
        reply = super().leave(state, received, me)
        return reply._replace(keep=None) if me.stage == "probe" else reply

    def count(self, messages: list[Message]) -> State:
        self.probed = len(messages)
        return {}

    def server_extras(self) -> dict[str, Any]:
        return {"probed": self.probed}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        self.probed = extras["probed"]


class Watch(FederatedCallback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, round: int, cohort: list[int]) -> None:
        self.calls.append(("round", list(cohort)))

    def on_before_aggregate(self, trainer: Any, pl_module: Any, messages: list[Message]) -> None:
        self.calls.append((pl_module.stage.name, [m.client for m in messages]))

    def on_round_end(self, trainer: Any, pl_module: Any, messages: list[Message]) -> None:
        self.calls.append(("end", [m.client for m in messages]))


def test_stages_follow_each_other_with_an_aggregate_after_each() -> None:
    method, watch = Halves(mlp(), lr=0.1, batch_size=8, engine="stacked"), Watch()
    trainer = fit(method, blobs(), rounds=2, callbacks=[watch])
    assert watch.calls == [
        ("round", [0, 1, 2, 3, 0, 2, 1, 3]),
        ("probe", [0, 1, 2, 3]),
        ("first", [0, 2]),
        ("second", [1, 3]),
        ("end", [0, 1, 2, 3, 0, 2, 1, 3]),
        ("round", [0, 2, 1, 3]),
        ("first", [0, 2]),
        ("second", [1, 3]),
        ("end", [0, 2, 1, 3]),
    ]
    assert [method.snapshots[client].rounds for client in range(4)] == [2] * 4  # the probe is no round of theirs
    assert method.completed_rounds == 2
    assert trainer.global_step == 5  # steps of the server
    size = 8 * sum(p.numel() for p in method.net.parameters())
    assert method.bytes_up == method.bytes_down == (4 + 4 + 4) * size
    assert method.summary["clients/trained"] == 4
    assert method.summary["comm/up_bytes"] == 4 * size


def test_a_stage_begins_where_the_last_one_ended() -> None:
    """Two halves of a round are two rounds of FedAvg with these cohorts and this round's streams."""
    method = Halves(mlp(), lr=0.1, batch_size=8, engine="stacked")
    fit(method, blobs(), rounds=1)
    start = mlp().double().state_dict()
    for cohort in ([0, 2], [1, 3]):
        other = FedAvg(mlp().double(), lr=0.1, batch_size=8, engine="stacked")
        other.net.load_state_dict(start)
        other.cohort = lambda round, cohort=cohort: cohort  # type: ignore[method-assign, misc]
        fit(other, blobs(), rounds=1)
        start = weights(other)
    assert largest_difference(weights(method), start) < 1e-14


@pytest.mark.parametrize(("hook", "times"), [("on_client_end", 3), ("on_before_aggregate", 2), ("on_client_start", 6)])
@pytest.mark.parametrize("act", [fail, interrupt])
def test_a_checkpoint_written_between_stages_is_resumed_there(hook: str, times: int, act: Any, tmp_path: Path) -> None:
    whole = make(Halves)
    run(whole, tmp_path / "whole")
    folder = tmp_path / "part"
    stopped(make(Halves), folder, OnExceptionCheckpoint(folder, "stop"), Stop(hook, times, act))
    saved = torch.load(folder / "stop.ckpt", weights_only=True)["fl_lightning"]
    # Ctrl-C acts between local steps: clients that have trained are aggregated before the run ends.
    stages = {3: 0, 2: 1, 6: 2} if act is fail else {3: 1, 2: 2, 6: 2}
    assert (saved["rounds"], saved["stages"]) == (0, stages[times])
    again = make(Halves)
    run(again, folder, ckpt_path=str(folder / "stop.ckpt"))
    assert_same(state_of(again), state_of(whole))
    assert (untimed(again.summary), again.probed) == (untimed(whole.summary), 4)  # type: ignore[attr-defined]


def test_the_ledger_keeps_completed_stages(tmp_path: Path) -> None:
    folder, (first, second) = tmp_path / "part", (LedgerCallback(folder=str(tmp_path)) for _ in range(2))
    stopped(make(Halves), folder, OnExceptionCheckpoint(folder, "stop"), first, Stop("on_client_end", 6, fail))
    again = make(Halves)
    run(again, folder, second, ckpt_path=str(folder / "stop.ckpt"))
    assert (second.total("up"), second.total("down")) == (again.bytes_up, again.bytes_down)


def test_killed_within_a_stage(tmp_path: Path) -> None:
    whole = make(Halves)
    run(whole, tmp_path / "whole")
    stopped(make(Halves), tmp_path / "part", Stop("on_before_aggregate", 5, kill))
    again = make(Halves)
    run(again, tmp_path / "part", ckpt_path=str(tmp_path / "part" / "last.ckpt"))
    assert_same(state_of(again), state_of(whole))


def test_checkpoints_from_before_stages_are_read(tmp_path: Path) -> None:
    method = FedAvg(mlp(), lr=0.1, batch_size=8)
    fit(method, blobs(), rounds=1).save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    for key in ("stages", "tally", "server"):
        del checkpoint["fl_lightning"][key]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    assert FedAvg.load_from_checkpoint(tmp_path / "old.ckpt").completed_rounds == 1


def test_a_round_without_clients_is_refused() -> None:
    method = FedAvg(mlp())
    method.stages = lambda round, cohort: [Stage([])]  # type: ignore[method-assign]
    with pytest.raises(FederationError, match="FedAvg has no client to train in round 0"):
        fit(method, blobs(), rounds=1)


class Bounded(FedAvg):
    """Five steps of every client, however few batches it has, and then an epoch."""

    bound: int | None = 5

    def phases(self) -> Sequence[Phase]:
        return [Phase(20, self.trainable_names, "bounded", self.bound), Phase(1, self.trainable_names, "free")]


@pytest.mark.parametrize(("net", "bound"), [("mlp", 5), ("dropout", 1), ("dropout", 5), ("dropout", 6)])
def test_phases_end_after_their_steps_in_every_engine(net: str, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedEngine, "seldom", 0)
    ends = []
    for engine in ("sequential", "stacked", "captured") if net == "mlp" else ("sequential", "stacked"):
        method = Bounded(mlp() if net == "mlp" else seeded(Dropped), lr=0.1, batch_size=8, momentum=0.5, engine=engine)
        method.bound = bound
        fit(method, blobs((40, 27, 8, 16, 5)), rounds=1)
        assert [method.snapshots[c].steps for c in range(5)] == [bound + n for n in (5, 4, 1, 2, 1)]
        ends.append(weights(method))
    assert largest_difference(ends[0], ends[1]) < 1e-12
    assert largest_difference(ends[1], ends[-1]) < 1e-12  # captured steps round where products go into the weights


def test_bounded_steps_are_the_first_of_unbounded_ones() -> None:
    class Two(FedAvg):
        def phases(self) -> Sequence[Phase]:
            return [Phase(2, self.trainable_names)]

    class Same(FedAvg):
        def phases(self) -> Sequence[Phase]:
            return [Phase(9, self.trainable_names, steps=6)]

    made: list[nn.Module] = []
    for kind in (Two, Same):
        method = kind(mlp(), lr=0.1, batch_size=8, engine="stacked")
        fit(method, blobs((24, 24)), rounds=1)  # three steps an epoch
        made.append(method.net)
    assert largest_difference(dict(made[0].named_parameters()), dict(made[1].named_parameters())) == 0.0
