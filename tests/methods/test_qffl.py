"""q-FFL against the paper's formulas by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning.errors import FederationError
from fl_lightning.methods import QFFL, FedAvg
from fl_lightning.nets import LeNetBN
from fl_lightning.wire import Message
from tests.support import CLASSES, blobs, fit, largest_difference, mlp, weights
from tests.support.engines import NETS, differ, seeded, trained

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked"])
LOSS = "received.loss"


def one_round(method: FedAvg, **kwargs: Any) -> tuple[dict[str, torch.Tensor], list[Message]]:
    """The model before a round and the messages of it."""
    before = {name: value.double() for name, value in weights(method).items()}
    messages: list[Message] = []
    method.on_before_aggregate = messages.extend  # type: ignore[attr-defined]
    fit(method, blobs(**kwargs), rounds=1)
    return before, messages


@ENGINES
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_q_zero_equals_uniform_fedavg_bit_for_bit(engine: str, precision: str, fraction: float) -> None:
    options: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 8, "engine": engine}
    fair, avg = QFFL(mlp(), q=0.0, **options), FedAvg(mlp(), weighting="uniform", **options)
    for method in (fair, avg):
        fit(method, blobs(fraction=fraction), precision=precision)
    assert largest_difference(weights(fair), weights(avg)) == 0.0


def test_q_zero_averages_running_statistics_alike() -> None:
    torch.manual_seed(0)
    net = LeNetBN(num_classes=CLASSES)
    fair = QFFL(copy.deepcopy(net), q=0.0, lr=0.1, batch_size=8, engine="stacked")
    avg = FedAvg(net, weighting="uniform", lr=0.1, batch_size=8, engine="stacked")
    for method in (fair, avg):
        fit(method, blobs((16, 9, 24), (1, 28, 28)), rounds=2)
    assert largest_difference(weights(fair), weights(avg)) == 0.0


@ENGINES
@pytest.mark.parametrize("q", [0.001, 0.1, 1.0, 5.0])
def test_one_client(engine: str, q: float) -> None:
    """Its step is (w - w_1) / (1 + q L ||w - w_1||^2 / F)."""
    lr = 0.1
    method = QFFL(mlp(), q=q, lr=lr, epochs=2, engine=engine)
    before, (message,) = one_round(method, sizes=[30])
    loss = float(message.tensors[LOSS]) + 1e-10
    squared = sum(float((before[n] - message.tensors[n]).pow(2).sum()) for n in before)
    factor = 1 + q / lr * squared / loss
    expected = {n: before[n] - (before[n] - message.tensors[n]) / factor for n in before}
    assert largest_difference(weights(method), expected) < 1e-12
    assert factor > 1 + q / 10


@ENGINES
@pytest.mark.parametrize("net", ["mlp", "lenet_bn"])
def test_update_is_the_papers(engine: str, net: str) -> None:
    """Delta_k, h_k and the step as Algorithm 2 writes them; running statistics are averaged and do not count."""
    q, lr = 0.7, 0.1
    made, shape = NETS[net]
    method = QFFL(seeded(made), q=q, lr=lr, epochs=2, engine=engine)
    before, messages = one_round(method, shape=shape)
    assert len(messages) == 4
    names = [name for name, _ in method.net.named_parameters()]
    lipschitz, delta, h = 1 / lr, {n: torch.zeros_like(before[n]) for n in names}, 0.0
    for message in messages:
        loss = float(message.tensors[LOSS]) + 1e-10
        change = {n: lipschitz * (before[n] - message.tensors[n]) for n in names}
        delta = {n: delta[n] + loss**q * change[n] for n in names}
        h += q * loss ** (q - 1) * float(sum(c.pow(2).sum() for c in change.values())) + lipschitz * loss**q
    after = weights(method)
    assert largest_difference({n: after[n] for n in names}, {n: before[n] - delta[n] / h for n in names}) < 1e-12
    for name in (name for name in after if "running" in name):
        torch.testing.assert_close(after[name], torch.stack([m.tensors[name] for m in messages]).mean(0))


@ENGINES
def test_loss_is_that_of_the_received_model_over_all_training_data(engine: str) -> None:
    method = QFFL(mlp(), lr=0.3, epochs=3, batch_size=8, engine=engine, clients_per_stack=3)
    net, data = copy.deepcopy(method.net).double(), blobs(sizes=(300, 27, 33, 16))
    messages: list[Message] = []
    method.on_before_aggregate = messages.extend  # type: ignore[attr-defined]
    fit(method, data, rounds=1)
    for message in messages:
        index = data.federation.train[message.client]
        expected = torch.nn.functional.cross_entropy(net(data.federation.inputs[index].double()), data.targets[index])
        torch.testing.assert_close(message.tensors[LOSS], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("buffers", ["average", "keep", "reset"])
def test_loss_is_taken_in_eval_mode_with_own_labels_and_without_augmentation(buffers: Any) -> None:
    """Of the model as it is evaluated: in the second round with the running statistics of the first."""
    torch.manual_seed(0)
    net, inner = LeNetBN(num_classes=CLASSES), blobs((16, 24), (1, 28, 28)).federation
    maps = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    lists: dict[str, Any] = {
        "train": list(inner.train),
        "test": list(inner.test),
        "label_maps": maps,
        "val_fraction": 0,
    }
    from fl_lightning.datamodules import TensorFederation

    data = TensorFederation(
        inner.inputs, inner.targets, **lists, num_classes=CLASSES, augment=True, transform=lambda x, rng: -x
    )
    method = QFFL(net, lr=0.1, buffers=buffers, engine="stacked")
    expected: dict[int, torch.Tensor] = {}
    tracked: list[int] = []

    def evaluated(client: int, message: Any) -> None:
        model = copy.deepcopy(method.net).eval()
        model.load_state_dict(method.personal_state(client))
        index = inner.train[client]
        output, target = model(inner.inputs[index].double()), maps[client][inner.targets[index]]
        expected[client] = torch.nn.functional.cross_entropy(output, target).detach()

    def compared(messages: list[Message]) -> None:
        for message in messages:
            torch.testing.assert_close(message.tensors[LOSS], expected.pop(message.client), rtol=1e-9, atol=0)
            if buffers != "keep":
                tracked.append(int(message.tensors["bn1.num_batches_tracked"]))

    method.on_client_start, method.on_before_aggregate = evaluated, compared  # type: ignore[attr-defined]
    fit(method, data, rounds=2)
    assert tracked == {"average": [2, 3, 5, 6], "keep": [], "reset": [2, 3, 2, 3]}[buffers]  # training starts anew


def test_order_of_messages_does_not_matter() -> None:
    method = QFFL(mlp(), q=2.0, lr=0.1)
    _, messages = one_round(method)
    mixed = [messages[i] for i in (2, 0, 3, 1)]
    assert largest_difference(method.aggregate(messages), method.aggregate(mixed)) == 0.0


def test_a_client_without_loss_has_powers_too() -> None:
    """1e-10 is added to F_k."""
    method = QFFL(nn.Linear(1, 1, bias=False), q=0.5, lr=0.1)  # type: ignore[arg-type]
    nn.init.zeros_(method.net.weight)  # type: ignore[arg-type]
    model, losses = {"weight": torch.tensor([[1e-6]])}, (torch.tensor(0.0), torch.tensor(1.0))
    sent = [Message(k, {**model, LOSS: loss}, 1) for k, loss in enumerate(losses)]
    a = [1e-10**0.5, (1 + 1e-10) ** 0.5]
    b = [0.5 * f**-0.5 * 1e-12 / 0.1 for f in (1e-10, 1 + 1e-10)]
    assert float(method.aggregate(sent)["weight"]) == pytest.approx(1e-6 * sum(a) / (sum(a) + sum(b)), rel=1e-5)


def test_up_message() -> None:
    method = QFFL(mlp(), lr=0.1)
    _, messages = one_round(method)
    for message in messages:
        assert set(message.tensors) == {"fc1.weight", "fc1.bias", "head.weight", "head.bias", LOSS}
        assert message.nbytes == 8 * (20 * 16 + 16 + 16 * 4 + 4 + 1)
    assert not method.snapshots[0].private


def test_larger_q_favours_the_client_with_the_larger_loss() -> None:
    """In the direction of the step: with q the share of the worst client in it grows."""
    method = QFFL(mlp(), lr=0.1)
    _, messages = one_round(method)
    losses = [float(m.tensors[LOSS]) for m in messages]
    worst, best = losses.index(max(losses)), losses.index(min(losses))
    start = weights(method)

    def pull(q: float, client: int) -> float:
        """How much the aggregate moves when one client's model does."""
        method.q = q
        moved = copy.deepcopy(messages)
        moved[client].tensors = {n: v + 1e-6 if n in start else v for n, v in moved[client].tensors.items()}
        here, there = method.aggregate(messages), method.aggregate(moved)
        return float(sum((there[n] - here[n]).sum() for n in start))

    shares = [pull(q, worst) / pull(q, best) for q in (0.0, 0.1, 1.0)]
    assert shares[0] == pytest.approx(1, rel=1e-3)
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize("net", ["mlp", "lenet_bn", "frozen layer"])
def test_stacked_equals_sequential(net: str) -> None:
    one, other = (trained(QFFL, net, engine=engine, q=0.5) for engine in ("sequential", "stacked"))
    assert differ(one, other) < 1e-9


def test_settings_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    method = QFFL(mlp(), q=0.3, lr=0.1)
    fit(method, blobs(), rounds=1).save_checkpoint(tmp_path / "q.ckpt")
    loaded = QFFL.load_from_checkpoint(tmp_path / "q.ckpt")
    assert (loaded.q, loaded.weighting, loaded.local.lr) == (0.3, "uniform", 0.1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(FederationError, match=r"q must be 0 or more, not -1\."):
        QFFL(mlp(), q=-1)
    with pytest.raises(FederationError, match="q must be a number, not nan"):
        QFFL(mlp(), q=float("nan"))
    with pytest.raises(FederationError, match="lr must be greater than 0"):
        QFFL(mlp(), lr=0.0)
    with pytest.raises(FederationError, match="clients are weighted by their loss, not by their samples: leave it out"):
        QFFL(mlp(), weighting="samples")
