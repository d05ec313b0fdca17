"""FedAvg against bare PyTorch and hand-derived numbers (McMahan et al., 2017)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fl_lightning import seeding
from fl_lightning.datamodules import TensorFederation
from fl_lightning.methods import FedAvg
from fl_lightning.nets import LeNetBN
from fl_lightning.optim import FedAdam, Yogi
from tests.support import RAGGED, blobs, fit, largest_difference, mlp, sgd, weights

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked"])


def bare_round(
    net: nn.Module, data: TensorFederation, round: int, epochs: int, batch: int, seed: int = 0, **kw: float
) -> None:
    """One client's local training by a bare loop, in the batch order that its stream gives."""
    federation = data.federation
    order = seeding.stream(seed, "batches", round, 0)
    index = federation.train[0]
    batches = []
    for _ in range(epochs):
        shuffled = index[seeding.permutation(order, len(index))]
        batches += [(federation.inputs[part].double(), federation.targets[part]) for part in shuffled.split(batch)]
    sgd(net, batches, **kw)


@ENGINES
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["plain", "momentum"])
def test_one_client_equals_centralised_sgd(engine: str, options: dict[str, float]) -> None:
    data, method = blobs([37]), FedAvg(mlp(), lr=0.1, epochs=2, batch_size=8, engine=engine, **options)
    central = copy.deepcopy(method.net).double()
    fit(method, data)
    for round in range(3):  # a new optimizer every round: momentum is not kept
        bare_round(central, data, round, epochs=2, batch=8, lr=0.1, **options)
    assert largest_difference(weights(method), central.state_dict()) < 1e-12


@ENGINES
def test_identical_clients_give_the_model_of_any_of_them(engine: str) -> None:
    alone = blobs([24])
    x, y = alone.federation.inputs, alone.federation.targets
    index, test = alone.federation.train[0].tolist(), alone.federation.test[0].tolist()
    train = [[i + k * len(x) for i in index] for k in range(3)]
    twins = TensorFederation(x.repeat(3, 1), y.repeat(3), train, test=[test] * 3, num_classes=4, val_fraction=0)
    one, three = (FedAvg(mlp(), lr=0.1, batch_size=24, epochs=2, engine=engine) for _ in range(2))
    fit(one, alone)
    fit(three, twins)
    assert largest_difference(weights(one), weights(three)) < 1e-12


@ENGINES
def test_one_full_batch_equals_one_step_on_the_weighted_loss(engine: str) -> None:
    data, method = blobs(), FedAvg(mlp(), lr=0.3, batch_size=max(RAGGED), engine=engine)
    central = copy.deepcopy(method.net).double()
    fit(method, data, rounds=1)
    federation, everyone = data.federation, data.federation.train.flat
    sgd(central, [(federation.inputs[everyone].double(), federation.targets[everyone])], lr=0.3)
    assert largest_difference(weights(method), central.state_dict()) < 1e-12


def test_uniform_weights_count_every_client_the_same() -> None:
    """With one full batch each, the mean of w - lr g_k is w - lr mean(g_k), whatever n_k."""
    data, method = blobs(), FedAvg(mlp(), lr=0.3, batch_size=max(RAGGED), weighting="uniform")
    start = copy.deepcopy(method.net).double()
    fit(method, data, rounds=1)
    federation, moved = data.federation, []
    for index in federation.train:
        net = copy.deepcopy(start)
        sgd(net, [(federation.inputs[index].double(), federation.targets[index])], lr=0.3)
        moved.append(net.state_dict())
    mean = {name: torch.stack([m[name] for m in moved]).mean(0) for name in moved[0]}
    assert largest_difference(weights(method), mean) < 1e-12


def test_hand_derived_number() -> None:
    """Two clients, one weight pair, one sample each: softmax regression by hand.

    Client 0 has x = 1, y = 0; client 1 has x = 2, y = 1 three times. From W = 0 the gradient is (p - onehot) x with
    p = (1/2, 1/2): client 0 moves to lr (1/2, -1/2), client 1 to lr (-1, 1); weights 1/4 and 3/4 give
    lr (1/8 - 3/4, -1/8 + 3/4) = lr (-5/8, 5/8).
    """
    net = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(net.weight)
    x, y = torch.tensor([[1.0], [2.0], [2.0], [2.0], [1.0], [2.0]]), torch.tensor([0, 1, 1, 1, 0, 1])
    data = TensorFederation(x, y, train=[[0], [1, 2, 3]], test=[[4], [5]], val_fraction=0)
    method = FedAvg(net, lr=0.8, batch_size=3)
    fit(method, data, rounds=1)
    torch.testing.assert_close(net.weight.detach().flatten(), torch.tensor([-0.5, 0.5], dtype=torch.float64))


def test_buffers_are_averaged_with_the_weights_of_the_parameters() -> None:
    data = blobs((16, 8), shape=(1, 28, 28))
    method = FedAvg(LeNetBN(num_classes=4), lr=0.0, batch_size=8)
    before = {k: v.clone().double() for k, v in method.net.state_dict().items() if "running_mean" in k}
    conv = copy.deepcopy(method.net).double()
    fit(method, data, rounds=1)
    means = []
    for client, index in enumerate(data.federation.train):
        order = index[seeding.permutation(seeding.stream(0, "batches", 0, client), len(index))]
        net = copy.deepcopy(conv).train()
        for part in order.split(8):
            net(data.federation.inputs[part].double())
        means.append(net.state_dict())
    assert before
    for name in before:
        expected = (16 * means[0][name] + 8 * means[1][name]) / 24
        torch.testing.assert_close(method.net.state_dict()[name], expected)
    tracked = [v for k, v in method.net.state_dict().items() if k.endswith("num_batches_tracked")]
    assert [int(v) for v in tracked] == [2, 2]  # the maximum


@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_buffer_policies(policy: str) -> None:
    data = blobs((16, 8), shape=(1, 28, 28))
    method = FedAvg(LeNetBN(num_classes=4), lr=0.1, batch_size=8, buffers=policy)
    names = [name for name, _ in method.net.named_buffers()]
    seen: dict[str, list[set[str]]] = {"down": [], "up": []}
    down, leave = method.message_down, method.leave
    method.message_down = lambda c: (seen["down"].append(set(m := down(c))), m)[1]  # type: ignore[method-assign]
    method.leave = lambda *args: (seen["up"].append(set((r := leave(*args)).up)), r)[1]  # type: ignore[method-assign]
    start = {name: method.net.state_dict()[name].clone() for name in names}
    fit(method, data, rounds=2)
    assert not any(set(names) & sent for sent in seen["down"])
    if policy == "keep":  # stay with the client: nothing crosses, the server's never change
        assert not any(set(names) & sent for sent in seen["up"])
        assert all(torch.equal(method.net.state_dict()[n].double(), start[n].double()) for n in names)
        assert set(method.snapshots[0].private) == set(names)
        assert int(method.snapshots[0].private[names[-1]]) == 4  # 2 batches a round, kept over 2 rounds
    else:  # start anew in every round, averaged for evaluation
        assert all(set(names) <= sent for sent in seen["up"])
        assert int(method.net.state_dict()[names[-1]]) == 2
        assert not method.snapshots[0].private


def test_server_optimizer_gets_minus_the_mean_change_as_gradient() -> None:
    """Server SGD with learning rate s moves s times as far as FedAvg in the first round."""
    data = blobs()
    full = FedAvg(mlp(), lr=0.1)
    half = FedAvg(mlp(), lr=0.1, server_optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    start = weights(full)
    fit(full, data, rounds=1)
    fit(half, data, rounds=1)
    expected = {name: (start[name].double() + value) / 2 for name, value in weights(full).items()}
    assert largest_difference(weights(half), expected) < 1e-12


@pytest.mark.parametrize("kind", [FedAdam, Yogi, torch.optim.Adam])
def test_adaptive_server_optimizers_learn(kind: type[torch.optim.Optimizer]) -> None:
    method = FedAvg(mlp(), lr=0.05, server_optimizer=lambda p: kind(p, lr=0.03))  # type: ignore[call-arg]
    run = fit(method, blobs(), rounds=15)
    assert run.callback_metrics["test/acc"] > 0.7


def test_clipping_bounds_every_clients_step() -> None:
    """With one step and clip_norm c, a client moves by at most lr c."""
    data, method = blobs(), FedAvg(mlp(), lr=1.0, batch_size=max(RAGGED), clip_norm=0.01)
    start, ups = weights(method), []
    method.on_before_aggregate = lambda messages: ups.extend(messages)  # type: ignore[attr-defined]
    fit(method, data, rounds=1)
    for message in ups:
        moved = torch.cat([(message.tensors[n] - start[n].double()).flatten() for n in start])
        torch.testing.assert_close(moved.norm(), torch.tensor(0.01, dtype=torch.float64), rtol=1e-3, atol=0)
