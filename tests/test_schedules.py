"""Schedules equal torch's, and come back from their descriptions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from fl_lightning import schedules
from fl_lightning.errors import FederationError
from fl_lightning.methods import schedules as earlier
from fl_lightning.schedules import Constant, Cosine, Exponential, Linear, Schedule, Step, Table, WarmUp, value_at

TOTAL = 12


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Cosine(0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL, 0.1)),
        (Exponential(0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (Step(5, 0.3), lambda o: lr_scheduler.StepLR(o, 5, 0.3)),
        (Linear(1.0, 0.25), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, TOTAL)),
        (WarmUp(3, 0.2), lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 3)),
        (
            WarmUp(3, 0.2, Cosine()),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.2, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, TOTAL - 3)], [3]
            ),
        ),
        (Constant(), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_equals_torch(schedule: Schedule, make: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    other = make(optimizer)
    for done in range(TOTAL):
        assert schedule.at(done, TOTAL) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        other.step()


def test_a_function_of_progress_is_a_schedule() -> None:
    assert value_at(lambda progress: 1 - progress, 3, 4) == 0.25


@pytest.mark.parametrize("schedule", [WarmUp(3, 0.2, Cosine(0.1)), Step(2), Table([1.0, 0.5]), Exponential()])
def test_descriptions_round_trip(schedule: Schedule) -> None:
    again = schedules.made(json.loads(json.dumps(schedules.describe(schedule))), "schedule")
    assert [again.at(d, 9) for d in range(9)] == [schedule.at(d, 9) for d in range(9)]


def test_earlier_class_paths_load() -> None:
    described = {"class_path": "fl_lightning.methods.schedules.Linear", "init_args": {"start": 2.0, "end": 1.0}}
    assert schedules.made(described, "omega")(0.5) == 1.5
    assert earlier.Sigmoid is schedules.Sigmoid


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Step(0), r"every must be 1 or more, not 0"),
        (lambda: WarmUp(0), r"length must be 1 or more, not 0"),
        (lambda: Table([]), r"needs at least one"),
        (lambda: Step(3)(0.5), r"Step counts rounds or steps and cannot depend on a share"),
    ],
)
def test_invalid_arguments_are_rejected(call: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        call()
