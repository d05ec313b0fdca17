"""IFCA: the choice, what it may look at, and models that nobody chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning.errors import FederationError
from fl_lightning.evaluation import mean_loss, mean_losses
from fl_lightning.methods import IFCA, FedAvg
from fl_lightning.methods import ifca as ifca_module
from fl_lightning.methods.ifca import CHOICE
from fl_lightning.nets import LeNetBN
from fl_lightning.parties import LocalData
from tests.support import blobs, fit, largest_difference, mlp, planted


def ifca(**kwargs: Any) -> IFCA:
    return IFCA(mlp(), **{"clusters": 3, "lr": 0.1, "batch_size": 8, "engine": "stacked", **kwargs})


def test_the_chosen_model_has_the_least_training_loss() -> None:
    method, data = ifca(), blobs((19, 9, 16, 8, 30))
    seen: list[tuple[int, list[float]]] = []

    def received(client: int, message: dict[str, torch.Tensor]) -> None:
        index = data.federation.train[client]
        x, y = data.federation.inputs[index].double(), data.federation.targets[index]
        losses = []
        for q in range(3):
            h = torch.relu(x @ message[f"{q}.fc1.weight"].T + message[f"{q}.fc1.bias"])
            losses.append(float(cross_entropy(h @ message[f"{q}.head.weight"].T + message[f"{q}.head.bias"], y)))
        seen.append((client, losses))

    sent: dict[int, int] = {}
    method.on_client_start = received  # type: ignore[attr-defined]
    method.on_client_end = lambda client, m: sent.update({client: int(m.tensors[CHOICE])})  # type: ignore[attr-defined]
    fit(method, data, rounds=1)
    assert {client: losses.index(min(losses)) for client, losses in seen} == sent
    assert len(set(sent.values())) > 1


def test_test_data_plays_no_part() -> None:
    def run(noise: float) -> tuple[dict[str, torch.Tensor], list[int]]:
        data, method = planted(), ifca()
        federation = data.federation
        federation.inputs[federation.test.flat] += noise
        federation.targets[federation.test.flat] = 0 if noise else 1
        fit(method, data, rounds=3)
        return {n: v.clone() for n, v in method.server.state_dict().items()}, method.assignment()

    (one, clusters), (other, same) = run(0.0), run(50.0)
    assert clusters == same
    assert largest_difference(one, other) == 0.0


def test_evaluation_chooses_by_training_loss_also_for_clients_that_never_trained() -> None:
    method, data = ifca(), planted(fraction=0.25)
    fit(method, data, rounds=2)
    assert len(method.snapshots) < 8
    federation = data.federation
    for client in range(8):
        index = federation.train[client]
        x, y = federation.inputs[index].double(), federation.targets[index]
        losses = [float(cross_entropy(method.call(method.model_state(q), x, training=False)[0], y)) for q in range(3)]
        assert method.cluster_of(client) == losses.index(min(losses))
        assert largest_difference(method.personal_state(client), method.model_state(method.cluster_of(client))) == 0


def test_a_choice_is_made_once_for_models_that_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    losses = ifca_module.mean_losses
    monkeypatch.setattr(ifca_module, "mean_losses", lambda *args: (made.append(args[2].row), losses(*args))[1])
    method = ifca()
    fit(method, blobs(), rounds=3)
    assert method.assignment() == [method.cluster_of(client) for client in range(4)]
    assert sorted(made) == sorted([0, 1, 2, 3] * 4)  # for the first round, and after each of three


def test_losses_of_several_models_are_those_of_each() -> None:
    for net, shape in ((mlp(), (20,)), (LeNetBN(num_classes=4), (1, 28, 28))):
        data = blobs((19, 150, 16), shape)
        method = IFCA(net, clusters=3, lr=0.1, batch_size=8, engine="stacked")
        fit(method, data, rounds=1)
        states = [method.model_state(q) for q in range(3)]
        for client in range(3):
            own = LocalData(data.federation, client)
            each = torch.stack([mean_loss(method, state, own) for state in states])
            assert torch.allclose(mean_losses(method, states, own), each, rtol=1e-9, atol=0)
            assert method.functional.stackable
            method.functional.stackable = False
            assert torch.equal(mean_losses(method, states, own), each)
            method.functional.stackable = True


def test_of_equal_models_the_first_is_taken_and_of_broken_ones_none() -> None:
    method = ifca()
    for other in method.others:
        other.load_state_dict(method.net.state_dict())
    fit(method, blobs(), rounds=0)
    assert method.assignment() == [0, 0, 0, 0]
    with torch.no_grad():
        method.net.head.bias.fill_(float("nan"))
    assert method.assignment() == [1, 1, 1, 1]


def test_an_unchosen_model_stays_to_the_last_bit() -> None:
    method = ifca(clusters=2)
    method.others[0].head.bias.data.copy_(torch.tensor([1e3, 0, 0, 0]))  # sure of one class, so never the best
    before = {name: value.clone().double() for name, value in method.model_state(1).items()}
    fit(method, blobs(), rounds=3)
    assert largest_difference(method.model_state(1), before) == 0.0
    assert method.assignment() == [0, 0, 0, 0]


def test_each_model_is_the_mean_of_what_was_sent_for_it() -> None:
    method, sent = ifca(), []
    method.on_before_aggregate = sent.extend  # type: ignore[attr-defined]
    fit(method, blobs((19, 9, 16, 8, 30)), rounds=1)
    for q in {int(m.tensors[CHOICE]) for m in sent}:
        own = [m.tensors for m in sent if int(m.tensors[CHOICE]) == q]
        mean = {name: sum(t[name] for t in own) / len(own) for name in method.shared_names}
        assert largest_difference(method.model_state(q), mean) < 1e-12


def test_planted_clusters_are_found() -> None:
    """Clients that name the classes differently cannot share a model."""
    method = ifca(clusters=2, warmup=0, epochs=3, seed=1)
    run = fit(method, planted(), rounds=15)
    found = method.assignment()
    assert len(set(found[0::2])) == len(set(found[1::2])) == 1
    assert found[0] != found[1]
    assert float(run.callback_metrics["test/acc"]) > 0.95
    one = FedAvg(mlp(), lr=0.1, batch_size=8, epochs=3, engine="stacked")
    assert float(fit(one, planted(), rounds=15).callback_metrics["test/acc"]) < 0.7


def test_warmup_chooses_at_random_and_then_ends() -> None:
    method, choices = ifca(clusters=2, warmup=2), []
    method.others[0].head.bias.data.copy_(torch.tensor([1e3, 0, 0, 0]))
    method.on_before_aggregate = lambda ms: choices.append([int(m.tensors[CHOICE]) for m in ms])  # type: ignore[attr-defined]
    fit(method, planted(), rounds=3)
    assert 0 < sum(choices[0]) < 8
    assert choices[0] != choices[1]
    assert method.completed_rounds == 3
    with pytest.raises(FederationError, match="warmup must be 0 or more"):
        ifca(warmup=-1)
