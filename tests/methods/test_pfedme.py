"""pFedMe against a bare loop, its fixed points and its limits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.engine import Batch
from fl_lightning.errors import FederationError
from fl_lightning.methods import PFedMe
from fl_lightning.nets import LeNetBN
from fl_lightning.parties import Reply
from fl_lightning.wire import Message, State
from tests.support import CLASSES, RAGGED, blobs, fit, largest_difference, mlp, weights
from tests.support.engines import IMAGE, differ, trained

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked"])
NAMES = {"fc1.weight", "fc1.bias", "head.weight", "head.bias"}


def doubled(state: State) -> State:
    return {name: value.double() for name, value in state.items()}


def theta(method: PFedMe, client: int) -> State:
    """The client's personal model under the net's names."""
    return {name.removeprefix("theta."): value for name, value in method.snapshots[client].private.items()}


def bare_client(
    w: State, data: Any, client: int, round: int, *, epochs: int, lr: float, lam: float, k: int, personal_lr: float
) -> tuple[State, State]:
    """w_k and theta_k of one round by a bare loop over nn.Module gradients."""
    personal, shared = copy.deepcopy(w), copy.deepcopy(w)
    stream, index, net = seeding.stream(0, "batches", round, client), data.federation.train[client], mlp().double()
    for _ in range(epochs):
        for part in index[seeding.permutation(stream, len(index))].split(8):
            for _ in range(k):
                net.load_state_dict(personal)
                net.zero_grad()
                x, y = data.federation.inputs[part].double(), data.federation.targets[part]
                nn.functional.cross_entropy(net(x), y).backward()
                for name, p in net.named_parameters():
                    personal[name] = personal[name] - personal_lr * (p.grad + lam * (personal[name] - shared[name]))
            shared = {name: shared[name] - lr * lam * (shared[name] - personal[name]) for name in shared}
    return shared, personal


@ENGINES
@pytest.mark.parametrize("beta", [1.0, 0.4, 2.0])
def test_equals_a_bare_loop(engine: str, beta: float) -> None:
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.05, "lam": 7.0, "personal_lr": 0.04}
    data = blobs()
    method = PFedMe(mlp(), inner_steps=3, beta=beta, batch_size=8, engine=engine, **settings)
    w = doubled(weights(method))
    fit(method, data, rounds=2)
    for round in range(2):
        sent, kept = zip(*(bare_client(w, data, client, round, k=3, **settings) for client in range(4)), strict=True)
        total = sum(RAGGED)
        mean = {n: sum(size / total * s[n] for size, s in zip(RAGGED, sent, strict=True)) for n in w}
        w = {n: (1 - beta) * w[n] + beta * mean[n] for n in w}
    assert largest_difference(weights(method), w) < 1e-12
    for client in range(4):
        assert largest_difference(theta(method, client), kept[client]) < 1e-12


@ENGINES
def test_lambda_zero_leaves_w_unchanged(engine: str) -> None:
    method, sent = PFedMe(mlp(), lam=0.0, lr=0.1, epochs=2, engine=engine), []
    start = doubled(weights(method))
    method.on_before_aggregate = sent.extend  # type: ignore[attr-defined]
    fit(method, blobs())
    assert all(largest_difference(message.tensors, start) == 0.0 for message in sent[:4])
    assert largest_difference(weights(method), start) < 1e-15  # the mean of equal models, up to its rounding
    assert largest_difference(theta(method, 0), start) > 1e-2


@ENGINES
def test_lr_times_lambda_of_one_gives_w_equal_to_theta(engine: str) -> None:
    method, sent = PFedMe(mlp(), lam=10.0, lr=0.1, epochs=2, batch_size=8, engine=engine), {}
    method.on_before_aggregate = lambda messages: sent.update({m.client: m.tensors for m in messages})  # type: ignore[attr-defined]
    fit(method, blobs(), rounds=2)
    for client in range(4):
        assert largest_difference(sent[client], theta(method, client)) < 1e-14


@ENGINES
def test_beta_zero_freezes_w(engine: str) -> None:
    method = PFedMe(mlp(), beta=0.0, lr=0.05, epochs=2, engine=engine)
    start = doubled(weights(method))
    fit(method, blobs())
    assert largest_difference(weights(method), start) == 0.0
    assert largest_difference(theta(method, 0), start) > 1e-3


class Quadratic(PFedMe):
    """The loss is 0.5 ||x - t||^2 of the model itself, with t = 1."""

    def client_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
        loss = sum(0.5 * (state[name] - 1.0).pow(2).sum() for name in self.trainable_names)
        return loss, {}  # type: ignore[return-value]


@ENGINES
@pytest.mark.parametrize("lam", [0.0, 0.5, 15.0])
def test_fixed_point_of_the_inner_steps(engine: str, lam: float) -> None:
    """With one minibatch, w_k is still w, and theta tends to (t + lam w) / (1 + lam)."""
    method = Quadratic(
        mlp(), lam=lam, inner_steps=60, personal_lr=0.5 / (1 + lam), lr=0.01, batch_size=64, engine=engine
    )
    w = doubled(weights(method))
    fit(method, blobs(), rounds=1)
    for client in range(4):
        expected = {name: (1 + lam * value) / (1 + lam) for name, value in w.items()}
        assert largest_difference(theta(method, client), expected) < 1e-12
    moved = {name: value - 0.01 * lam * (value - expected[name]) for name, value in w.items()}
    assert largest_difference(weights(method), moved) < 1e-12


def test_theta_starts_from_w_in_every_round() -> None:
    """Kept entries are for evaluation alone."""
    once, again = (PFedMe(mlp(), lr=0.05, engine="stacked") for _ in range(2))
    fit(once, blobs(), rounds=2)
    leave = again.leave
    again.leave = lambda *args: Reply((r := leave(*args)).up, {n: v + 9 for n, v in r.keep.items()})  # type: ignore[method-assign, union-attr]
    fit(again, blobs(), rounds=2)
    assert largest_difference(weights(once), weights(again)) == 0.0


def test_w_alone_crosses() -> None:
    method, crossed = PFedMe(mlp(), lr=0.05, engine="stacked"), set()
    method.on_client_start = lambda client, message: crossed.update(message)  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: crossed.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    fit(method, blobs())
    assert crossed == NAMES
    assert set(method.snapshots[0].private) == {f"theta.{name}" for name in NAMES}


@pytest.mark.parametrize("buffers", ["average", "keep", "reset"])
def test_evaluated_with_theta_and_if_never_sampled_with_w(buffers: Any) -> None:
    torch.manual_seed(0)
    data = blobs((16, 24, 9, 12), IMAGE)
    method = PFedMe(LeNetBN(num_classes=CLASSES), lr=0.05, batch_size=8, buffers=buffers, engine="stacked")
    method.cohort = lambda round: [0, 1]  # type: ignore[method-assign]
    fit(method, data, rounds=2)
    statistics = {name for name, _ in method.net.named_buffers()}
    for client in range(4):
        net = copy.deepcopy(method.net).eval()
        if client < 2:
            own = theta(method, client)
            net.load_state_dict({name: own[name] for name in net.state_dict()})
            assert any(not torch.equal(own[name], method.net.state_dict()[name]) for name in statistics)
        index = data.federation.test[client]
        correct = net(data.federation.inputs[index].double()).argmax(1) == data.federation.targets[index]
        torch.testing.assert_close(method.evaluator.scores["test"][client], correct.double().mean())
    state = method.server_state()
    assert all(torch.equal(value, state[name]) for name, value in method.personal_state(3).items())


def test_running_statistics_of_the_server_are_the_clients_mean() -> None:
    torch.manual_seed(0)
    method = PFedMe(LeNetBN(num_classes=CLASSES), lr=0.05, batch_size=8, beta=0.0, engine="stacked")
    sent: list[Message] = []
    method.on_before_aggregate = sent.extend  # type: ignore[attr-defined]
    fit(method, blobs((16, 8), IMAGE), rounds=1)
    expected = (16 * sent[0].tensors["bn1.running_mean"] + 8 * sent[1].tensors["bn1.running_mean"]) / 24
    torch.testing.assert_close(method.net.state_dict()["bn1.running_mean"], expected)
    own = theta(method, 0)["bn1.running_mean"]
    assert torch.equal(own, sent[0].tensors["bn1.running_mean"])


@pytest.mark.parametrize("net", ["mlp", "lenet_bn", "dropout", "reassigned buffer", "frozen layer"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5}], ids=["", "all"])
def test_stacked_equals_sequential(net: str, options: dict[str, Any]) -> None:
    one, other = (trained(PFedMe, net, engine=engine, lam=5.0, **options) for engine in ("sequential", "stacked"))
    assert differ(one, other) < 1e-9


def test_what_cannot_be_is_refused() -> None:
    for name in ("lam", "personal_lr", "beta"):
        with pytest.raises(FederationError, match=rf"^{name} must be 0 or more, not -1\.$"):
            PFedMe(mlp(), **{name: -1})  # type: ignore[arg-type]
    with pytest.raises(FederationError, match=r"^inner_steps must be 1 or more, not 0\.$"):
        PFedMe(mlp(), inner_steps=0)
    with pytest.raises(FederationError, match=r"^lr \* lam must be 1 at most, not 1\.5: "):
        PFedMe(mlp(), lr=0.1, lam=15.0)
