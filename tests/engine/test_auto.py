"""The choice of an engine."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_lightning.engine import auto, make_engine
from fl_lightning.engine.auto import Probe
from fl_lightning.engine.contract import Job, Phase, Result
from fl_lightning.local_optim import Adam
from fl_lightning.methods import FedAvg
from fl_lightning.nets import LeNetBN
from tests.support import CLASSES, Idle, blobs, fit, mlp

pytestmark = pytest.mark.race


class _Clock:
    """Time that passes only when a probe says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def probe(self, name: str, once: float, step: float) -> Any:
        def run(steps: int) -> None:
            self.now += once + step * steps

        return SimpleNamespace(engine=SimpleNamespace(name=name), run=run)


def test_setup_cost_of_a_round_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are made ready for a whole round take longer than the few steps of a probe."""
    clock = _Clock(monkeypatch)
    probes = [clock.probe("sequential", 0.01, 0.02), clock.probe("captured", 0.06, 0.01)]
    assert auto.race(probes, steps=500) == pytest.approx([10.01, 5.06])
    assert auto._fastest(probes, steps=500)[0] == "captured"
    assert auto._fastest(probes, steps=4)[0] == "sequential"
    name, reason = auto._fastest(probes, steps=1)
    assert name == "sequential"
    assert "captured 0.43" in reason


@pytest.mark.parametrize(
    ("stacked", "captured", "chosen"),
    [(0.5, 0.51, "captured"), (0.5, 0.6, "stacked"), (0.98, 0.99, "sequential"), (0.98, 0.9, "captured")],
    ids=str,
)
def test_captured_is_preferred_to_stacked_within_the_margin(
    monkeypatch: pytest.MonkeyPatch, stacked: float, captured: float, chosen: str
) -> None:
    """A busy machine makes the two change places, and a whole run pays for it."""
    clock, steps = _Clock(monkeypatch), {"sequential": 1.0, "stacked": stacked, "captured": captured}
    assert auto._fastest([clock.probe(name, 0.0, step) for name, step in steps.items()], steps=10)[0] == chosen


def test_a_round_has_the_steps_of_its_largest_client_and_longest_phase() -> None:
    data = blobs(sizes=(25, 9, 12))
    data.setup("fit")
    method = FedAvg(net=mlp(), epochs=4, batch_size=10)
    jobs = [Job(client, {}) for client in range(3)]
    phases = [Phase(4, ())]
    object.__setattr__(method, "phases", lambda: phases)
    assert auto.round_steps(method, data.federation, jobs) == 4 * 3
    phases[:] = [Phase(1, ()), Phase(9, (), steps=7)]
    assert auto.round_steps(method, data.federation, jobs) == 7


def test_no_probe_if_no_client_takes_a_step() -> None:
    method = Idle(net=mlp())
    fit(method, blobs(), rounds=1)
    assert (method.engine.choice, method.engine.reason) == ("sequential", "no client takes a step")  # type: ignore[attr-defined]


def test_a_round_is_predicted_from_two_probes() -> None:
    """Preparation counts once, steps as often as they are made; a noisy pair of probes flatters nobody."""
    assert auto.predicted(short=3.0, long=7.0, steps=101) == pytest.approx(103.0)  # 2 s of preparation, 1 s a step
    assert auto.predicted(short=8.0, long=7.0, steps=100) == pytest.approx(140.0)


@pytest.mark.parametrize(
    ("sequential", "stacked", "given_up"), [(0.5, 1.0, True), (0.9, 1.0, False), (0.1, 0.4, False)], ids=str
)
def test_long_steps_that_lose_clearly_are_not_traced(
    monkeypatch: pytest.MonkeyPatch, sequential: float, stacked: float, given_up: bool
) -> None:
    """A step of a second is all arithmetic; one of milliseconds may be calls alone, which a capture spares."""
    clock = _Clock(monkeypatch)
    reason = auto._skip_capture(clock.probe("sequential", 0.0, sequential), clock.probe("stacked", 0.0, stacked))
    assert bool(reason) == given_up
    assert not reason or "0.50 of its speed" in reason


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([4.0, 2.0], [4.0, 1.0], 0.25),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, math.inf], [0.5, math.inf], 0.5),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([math.nan, 2.0], [1.0, 2.0], math.inf),
        ([1.0, math.inf], [1.0, 2.0], math.inf),
        ([1, 2], [1, 2], 0.0),
        ([1, 2], [1, 3], math.inf),
        ([], [], 0.0),
    ],
    ids=str,
)
def test_disagreement_of_nan_and_integers(left: Any, right: Any, expected: float) -> None:
    """And is not forgotten over a later tensor that agrees."""
    one, other = ([Result({"w": torch.tensor(w), "v": torch.ones(1)}, 0.0, 1)] for w in (left, right))
    assert auto.disagreement(one, other) == pytest.approx(expected)


def test_nothing_is_traced_if_stacked_steps_are_long_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "LENGTHY", 0.0)
    monkeypatch.setattr(auto, "CLEARLY", 0.0)
    monkeypatch.setattr(auto.CapturedEngine, "mapped", lambda *_: pytest.fail("a step was traced"))
    method = FedAvg(mlp(), lr=0.1, batch_size=8)
    fit(method, blobs(), rounds=1)
    assert method.engine.choice == "sequential"
    assert "stacked steps are long" in method.engine.reason  # type: ignore[attr-defined]


def test_rounding_amplified_by_an_optimizer_rejects_no_engine() -> None:
    """A bias before a normalisation has no gradient but rounding, of which Adam makes whole steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        method = FedAvg(LeNetBN(num_classes=CLASSES), batch_size=8, seed=0)
    method.local = replace(method.local, optimizer="Adam", lr=0.01)
    federation = blobs(shape=(1, 28, 28)).federation
    jobs = [Job(client, method.server_state()) for client in range(2)]
    sequential, stacked = (Probe(make_engine(name), method, federation, jobs, 0) for name in ("sequential", "stacked"))
    assert auto.disagreement(sequential.run(), stacked.run()) > auto.TOLERANCE[torch.float32]
    assert stacked.refusal(sequential.plain().run()) == ""
    assert method.local.rule == Adam()
