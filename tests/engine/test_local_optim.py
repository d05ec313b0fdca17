"""Local optimizers equal torch.optim's in every engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import local_optim
from fl_lightning.engine import (
    Batch,
    CapturedEngine,
    Gradient,
    Job,
    LocalTraining,
    Phase,
    Result,
    Update,
    make_engine,
)
from fl_lightning.engine.schedule import ClientSchedule
from fl_lightning.errors import FederationError
from fl_lightning.local_optim import SGD, Adam, AdamW, Group, Groups, LocalOptimizer, Product, RMSprop
from fl_lightning.methods import FedAvg
from fl_lightning.schedules import Cosine, Linear, Step, WarmUp
from fl_lightning.wire import State
from tests.support import RAGGED, blobs, mlp

OPTIMIZERS: dict[str, tuple[LocalOptimizer, Any]] = {
    "sgd": (SGD(), lambda p, lr: torch.optim.SGD(p, lr)),
    "momentum": (SGD(0.9, 0.01), lambda p, lr: torch.optim.SGD(p, lr, 0.9, weight_decay=0.01)),
    "nesterov": (
        SGD(0.9, 0.01, nesterov=True),
        lambda p, lr: torch.optim.SGD(p, lr, 0.9, weight_decay=0.01, nesterov=True),
    ),
    "adam": (Adam((0.8, 0.95), 1e-6, 0.02), lambda p, lr: torch.optim.Adam(p, lr, (0.8, 0.95), 1e-6, 0.02)),
    "adamw": (AdamW(weight_decay=0.1), lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1)),
    "rmsprop": (RMSprop(0.9, weight_decay=0.01), lambda p, lr: torch.optim.RMSprop(p, lr, 0.9, weight_decay=0.01)),
    "centered": (
        RMSprop(0.9, momentum=0.5, centered=True),
        lambda p, lr: torch.optim.RMSprop(p, lr, 0.9, momentum=0.5, centered=True),
    ),
}
ENGINES = ("sequential", "stacked", "captured")
LR = 0.02


@pytest.fixture(autouse=True)
def _trace_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are short: a captured step is traced the first time it is seen."""
    monkeypatch.setattr(CapturedEngine, "seldom", 0)


def method(local: LocalTraining) -> FedAvg:
    found = FedAvg(mlp().double(), engine="sequential", seed=3)
    found.local = local
    return found


def train(local: LocalTraining, engine: str, jobs: Sequence[Job] | None = None, round: int = 0) -> list[Result]:
    module = method(local)
    jobs = jobs or [Job(client, module.server_state()) for client in range(len(RAGGED))]
    return make_engine(engine).train(module, blobs(seed=1).federation, jobs, round)


def reference(local: LocalTraining, make: Any, client: int, rounds: Sequence[int] = (0,), kept: bool = False) -> State:
    """A bare loop; the rate of every step is asked of the schedule."""
    module, federation = method(local), blobs(seed=1).federation
    net = copy.deepcopy(module.net)
    optimizer = make(net.parameters(), LR)
    for round in rounds:
        schedule, step = ClientSchedule.of(module, federation, client, round), 0
        if not kept:
            optimizer = make(net.parameters(), LR)
        orders = [schedule.order().split(local.batch_size) for _ in range(local.epochs)]
        for epoch, parts in enumerate(orders):
            for part in parts:
                for group in optimizer.param_groups:
                    group["lr"] = local.rate(round, epoch, step, sum(map(len, orders)))
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(federation.inputs[part].double()), federation.targets[part]).backward()
                optimizer.step()
                step += 1
    return {name: value.detach() for name, value in net.named_parameters()}


def difference(left: State, right: State) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torch(name: str, engine: str) -> None:
    """Ragged clients: each has its own number of steps when a stack shrinks and meets again."""
    rule, make = OPTIMIZERS[name]
    local = LocalTraining(LR, 2, 8, optimizer=rule)
    for client, result in enumerate(train(local, engine)):
        assert difference(result.state, reference(local, make, client)) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("schedule", "by"), [(Linear(1, 0.2), "step"), (Step(1, 0.5), "epoch")])
@pytest.mark.parametrize("name", ["nesterov", "adamw", "centered"])
def test_rates_change_from_step_to_step(engine: str, schedule: Any, by: Any, name: str) -> None:
    """Clients of a stack are at different parts of their rounds, hence at different rates."""
    rule, make = OPTIMIZERS[name]
    local = LocalTraining(LR, 2, 8, optimizer=rule, schedule=schedule, schedule_by=by).in_round(1, 3)
    for client, result in enumerate(train(local, engine, round=1)):
        assert difference(result.state, reference(local, make, client, rounds=(1,))) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["nesterov", "adamw", "rmsprop"])
def test_kept_optimizer_state_continues(engine: str, name: str) -> None:
    """Two rounds with the moments kept are one optimizer; one client of the stack is new in the second."""
    rule, make = OPTIMIZERS[name]
    local = LocalTraining(LR, 1, 8, optimizer=rule, keep_optimizer=True)
    first = train(local, engine)
    jobs = [Job(client, result.state, result.optimizer) for client, result in enumerate(first[:3])]
    jobs.append(Job(3, method(local).server_state()))
    second = train(local, engine, jobs, round=1)
    for client in range(3):
        assert difference(second[client].state, reference(local, make, client, (0, 1), kept=True)) < 1e-12
    assert difference(second[3].state, reference(local, make, 3, (1,))) < 1e-12
    assert difference(first[0].optimizer, train(local, "sequential")[0].optimizer) < 1e-12


def test_optimizer_state_is_not_kept_by_default() -> None:
    assert train(LocalTraining(LR, optimizer="Adam"), "stacked")[0].optimizer == {}


def test_workers_step_and_keep_optimizer_state_like_one_process() -> None:
    local = LocalTraining(LR, 1, 8, optimizer=AdamW(), keep_optimizer=True)
    module, federation = method(local), blobs(seed=1).federation
    jobs = [Job(client, module.server_state()) for client in range(len(RAGGED))]
    pool, here = make_engine("sequential", workers=2), make_engine("sequential")
    try:
        for round in range(2):
            alone, shared = (engine.train(module, federation, jobs, round) for engine in (here, pool))
            for one, other in zip(alone, shared, strict=True):
                assert difference(one.state, other.state) == difference(one.optimizer, other.optimizer) == 0
            jobs = [Job(job.client, one.state, one.optimizer) for job, one in zip(jobs, alone, strict=True)]
    finally:
        pool.reset()


def test_steps_are_counted_per_entry() -> None:
    """An entry's moments are corrected for its own steps, as torch.optim's are."""
    rule, entries = Adam(), {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([3.0]).double()}
    own = {name: nn.Parameter(value.clone()) for name, value in entries.items()}
    optimizer, memory = torch.optim.Adam(own.values(), 0.1), {}
    for name, value in entries.items():
        memory |= rule.fresh(name, value, ())
    for names in (("a",), ("a", "b"), ("b",)):
        grads = {name: 0.5 * entries[name] for name in names}
        for name in own:
            own[name].grad = grads.get(name)
        rule.step(0.1, grads, entries, memory)
        optimizer.step()
    for name, value in entries.items():
        torch.testing.assert_close(value, own[name].detach(), rtol=0, atol=1e-12)
    assert (int(memory["steps.a"]), int(memory["steps.b"])) == (2, 2)


@pytest.mark.parametrize("lr", [0.1, torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)])
@pytest.mark.parametrize("rule", [SGD(), SGD(0.9, 0.1), SGD(0.9, 0.1, True), AdamW(), RMSprop()])
def test_steps_with_products_equal_steps_with_dense_gradients(rule: LocalOptimizer, lr: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    left, right, rest = draw(3, 4, 2), draw(3, 2, 5), draw(3, 4, 5)
    start = draw(3, 4, 5)
    fused, plain = {"w": start.clone()}, {"w": start.clone()}
    memories = [rule.fresh("w", start, (3,)), rule.fresh("w", start, (3,))]
    for _ in range(2):
        product = Product(left, right, 2.0, 0.3, [(0.5, rest)])
        grad = 2 * left @ right + 0.3 * plain["w"] + 0.5 * rest
        rule.step(lr, {"w": product}, fused, memories[0])
        rule.step(0.1, {"w": grad}, plain, memories[1])
    torch.testing.assert_close(fused["w"], plain["w"], rtol=0, atol=1e-12)


def test_groups_equal_parameter_groups() -> None:
    rule = Groups((Group(("head.weight", "head.bias"), SGD(0.9), 0.5), Group(("fc1.weight", "fc1.bias"), SGD(0, 0.1))))

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        fc1, bias, *head = parameters
        groups = [{"params": head, "momentum": 0.9}, {"params": [fc1, bias], "weight_decay": 0.1}]
        return Halved(groups, lr)

    local = LocalTraining(LR, 1, 8, optimizer=rule)
    for client, result in enumerate(train(local, "stacked")):
        assert difference(result.state, reference(local, make, client)) < 1e-12


class Halved(torch.optim.SGD):
    """The first group at half the rate."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 0.5
        return super().step(closure)


def test_a_copy_of_an_entry_belongs_to_its_group() -> None:
    rule = Groups((Group(("head.weight",), SGD(0.9)), Group(("weight",), Adam())))
    assert isinstance(rule.group("own.head.weight").optimizer, SGD)
    assert isinstance(rule.group("own.weight").optimizer, Adam)
    with pytest.raises(FederationError, match=r"No group of the local optimizer has bias"):
        rule.group("bias")


@pytest.mark.parametrize(
    "rule", [SGD(0.9, 0.1, True), Adam(), RMSprop(centered=True), Groups((Group(("w",), AdamW()),))]
)
def test_descriptions_round_trip(rule: LocalOptimizer) -> None:
    assert local_optim.made(json.loads(json.dumps(rule.describe()))) == rule


def test_options_reach_the_named_optimizer() -> None:
    assert LocalTraining(optimizer="AdamW", weight_decay=0.3).rule == AdamW(weight_decay=0.3)
    assert LocalTraining(optimizer="AdamW").weight_decay == 0.01
    assert LocalTraining(momentum=0.5).rule == SGD(0.5)
    assert LocalTraining(optimizer=SGD(0.9)).momentum == 0.9
    settings = LocalTraining(optimizer=SGD(0.9))
    assert replace(settings, epochs=3).rule == settings.rule


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimizer": "Adamw"}, r"There is no local optimizer 'Adamw': choose SGD, Adam, AdamW, RMSprop"),
        ({"optimizer": "json.dumps"}, r"There is no local optimizer 'json.dumps'"),
        ({"optimizer": "Adam", "momentum": 0.9}, r"Adam has no option momentum: it has betas"),
        ({"optimizer": Adam(), "weight_decay": 0.1}, r"weight_decay=0.1 and optimizer=Adam\(.*contradict"),
        ({"optimizer": 3}, r"optimizer must be one of SGD"),
        ({"optimizer": {"init_args": {}}}, r"described by class_path"),
        ({"schedule_by": "day"}, r"schedule_by must be round, epoch or step"),
    ],
)
def test_contradictory_options_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        LocalTraining(**options)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SGD(nesterov=True), r"nesterov=True needs a momentum"),
        (lambda: SGD(1.0), r"momentum must be at least 0 and below 1, not"),
        (lambda: Adam((0.9, 1.0)), r"betas\[1\] must be at least 0 and below 1, not"),
        (lambda: Adam(eps=-1), r"eps must be 0 or more, not -1"),
        (lambda: RMSprop(weight_decay=float("nan")), r"weight_decay must be a number, not nan"),
    ],
)
def test_options_out_of_range(make: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        make()


def test_rounds_set_the_rate() -> None:
    local = LocalTraining(0.4, schedule=Cosine())
    assert [round(local.in_round(r, 4).lr, 6) for r in range(4)] == [0.4, 0.341421, 0.2, 0.058579]
    assert local.in_round(2, 4).rate(2, 0, 0, 1) == local.in_round(2, 4).lr
    warm = LocalTraining(1.0, schedule=WarmUp(4, 0.0), schedule_by="step").in_round(0, 5)
    assert [warm.rate(3, 0, step, 9) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    epochs = LocalTraining(1.0, 2, schedule=Linear(), schedule_by="epoch").in_round(0, 5)
    assert epochs.rate(3, 1, 0, 9) == pytest.approx(1 - 7 / 10)


class Halfway(FedAvg):
    """Adds the step that plain SGD would make, by the rate that the batch tells."""

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        update = super().descend(state, batch, phase, gradient)
        return update._replace(grads={}, add={n: -batch.scalars["lr"] * g for n, g in update.grads.items()})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("by", ["round", "step"])
def test_moves_know_the_rate_of_their_step(engine: str, by: Any) -> None:
    """A captured step is made in two rounds of different rates, and traced once."""
    local = LocalTraining(LR, 1, 8, schedule=Linear(1, 0.2), schedule_by=by)
    runs, federation = make_engine(engine), blobs(seed=1).federation
    for round in range(2):
        plain, own = method(local.in_round(round, 3)), Halfway(mlp().double(), seed=3)
        own.local = plain.local
        jobs = [Job(client, plain.server_state()) for client in range(len(RAGGED))]
        expected = make_engine("sequential").train(plain, federation, jobs, round)
        for one, other in zip(runs.train(own, federation, jobs, round), expected, strict=True):
            assert difference(one.state, other.state) < 1e-12


def test_options_that_differ_from_plain_sgd_are_named() -> None:
    assert not LocalTraining(momentum=0.9).not_plain
    assert not LocalTraining(schedule=Linear()).not_plain
    assert LocalTraining(optimizer="Adam").not_plain.startswith("optimizer=Adam(")
    assert LocalTraining(momentum=0.9, keep_optimizer=True).not_plain == "keep_optimizer=True"
    assert LocalTraining(schedule=Linear(), schedule_by="step").not_plain == "schedule_by='step'"


def test_settings_are_described_as_plain_values() -> None:
    assert "optimizer" not in LocalTraining().described()
    told = json.loads(json.dumps(LocalTraining(optimizer="AdamW", schedule=WarmUp(2, then=Cosine())).described()))
    assert told["optimizer"]["class_path"] == "fl_lightning.local_optim.AdamW"
    assert told["schedule"]["init_args"]["then"]["class_path"] == "fl_lightning.schedules.Cosine"
