"""FedProx: the identities that hold whatever the data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.nets import LeNetBN
from tests.support import blobs, fit, largest_difference, mlp, weights

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked"])


@ENGINES
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_mu_zero_equals_fedavg_bit_for_bit(engine: str, precision: str) -> None:
    prox, avg = (make(mlp(), lr=0.1, epochs=2, batch_size=8, engine=engine) for make in (_prox(0.0), FedAvg))
    for method in (prox, avg):
        fit(method, blobs(), precision=precision)
    assert largest_difference(weights(prox), weights(avg)) == 0.0


@ENGINES
def test_one_step_equals_fedavg_for_any_mu(engine: str) -> None:
    prox, avg = (make(mlp(), lr=0.1, batch_size=64, engine=engine) for make in (_prox(7.0), FedAvg))
    for method in (prox, avg):
        fit(method, blobs(), rounds=3)
    assert largest_difference(weights(prox), weights(avg)) < 1e-14


@ENGINES
def test_lr_times_mu_of_one_restarts_every_step_from_the_received_model(engine: str) -> None:
    """Then w_{s+1} = w_s - lr (g(w_s) + mu (w_s - w)) = w - lr g(w_s)."""
    lr, data = 0.2, blobs([24])
    method = FedProx(mlp(), mu=1 / lr, lr=lr, batch_size=8, engine=engine)
    net = copy.deepcopy(method.net).double()
    received = [p.detach().clone() for p in net.parameters()]
    fit(method, data, rounds=1)
    index = data.federation.train[0]
    order = index[seeding.permutation(seeding.stream(0, "batches", 0, 0), len(index))]
    for part in order.split(8):
        net.zero_grad()
        output = net(data.federation.inputs[part].double())
        torch.nn.functional.cross_entropy(output, data.federation.targets[part]).backward()
        with torch.no_grad():
            for p, w in zip(net.parameters(), received, strict=True):
                p.copy_(w - lr * p.grad)
    assert largest_difference(weights(method), net.state_dict()) < 1e-12


def test_larger_mu_stays_nearer() -> None:
    moved = []
    for mu in (0.0, 1.0, 5.0):
        method = FedProx(mlp(), mu=mu, lr=0.1, epochs=5)
        start = weights(method)
        fit(method, blobs(), rounds=1)
        moved.append(largest_difference(start, weights(method)))
    assert moved[0] > moved[1] > moved[2]


def test_penalty_does_not_touch_buffers() -> None:
    data = blobs((16, 8), shape=(1, 28, 28))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = LeNetBN(num_classes=4)
    prox = FedProx(copy.deepcopy(net), mu=100.0, lr=0.0, batch_size=8, engine="stacked")
    avg = FedAvg(net, lr=0.0, batch_size=8, engine="stacked")
    for method in (prox, avg):
        fit(method, data, rounds=2)
    assert largest_difference(weights(prox), weights(avg)) == 0.0


def test_negative_mu_is_refused() -> None:
    with pytest.raises(FederationError, match="mu must be 0 or more"):
        FedProx(mlp(), mu=-1.0)


def _prox(mu: float) -> Any:
    return lambda net, **kwargs: FedProx(net, mu=mu, **kwargs)
