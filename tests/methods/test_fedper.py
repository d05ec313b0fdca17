"""FedPer: the base crosses, the head does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedPer, LGFedAvg, Local
from fl_lightning.nets import LeNetBN
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, weights
from tests.support.engines import differ, trained

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked"])
BASE, HEAD = {"fc1.weight", "fc1.bias"}, {"head.weight", "head.bias"}


def options(engine: str) -> dict[str, Any]:
    return {"lr": 0.1, "epochs": 2, "batch_size": 8, "engine": engine}


@ENGINES
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_nothing_personal_equals_fedavg_bit_for_bit(engine: str, fraction: float) -> None:
    per, avg = FedPer(mlp(), personal=[], **options(engine)), FedAvg(mlp(), **options(engine))
    for method in (per, avg):
        fit(method, blobs(fraction=fraction))
    assert largest_difference(weights(per), weights(avg)) == 0.0
    assert torch.equal(per.evaluator.scores["test"], avg.evaluator.scores["test"])


@ENGINES
def test_everything_personal_equals_local_bit_for_bit(engine: str) -> None:
    per, local = FedPer(mlp(), personal=["fc1", "head"], **options(engine)), Local(mlp(), **options(engine))
    for method in (per, local):
        run_ = fit(method, blobs())
        assert run_.callback_metrics["comm/up_bytes"] == run_.callback_metrics["comm/down_bytes"] == 0
    assert differ(per, local) == 0.0
    assert torch.equal(per.evaluator.scores["test"], local.evaluator.scores["test"])


@ENGINES
def test_one_step_by_hand(engine: str) -> None:
    """One full batch each: base = sum_k p_k (b - lr g_k), every head = h - lr g_k."""
    data, method = blobs(), FedPer(mlp(), lr=0.3, batch_size=64, engine=engine)
    fit(method, data, rounds=1)
    sizes, base = data.federation.train.sizes.double(), {name: torch.zeros((), dtype=torch.float64) for name in BASE}
    for client, index in enumerate(data.federation.train):
        net = mlp().double()
        nn.functional.cross_entropy(net(data.federation.inputs[index].double()), data.targets[index]).backward()
        moved = {name: p.detach() - 0.3 * p.grad for name, p in net.named_parameters()}  # type: ignore[operator]
        base = {name: base[name] + sizes[client] / sizes.sum() * moved[name] for name in BASE}
        assert largest_difference(method.snapshots[client].private, {name: moved[name] for name in HEAD}) < 1e-12
    assert largest_difference({name: weights(method)[name] for name in BASE}, base) < 1e-12
    assert largest_difference({n: weights(method)[n] for n in HEAD}, {n: mlp().state_dict()[n] for n in HEAD}) == 0.0


def test_the_head_never_crosses_and_heads_differ() -> None:
    method, crossed = FedPer(mlp(), lr=0.1), set()
    method.on_client_start = lambda client, message: crossed.update(message)  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: crossed.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    run_ = fit(method, blobs())
    assert crossed == BASE
    assert all(set(method.snapshots[client].private) == HEAD for client in range(4))
    assert run_.callback_metrics["comm/up_bytes"] == 4 * 8 * (20 * 16 + 16)
    first, second = (method.snapshots[client].private["head.weight"] for client in (0, 1))
    assert float((first - second).abs().max()) > 1e-2


def test_never_sampled_clients_are_evaluated_with_the_base_and_the_initial_head() -> None:
    method, initial = FedPer(mlp(), lr=0.1), mlp().double().state_dict()
    method.cohort = lambda round: [0, 1]  # type: ignore[method-assign]
    fit(method, blobs())
    state = method.personal_state(3)
    assert all(torch.equal(state[name], initial[name]) for name in HEAD)
    assert all(torch.equal(state[name], weights(method)[name]) for name in BASE)


def test_batchnorm_belongs_to_the_base_unless_it_is_named() -> None:
    bn = {f"bn1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    plain, named = FedPer(LeNetBN()), FedPer(LeNetBN(), personal=["head", "bn1"])
    assert bn <= set(plain.shared_names)
    assert set(named.private_names) == bn | HEAD


def test_private_running_statistics_start_anew_and_are_kept_for_evaluation() -> None:
    method = FedPer(LeNetBN(num_classes=CLASSES), personal=["head", "bn1"], lr=0.1, batch_size=8, buffers="reset")
    fit(method, blobs((16, 8), (1, 28, 28)), rounds=3)
    for client, batches in enumerate((2, 1)):
        assert int(method.snapshots[client].private["bn1.num_batches_tracked"]) == batches  # of the last round
        state = method.personal_state(client)
        assert torch.equal(state["bn1.running_mean"], method.snapshots[client].private["bn1.running_mean"])
        assert float(state["bn1.running_mean"].abs().max()) > 0
    begun = method.enter(method.message_down(0), method.simulation.me(0, method.setting()))
    assert float(begun["bn1.running_mean"].abs().max()) == 0.0
    assert torch.equal(begun["bn1.weight"], method.snapshots[0].private["bn1.weight"])  # weights go on


def test_single_entries_and_blocks_have_names_too() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU()), nn.Linear(8, CLASSES))
    assert FedPer(net).private_names == ("1.weight", "1.bias")
    assert FedPer(net, personal=["0"]).private_names == ("0.0.weight", "0.0.bias")
    assert FedPer(net, personal=["1.bias", "0.0"]).private_names == ("0.0.weight", "0.0.bias", "1.bias")


@pytest.mark.parametrize(("kind", "option"), [(FedPer, "personal"), (LGFedAvg, "shared")])
def test_unknown_layers_are_refused(kind: Any, option: str) -> None:
    with pytest.raises(FederationError, match=r"^MLP has no layer 'fc': its layers are fc1, head\.$"):
        kind(mlp(), **{option: ["fc"]})
    with pytest.raises(FederationError, match="Conv2d has no fully connected layer"):
        kind(nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize("kind", [FedPer, LGFedAvg])
@pytest.mark.parametrize("net", ["mlp", "lenet_bn", "dropout"])
def test_stacked_equals_sequential(kind: Any, net: str) -> None:
    one, other = (trained(kind, net, engine=engine) for engine in ("sequential", "stacked"))
    assert differ(one, other) < 1e-9


@pytest.mark.parametrize(("kind", "option"), [(FedPer, "personal"), (LGFedAvg, "shared")])
def test_settings_come_back_from_a_checkpoint(kind: Any, option: str, tmp_path: Path) -> None:
    method = kind(mlp(), **{option: ["fc1"]})
    fit(method, blobs(), rounds=1).save_checkpoint(tmp_path / "x.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "x.ckpt")
    assert loaded.private_names == method.private_names
    assert largest_difference(loaded.snapshots[0].private, method.snapshots[0].private) == 0.0
