"""Local: each client equals a federation of its own."""

from __future__ import annotations

import pytest
import torch

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, Local
from tests.support import blobs, fit, largest_difference, mlp, sgd, weights


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_equals_a_bare_loop_per_client(engine: str) -> None:
    data, method = blobs(), Local(mlp(), lr=0.1, batch_size=8, engine=engine)
    fit(method, data, rounds=2)
    federation = data.federation
    for client, index in enumerate(federation.train):
        net = mlp().double()
        for round in range(2):
            order = index[seeding.permutation(seeding.stream(0, "batches", round, client), len(index))]
            sgd(net, [(federation.inputs[p].double(), federation.targets[p]) for p in order.split(8)], lr=0.1)
        assert largest_difference(method.snapshots[client].private, net.state_dict()) < 1e-12


def test_equals_fedavg_alone() -> None:
    """The only client of a federation trains the same model with FedAvg and with Local."""
    local, avg = Local(mlp(), lr=0.1), FedAvg(mlp(), lr=0.1)
    fit(local, blobs([21]))
    fit(avg, blobs([21]))
    assert largest_difference(local.snapshots[0].private, weights(avg)) < 1e-12


def test_some_clients_alone() -> None:
    some, everyone = Local(mlp(), lr=0.1, clients=[2, 0]), Local(mlp(), lr=0.1)
    for method in (some, everyone):
        fit(method, blobs())
    assert list(some.snapshots) == [0, 2]
    assert largest_difference(some.snapshots[2].private, everyone.snapshots[2].private) < 1e-12
    with pytest.raises(FederationError, match="clients must name at least one client"):
        Local(mlp(), clients=[])
    with pytest.raises(FederationError, match="clients must be some of 0 to 3, not 4"):
        fit(Local(mlp(), clients=[1, 4]), blobs())


def test_nothing_crosses_and_everyone_trains_in_every_round() -> None:
    method = Local(mlp(), lr=0.1)
    start = weights(method)
    run = fit(method, blobs(fraction=0.25), rounds=3)
    assert run.callback_metrics["comm/up_bytes"] == run.callback_metrics["comm/down_bytes"] == 0
    assert [method.snapshots[c].rounds for c in range(4)] == [3] * 4
    assert largest_difference(weights(method), {k: v.double() for k, v in start.items()}) == 0.0


def test_each_client_is_evaluated_with_its_own_model() -> None:
    data, method = blobs(), Local(mlp(), lr=0.2, epochs=5)
    fit(method, data)
    for client in range(4):
        net = mlp().double()
        net.load_state_dict(method.snapshots[client].private)
        index = data.federation.test[client]
        correct = (net(data.federation.inputs[index].double()).argmax(1) == data.federation.targets[index]).double()
        torch.testing.assert_close(method.evaluator.scores["test"][client], correct.mean())
