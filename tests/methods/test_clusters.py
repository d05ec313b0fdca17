"""Tests of all clustered methods: one cluster, resume, engines, what crosses, models of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import IFCA, FedAvg, FedCluster, FedGroup, FeSEM
from fl_lightning.methods.lib.clusters import ClusteredModule, balanced, redrawn, squared_distances
from fl_lightning.nets import LeNetBN
from fl_lightning.optim import FedAdam
from fl_lightning.seeding import stream
from tests.support import CLASSES, blobs, fit, largest_difference, mlp, planted, weights

OPTIONS: dict[type[ClusteredModule], dict[str, Any]] = {
    FeSEM: {"clusters": 2, "centres": "same"},
    IFCA: {"clusters": 2, "warmup": 1},
    FedCluster: {"clusters": 2},
    FedGroup: {"clusters": 2, "cold_steps": 3},
}
EVERY = pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)


def server(method: ClusteredModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in method.server.state_dict().items()}


@pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
@pytest.mark.parametrize("kind", [FeSEM, IFCA, FedCluster], ids=lambda kind: kind.__name__)
def test_one_cluster_is_fedavg(kind: type[ClusteredModule], engine: str) -> None:
    weighting = "samples" if kind is FedCluster else "uniform"
    one = kind(mlp(), clusters=1, lr=0.1, epochs=2, batch_size=8, engine=engine)
    other = FedAvg(mlp(), lr=0.1, epochs=2, batch_size=8, weighting=weighting, engine=engine)
    runs = [fit(method, blobs(), rounds=3) for method in (one, other)]
    assert largest_difference(weights(one), weights(other)) < 1e-12
    logs = [{n: float(v) for n, v in r.callback_metrics.items() if n.startswith(("test", "train"))} for r in runs]
    assert logs[0] == pytest.approx(logs[1])
    assert one.assignment() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "buffers"), [(FeSEM, "average"), (FeSEM, "keep"), (IFCA, "keep"), (IFCA, "reset"), (FedCluster, "average")]
)
def test_one_cluster_is_fedavg_with_batch_normalisation(kind: type[ClusteredModule], buffers: Any) -> None:
    methods = []
    for made, extra in ((kind, {"clusters": 1}), (FedAvg, {} if kind is FedCluster else {"weighting": "uniform"})):
        torch.manual_seed(0)
        methods.append(
            made(LeNetBN(num_classes=CLASSES), lr=0.1, batch_size=8, buffers=buffers, engine="stacked", **extra)
        )
        fit(methods[-1], blobs((19, 9, 16), (1, 28, 28)), rounds=2)
    assert largest_difference(weights(methods[0]), weights(methods[1])) < 1e-12
    for client in range(3):
        one, other = (m.personal_state(client) for m in methods)
        assert largest_difference(one, other) < 1e-12


def test_one_cluster_is_fedavg_with_any_server_optimizer() -> None:
    made = [
        kind(mlp(), lr=0.1, batch_size=8, weighting="uniform", server_optimizer=lambda p: FedAdam(p, lr=0.02), **extra)
        for kind, extra in ((IFCA, {"clusters": 1}), (FedAvg, {}))
    ]
    for method in made:
        fit(method, blobs(), rounds=3)
    assert largest_difference(weights(made[0]), weights(made[1])) < 1e-12


@EVERY
def test_engines_agree(kind: type[ClusteredModule]) -> None:
    def trained(engine: str) -> ClusteredModule:
        method = kind(mlp(), lr=0.1, epochs=2, batch_size=8, momentum=0.9, engine=engine, **OPTIONS[kind])
        fit(method, blobs((19, 9, 16, 8, 30), fraction=0.8), rounds=3)
        return method

    one, two, three = (trained(engine) for engine in ("sequential", "stacked", "captured"))
    assert largest_difference(server(one), server(two)) < 1e-9
    assert largest_difference(server(two), server(three)) < 1e-12
    assert one.assignment() == two.assignment() == three.assignment()


@EVERY
def test_a_checkpoint_brings_back_models_and_clusters(kind: type[ClusteredModule], tmp_path: Path) -> None:
    method = kind(mlp(), lr=0.1, batch_size=8, engine="stacked", **OPTIONS[kind])
    run = fit(method, planted(fraction=0.5), rounds=2, precision="32-true")
    run.save_checkpoint(tmp_path / "run.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "run.ckpt")
    assert loaded.clusters == 2
    scores = run.validate(method, planted(fraction=0.5), verbose=False)
    assert run.validate(loaded, planted(fraction=0.5), verbose=False) == scores
    assert largest_difference(server(loaded), server(method)) == 0.0


@EVERY
def test_what_crosses(kind: type[ClusteredModule]) -> None:
    method, up, down = kind(mlp(), batch_size=8, **OPTIONS[kind]), set(), set()
    method.on_client_start = lambda client, message: down.update(message)  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: up.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    fit(method, blobs(), rounds=1, precision="32-true")
    names, size = set(method.trainable_names), 4 * sum(p.numel() for p in method.net.parameters())
    assert up == (names | {"cluster"} if kind is IFCA else names)
    assert down == ({f"{q}.{name}" for q in range(2) for name in names} if kind is IFCA else names)
    times = 8 if kind is FedGroup else 4  # the cold start crosses too
    assert method.bytes_up == times * size + (4 * 8 if kind is IFCA else 0)
    assert method.bytes_down == times * size * (2 if kind is IFCA else 1)
    assert all(not method.snapshots[client].private for client in range(4))


@pytest.mark.parametrize("kind", [FeSEM, IFCA, FedGroup], ids=lambda kind: kind.__name__)
def test_global_accuracy_is_the_mean_over_clusters_that_have_clients(
    kind: type[ClusteredModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = planted(global_test=list(range(24, 32)))
    method = kind(mlp(), lr=0.1, batch_size=8, engine="stacked", **OPTIONS[kind])
    run = fit(method, data, rounds=2)
    x, y = data.federation.inputs[24:32].double(), data.federation.targets[24:32]
    used = sorted(set(method.assignment()))
    scores = []
    for cluster in used:
        logits, _ = method.call(method.model_state(cluster), x, training=False)
        scores.append(float((logits.argmax(1) == y).double().mean()))
    assert float(run.callback_metrics["test/global_acc"]) == pytest.approx(sum(scores) / len(used))
    monkeypatch.setattr(method, "assignment", lambda: [1, 1, 1, 0, 1, 1, 1, 1])
    assert [weight for weight, _ in method.global_models()] == [0.5, 0.5]
    monkeypatch.setattr(method, "assignment", lambda: [1] * 8)
    ((weight, state),) = method.global_models()
    assert weight == 1.0
    assert all(torch.equal(state[name], value) for name, value in method.model_state(1).items())


@EVERY
def test_one_client_and_identical_clients(kind: type[ClusteredModule]) -> None:
    alone = kind(mlp(), lr=0.1, batch_size=8, **(OPTIONS[kind] | ({"clusters": 1} if kind is FedCluster else {})))
    fit(alone, blobs((19,)), rounds=2)
    assert len(alone.assignment()) == 1
    same = kind(mlp(), lr=0.1, batch_size=8, engine="stacked", **OPTIONS[kind])
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)).repeat(3, 1)
    train, test = [list(range(8 * k, 8 * k + 6)) for k in range(3)], [[8 * k + 6, 8 * k + 7] for k in range(3)]
    fit(
        same, TensorFederation(x, torch.arange(24) % 4, train=train, test=test, num_classes=4, val_fraction=0), rounds=2
    )
    assert all(value.isfinite().all() for value in server(same).values())
    if kind is not FedCluster and kind is not FeSEM:  # there the first draw divides them
        assert len(set(same.assignment())) == 1


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_no_clusters_are_refused(kind: type[ClusteredModule]) -> None:
    with pytest.raises(FederationError, match="clusters must be 1 or more, not 0"):
        kind(mlp(), clusters=0)


def test_balanced_draws() -> None:
    drawn = balanced(stream(0, "clusters"), 11, 4)
    assert sorted(drawn.count(q) for q in range(4)) == [2, 3, 3, 3]
    assert drawn != balanced(stream(1, "clusters"), 11, 4)


def test_models_are_drawn_for_themselves_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = IFCA(mlp(), clusters=3, seed=5)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))  # the global generator is left alone
    torch.manual_seed(2)
    other = IFCA(mlp(), clusters=3, seed=5)
    assert largest_difference(server(one), server(other)) == 0.0
    models = [one.model_state(q)["fc1.weight"] for q in range(3)]
    assert torch.equal(models[0], mlp().fc1.weight)
    assert not torch.equal(models[0], models[1])
    assert not torch.equal(models[1], models[2])
    assert abs(float(models[1].std() / models[0].std()) - 1) < 0.2
    assert not torch.equal(models[1], IFCA(mlp(), clusters=3, seed=6).model_state(1)["fc1.weight"])


def test_a_net_that_cannot_be_drawn_anew_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

    with pytest.raises(FederationError, match="Own cannot be reinitialised"):
        redrawn(Own(), stream(0, "init"))


def test_squared_distances_by_hand() -> None:
    models = [{"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.0)}, {"a": torch.zeros(2), "b": torch.tensor(3.0)}]
    centres = [{"a": torch.zeros(2), "b": torch.tensor(0.0)}, {"a": torch.ones(2), "b": torch.tensor(1.0)}]
    assert squared_distances(models, centres, ["a", "b"]).tolist() == [[5.0, 2.0], [9.0, 6.0]]
    assert squared_distances(models, centres, ["a"]).tolist() == [[5.0, 1.0], [0.0, 2.0]]
