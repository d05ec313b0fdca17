"""LG-FedAvg: FedPer with the roles exchanged. What both have in common is tested in test_fedper.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_lightning.methods import FedAvg, FedPer, LGFedAvg, Local
from fl_lightning.nets import LeNet5, LeNetBN
from tests.support import blobs, fit, largest_difference, mlp, weights
from tests.support.engines import differ

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked"])
BASE, HEAD = {"fc1.weight", "fc1.bias"}, {"head.weight", "head.bias"}


def options(engine: str) -> dict[str, Any]:
    return {"lr": 0.1, "epochs": 2, "batch_size": 8, "engine": engine}


@ENGINES
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_nothing_private_equals_fedavg_bit_for_bit(engine: str, fraction: float) -> None:
    lg, avg = LGFedAvg(mlp(), shared=["fc1", "head"], **options(engine)), FedAvg(mlp(), **options(engine))
    for method in (lg, avg):
        fit(method, blobs(fraction=fraction))
    assert largest_difference(weights(lg), weights(avg)) == 0.0


@ENGINES
def test_nothing_shared_equals_local_bit_for_bit(engine: str) -> None:
    lg, local = LGFedAvg(mlp(), shared=[], **options(engine)), Local(mlp(), **options(engine))
    for method in (lg, local):
        fit(method, blobs())
    assert differ(lg, local) == 0.0


@pytest.mark.parametrize("net", [LeNet5, LeNetBN])
def test_roles_are_exchanged(net: Any) -> None:
    """FedPer keeps the entries that LG-FedAvg sends, and the other way round."""
    layers = ["fc2", "head"]
    per, lg = FedPer(net(), personal=layers), LGFedAvg(net(), shared=layers)
    assert set(per.shared_names) == set(lg.private_names)
    assert set(per.private_names) == set(lg.shared_names)
    assert set(LGFedAvg(net()).shared_names) == HEAD


@ENGINES
def test_complementary_lists_give_the_same_run(engine: str) -> None:
    per = FedPer(mlp(), personal=["head"], **options(engine))
    lg = LGFedAvg(mlp(), shared=["fc1"], **options(engine))
    for method in (per, lg):
        fit(method, blobs(fraction=0.5))
    assert differ(per, lg) == 0.0
    assert torch.equal(per.evaluator.scores["test"], lg.evaluator.scores["test"])


def test_only_the_head_crosses() -> None:
    method, crossed = LGFedAvg(mlp(), lr=0.1), set()
    method.on_client_start = lambda client, message: crossed.update(message)  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: crossed.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    run = fit(method, blobs())
    assert crossed == HEAD
    assert all(set(method.snapshots[client].private) == BASE for client in range(4))
    assert run.callback_metrics["comm/up_bytes"] == 4 * 8 * (16 * 4 + 4)


def test_never_sampled_clients_are_evaluated_with_the_initial_extractor_and_the_current_head() -> None:
    method, initial = LGFedAvg(mlp(), lr=0.1), mlp().double().state_dict()
    method.cohort = lambda round: [0, 1]  # type: ignore[method-assign]
    fit(method, blobs())
    state = method.personal_state(3)
    assert all(torch.equal(state[name], initial[name]) for name in BASE)
    assert all(torch.equal(state[name], weights(method)[name]) for name in HEAD)
    assert not torch.equal(state["head.weight"], initial["head.weight"])
