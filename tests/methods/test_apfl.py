"""APFL: its two ends, its shared stream, and its mixing weight by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.methods import APFL, FedAvg, Local
from fl_lightning.methods.apfl import ALPHA, OWN
from tests.support import blobs, fit, largest_difference, mlp, weights
from tests.support.engines import differ
from tests.support.stops import make

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
OPTIONS: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 8}


def own(method: APFL, client: int) -> dict[str, torch.Tensor]:
    private = method.snapshots[client].private
    return {name.removeprefix(OWN): value for name, value in private.items() if name.startswith(OWN)}


@ENGINES
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_shared_stream_is_fedavgs_for_every_alpha(engine: str, alpha: float, adaptive: bool) -> None:
    settings: dict[str, Any] = {"engine": engine, "momentum": 0.5, "clip_norm": 0.3, **OPTIONS}
    one, other = APFL(mlp(), alpha=alpha, adaptive=adaptive, **settings), FedAvg(mlp(), **settings)
    for method in (one, other):
        fit(method, blobs(fraction=0.5), rounds=3)
    assert largest_difference(weights(one), weights(other)) < 1e-12


@ENGINES
def test_alpha_one_trains_local_models(engine: str) -> None:
    settings: dict[str, Any] = {"engine": engine, "clip_norm": 0.3, **OPTIONS}
    one, other = APFL(mlp(), alpha=1.0, adaptive=False, **settings), Local(mlp(), **settings)
    for method in (one, other):
        fit(method, blobs(), rounds=3)
    for client in range(4):
        assert largest_difference(own(one, client), other.snapshots[client].private) < 1e-12
    assert torch.equal(one.evaluator.scores["test"], other.evaluator.scores["test"])


def test_alpha_zero_is_evaluated_as_fedavg() -> None:
    one, other = (
        APFL(mlp(), alpha=0.0, adaptive=False, engine="stacked", **OPTIONS),
        FedAvg(mlp(), engine="stacked", **OPTIONS),
    )
    for method in (one, other):
        fit(method, blobs(), rounds=3)
    assert torch.equal(one.evaluator.scores["test"], other.evaluator.scores["test"])
    assert largest_difference(one.personal_state(1), other.personal_state(1)) < 1e-12


def test_one_round_by_hand() -> None:
    """w, v and alpha of one client, with plain autograd."""
    data, method = blobs([20]), APFL(mlp(), alpha=0.4, engine="stacked", **OPTIONS)
    w, v, alpha = copy.deepcopy(method.net).double(), copy.deepcopy(method.net).double(), 0.4
    fit(method, data, rounds=2)
    federation, index = data.federation, data.federation.train[0]
    for round in range(2):
        rng = seeding.stream(0, "batches", round, 0)
        first = True
        for _ in range(2):
            for part in index[seeding.permutation(rng, len(index))].split(8):
                x, y = federation.inputs[part].double(), federation.targets[part]
                m = copy.deepcopy(w)
                with torch.no_grad():
                    for p, a, b in zip(m.parameters(), v.parameters(), w.parameters(), strict=True):
                        p.copy_(alpha * a + (1 - alpha) * b)
                for net in (w, m):
                    net.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                triples = list(zip(m.parameters(), v.parameters(), w.parameters(), strict=True))
                slope = sum(float(((a - b).detach() * p.grad).sum()) for p, a, b in triples)
                with torch.no_grad():
                    for p, a, b in triples:
                        a -= 0.1 * alpha * p.grad
                        b -= 0.1 * b.grad
                alpha = min(max(alpha - 0.1 * slope, 0.0), 1.0) if first else alpha
                first = False
        # One client: the aggregate is its own w.
    assert largest_difference(weights(method), w.state_dict()) < 1e-12
    assert largest_difference(own(method, 0), v.state_dict()) < 1e-12
    assert float(method.snapshots[0].private[ALPHA]) == pytest.approx(alpha, abs=1e-12)
    assert alpha != 0.4


def test_clients_are_evaluated_with_the_mixing_weight_they_adapted() -> None:
    method = APFL(mlp(), alpha=0.5, lr=0.5, epochs=3, batch_size=8, engine="stacked")
    fit(method, blobs(), rounds=4)
    for client in range(4):
        alpha, server, mine = float(method.snapshots[client].private[ALPHA]), weights(method), own(method, client)
        assert abs(alpha - 0.5) > 1e-3
        expected = {name: alpha * mine[name] + (1 - alpha) * value for name, value in server.items()}
        assert largest_difference(method.personal_state(client), expected) < 1e-12


def test_alpha_moves_and_stays_between_0_and_1() -> None:
    method = APFL(mlp(), alpha=0.5, lr=0.5, epochs=3, batch_size=8, engine="stacked")
    fit(method, blobs(), rounds=8)
    shares = [float(method.snapshots[c].private[ALPHA]) for c in range(4)]
    assert all(0 <= share <= 1 for share in shares)
    assert len({round(share, 6) for share in [*shares, 0.5]}) > 2


@pytest.mark.parametrize(("alpha", "lr"), [(0.05, 2.0), (0.95, 2.0)])
def test_alpha_stops_at_its_bounds(alpha: float, lr: float) -> None:
    method = APFL(mlp(), alpha=alpha, lr=lr, epochs=3, batch_size=8, engine="stacked")
    fit(method, blobs(), rounds=8)
    shares = [float(method.snapshots[c].private[ALPHA]) for c in range(4)]
    assert any(share in (0.0, 1.0) for share in shares)
    assert all(0 <= share <= 1 for share in shares)


def test_alpha_is_drawn_to_zero_by_alpha_reg() -> None:
    """In the first round v_i = w, so that nothing else moves it: a - lr alpha_reg a."""
    method = APFL(mlp(), alpha=0.5, alpha_reg=0.2, engine="stacked", **OPTIONS)
    fit(method, blobs(), rounds=1)
    assert float(method.snapshots[0].private[ALPHA]) == pytest.approx(0.5 - 0.1 * 0.2 * 0.5)


@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_running_statistics_are_those_of_w(buffers: Any) -> None:
    one, other = make(APFL, buffers=buffers), make(FedAvg, buffers=buffers)
    for method in (one, other):
        fit(method, blobs((19, 9, 16), (1, 28, 28)), rounds=2)
    mixed, plain = one.personal_state(1), other.personal_state(1)
    for name in ("bn1.running_mean", "bn2.running_var"):
        torch.testing.assert_close(mixed[name], plain[name])
        assert (mixed[name] - one.initial_buffers[name]).abs().max() > 1e-3


def test_never_sampled_clients_mix_the_initial_model() -> None:
    method = APFL(mlp(), alpha=0.25, engine="stacked", **OPTIONS)
    initial = {name: value.clone().double() for name, value in method.net.state_dict().items()}
    method.cohort = lambda round: [0, 1]  # type: ignore[method-assign]
    fit(method, blobs())
    expected = {name: 0.25 * initial[name] + 0.75 * value for name, value in weights(method).items()}
    assert largest_difference(method.personal_state(3), expected) < 1e-7


def test_engines_agree_and_nothing_private_crosses() -> None:
    crossed: set[str] = set()

    def trained(engine: str) -> APFL:
        method = APFL(mlp(), momentum=0.9, engine=engine, **OPTIONS)
        method.on_before_aggregate = lambda messages: crossed.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
        fit(method, blobs(), rounds=3)
        return method

    one, two, three = (trained(engine) for engine in ("sequential", "stacked", "captured"))
    assert differ(one, two) < 1e-9
    assert differ(two, three) < 1e-12
    assert crossed == set(one.trainable_names)


def test_alpha_outside_its_range_is_refused() -> None:
    with pytest.raises(FederationError, match="alpha must lie between 0 and 1"):
        APFL(mlp(), alpha=1.5)
    with pytest.raises(FederationError, match="alpha_reg must be 0 or more"):
        APFL(mlp(), alpha_reg=-1.0)
