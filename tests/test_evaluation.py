"""Evaluation: every client, its own model, its own samples; shared models in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.datamodules import TensorFederation
from fl_lightning.methods import FedAvg, Local
from fl_lightning.nets import LeNetBN
from fl_lightning.wire import State
from tests.support import CLASSES, FEATURES, blobs, fit, mlp, trainer


class Heads(FedAvg):
    """A method with a shared body and private heads."""

    def is_private(self, name: str) -> bool:
        return name.startswith("head.")


def by_hand(method: FedAvg, data: TensorFederation, client: int) -> tuple[float, float]:
    """Accuracy and loss of one client by an ordinary forward pass."""
    federation, state = data.federation, method.personal_state(client)
    with torch.no_grad():
        index = federation.test[client]
        x = federation.features(federation.inputs[index], torch.float64)
        output = torch.func.functional_call(method.net.eval(), state, (x,))
        target = federation.targets[index]
        loss = nn.functional.cross_entropy(output, target)
        return float((output.argmax(1) == target).double().mean()), float(loss)


@pytest.mark.parametrize("kind", [FedAvg, Heads, Local])
@pytest.mark.parametrize("shape", [(20,), (1, 28, 28)], ids=["mlp", "lenet_bn"])
def test_scores_equal_an_ordinary_forward_pass(kind: type[FedAvg], shape: tuple[int, ...]) -> None:
    data = blobs((24, 9, 16), shape)
    torch.manual_seed(0)
    method = kind(mlp() if len(shape) == 1 else LeNetBN(num_classes=CLASSES), lr=0.1, epochs=2, batch_size=8)
    run = fit(method, data, rounds=2)
    expected = [by_hand(method, data, client) for client in range(3)]
    accuracies = torch.tensor([a for a, _ in expected], dtype=torch.float64)
    torch.testing.assert_close(method.evaluator.scores["test"], accuracies)
    metrics = run.callback_metrics
    assert float(metrics["test/acc"]) == pytest.approx(float(accuracies.mean()))
    assert float(metrics["test/acc_std"]) == pytest.approx(float(accuracies.std(correction=0)))
    assert float(metrics["test/acc_worst10"]) == pytest.approx(float(accuracies.min()))
    assert float(metrics["test/loss"]) == pytest.approx(sum(loss for _, loss in expected) / 3)


def test_clients_that_share_a_model_are_batched_and_others_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counted call is one run of the net, whatever it is mapped over."""
    calls: list[bool] = []
    original = FedAvg.call

    def counted(self: Any, state: State, x: Tensor, noise: State | None = None, training: bool = True) -> Any:
        if not training:
            calls.append(True)
        return original(self, state, x, noise, training)

    for kind, expected in ((FedAvg, 1), (Local, 1)):
        method = kind(mlp(), epochs=1)
        fit(method, blobs((16,) * 12), rounds=1)
        monkeypatch.setattr(FedAvg, "call", counted)
        monkeypatch.setattr(Local, "call", counted)
        calls.clear()
        trainer().validate(method, datamodule=blobs((16,) * 12), verbose=False)
        assert len(calls) - 1 == expected  # one call checks that the net fits the data
        monkeypatch.undo()


def test_never_sampled_clients_get_the_shared_model_and_the_initial_private_part() -> None:
    method = Heads(mlp(), lr=0.1)
    initial = {name: value.clone().double() for name, value in method.net.state_dict().items()}
    method.cohort = lambda round: [0, 1]  # type: ignore[method-assign]
    fit(method, blobs())
    state = method.personal_state(3)
    torch.testing.assert_close(state["head.weight"], initial["head.weight"])
    assert not torch.equal(state["fc1.weight"], initial["fc1.weight"])
    assert not torch.equal(method.personal_state(0)["head.weight"], method.personal_state(1)["head.weight"])


def test_private_names_are_never_sent() -> None:
    method, crossed = Heads(mlp(), lr=0.1), set()
    method.on_client_start = lambda client, message: crossed.update(message)  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: crossed.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    fit(method, blobs())
    assert crossed == {"fc1.weight", "fc1.bias"} == set(method.shared_names)
    assert set(method.snapshots[0].private) == {"head.weight", "head.bias"}


def test_global_test_set_and_held_out_validation() -> None:
    inner = blobs((40, 40)).federation
    lists: dict[str, Any] = {"train": list(inner.train), "test": [[80 + 10], [80 + 11]]}
    rest = [i for i in range(100) if i not in set(inner.train.flat.tolist()) | {90, 91}]

    def data(**kwargs: Any) -> TensorFederation:
        return TensorFederation(inner.inputs, inner.targets, **lists, global_test=rest, num_classes=CLASSES, **kwargs)

    lists["test"] = [[i] for i in rest[:2]]
    rest = rest[2:]
    method = FedAvg(mlp(), lr=0.1)
    run = fit(method, data(val_fraction=0))
    x, y = inner.inputs[rest].double(), inner.targets[rest]
    expected = (method.net(x).argmax(1) == y).double().mean()
    assert float(run.callback_metrics["test/global_acc"]) == pytest.approx(float(expected))

    held = FedAvg(mlp(), lr=0.1)
    run = fit(held, data(val_fraction=0.25))
    assert "test/global_acc" not in run.callback_metrics  # test data is not looked at while there is validation data
    federation = run.datamodule.federation
    assert federation.index("val")[0].tolist() != federation.index("test")[0].tolist()
    (tested,) = trainer().test(held, datamodule=data(val_fraction=0.25), verbose=False)
    assert "test/global_acc" in tested


class Unmoved(nn.Module):
    """Normalises by the batch in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, track_running_stats=False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


@pytest.mark.parametrize("kind", [FedAvg, Heads])
def test_a_net_that_normalises_by_the_batch_sees_one_client_at_a_time(kind: type[FedAvg]) -> None:
    """Neither padding nor samples of others change what it says of a client's; test sets differ in size."""
    data = blobs()
    lists: dict[str, Any] = {"train": list(data.federation.train), "test": list(data.federation.test)}
    lists["test"][1] = lists["test"][1][:3]
    data = TensorFederation(
        data.federation.inputs, data.federation.targets, **lists, num_classes=CLASSES, val_fraction=0
    )
    method = kind(Unmoved(), lr=0.1)
    fit(method, data, rounds=1)
    expected = torch.tensor([by_hand(method, data, client)[1] for client in range(4)])
    outputs = method.outputs(range(4), "test")
    losses = {client: float(nn.functional.cross_entropy(logits, y)) for client, logits, y in outputs}
    assert [losses[client] for client in range(4)] == pytest.approx(expected.tolist())


def test_label_maps_apply_in_evaluation() -> None:
    """A client that swaps labels is scored by its own labels."""
    inner = blobs((40, 40)).federation
    maps = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    lists: dict[str, Any] = {"train": list(inner.train), "test": list(inner.test)}
    data = TensorFederation(inner.inputs, inner.targets, **lists, label_maps=maps, num_classes=CLASSES, val_fraction=0)
    method = Local(mlp(), lr=0.3, epochs=10, batch_size=8)
    run = fit(method, data, rounds=5)
    assert run.callback_metrics["test/acc"] > 0.8


def test_evaluation_is_deterministic_and_changes_nothing() -> None:
    method = Local(LeNetBN(num_classes=CLASSES), lr=0.1)
    data = blobs((16, 8), (1, 28, 28))
    fit(method, data, rounds=1)
    before = {k: v.clone() for k, v in method.net.state_dict().items()}
    results = [trainer().test(method, datamodule=data, verbose=False) for _ in range(2)]
    assert results[0] == results[1]
    assert all(torch.equal(before[k], v) for k, v in method.net.state_dict().items())
