"""Robust rules in a run: the option, what it protects, and the methods that refuse it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fl_lightning import methods
from fl_lightning.errors import FederationError
from fl_lightning.methods import IFCA, SCAFFOLD, FedAvg, PFedMe
from fl_lightning.robust import Median, TrimmedMean
from fl_lightning.wire import Message
from tests.support import blobs, fit, largest_difference, mlp, weights

REFUSING = {"QFFL", "FedDAF", "FedMA", "WeightErosion", "WAFFLEAvg"}
OPTIONS: dict[str, Any] = {"lr": 0.1, "batch_size": 8, "engine": "stacked", "weighting": "uniform"}


@pytest.mark.parametrize("name", methods.__all__)
def test_methods_with_their_own_weights_reject_rules(name: str) -> None:
    kind = getattr(methods, name)
    if name in REFUSING:
        with pytest.raises(FederationError, match=f"The server of {name} weights clients in its own way"):
            kind(mlp(), aggregation=Median())
    else:
        assert kind(mlp(), aggregation=Median()).aggregation is not None


def test_a_trimmed_mean_of_nothing_is_the_mean() -> None:
    one, other = FedAvg(mlp(), **OPTIONS), FedAvg(mlp(), aggregation=TrimmedMean(0.0), **OPTIONS)
    fit(one, blobs(), 2)
    fit(other, blobs(), 2)
    assert largest_difference(weights(one), weights(other)) < 1e-14


@pytest.mark.parametrize("kind", [FedAvg, SCAFFOLD, IFCA])
def test_the_median_is_that_of_each_entry(kind: Any) -> None:
    options = {**OPTIONS, **({"clusters": 1} if kind is IFCA else {})}
    if kind is SCAFFOLD:
        del options["weighting"]  # always uniform
    method, seen = kind(mlp(), aggregation=Median(), **options), []
    method.on_before_aggregate = lambda messages: seen.append([m.tensors for m in messages])
    fit(method, blobs((16, 16, 16)), 1)
    for name in method.shared_names:
        expected = torch.stack([tensors[name] for tensors in seen[0]]).median(0).values
        torch.testing.assert_close(method.server_state()[name], expected, rtol=0, atol=1e-15)
    if kind is SCAFFOLD:
        name = method.trainable_names[0]
        changes = torch.stack([tensors[f"control.change.{name}"] for tensors in seen[0]])
        torch.testing.assert_close(method.server_control()[name], changes.median(0).values, rtol=0, atol=1e-14)


def test_pfedme_mixes_its_model_with_the_median() -> None:
    method, seen = PFedMe(mlp(), aggregation=Median(), beta=0.25, **{**OPTIONS, "lr": 0.05}), []
    before = {name: value.clone().double() for name, value in mlp().state_dict().items()}
    method.on_before_aggregate = lambda messages: seen.append([m.tensors for m in messages])  # type: ignore[attr-defined]
    fit(method, blobs((16, 16, 16)), 1)
    for name in method.shared_names:
        median = torch.stack([tensors[name] for tensors in seen[0]]).median(0).values
        expected = 0.75 * before[name] + 0.25 * median
        torch.testing.assert_close(method.server_state()[name], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_servers_optimizer_steps_towards_the_result_of_the_rule(rate: float) -> None:
    """Server SGD with a rate of 0.5 goes half of the way to the median."""
    method, seen = (
        FedAvg(mlp(), aggregation=Median(), server_optimizer=partial(torch.optim.SGD, lr=rate), **OPTIONS),
        [],
    )
    before = {name: value.clone().double() for name, value in mlp().state_dict().items()}
    method.on_before_aggregate = lambda messages: seen.append([m.tensors for m in messages])  # type: ignore[attr-defined]
    fit(method, blobs((16, 16, 16)), 1)
    for name in method.trainable_names:
        median = torch.stack([tensors[name] for tensors in seen[0]]).median(0).values
        expected = (1 - rate) * before[name] + rate * median
        torch.testing.assert_close(method.server_state()[name], expected, rtol=0, atol=1e-14)


def test_one_hostile_client_of_four_moves_the_mean_and_not_the_median() -> None:
    moved = {}
    for rule in (None, Median()):
        clean, struck = FedAvg(mlp(), aggregation=rule, **OPTIONS), FedAvg(mlp(), aggregation=rule, **OPTIONS)
        fit(clean, blobs(), 2)

        def scale(messages: list[Message], method: FedAvg = struck) -> None:
            own = method.server_state()
            messages[2].tensors = {n: own[n] + 1000 * (v - own[n]) for n, v in messages[2].tensors.items()}

        struck.on_before_aggregate = scale  # type: ignore[attr-defined]
        fit(struck, blobs(), 2)
        moved[rule is None] = largest_difference(weights(clean), weights(struck))
    assert moved[True] > 50 * moved[False]
