"""Comparison with a central model: parameter bias, and the picture of what FedDAF infers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning.callbacks import InferredDistributionCallback, ParameterBiasCallback
from fl_lightning.callbacks import central as central_module
from fl_lightning.callbacks.central import some_tests, train_centrally
from fl_lightning.callbacks.inferred import (
    dominant_classes,
    nearest_neighbour_accuracy,
    penultimate,
    two_sample_score,
)
from fl_lightning.errors import FederationError
from fl_lightning.methods import IFCA, FedAvg, FedDAF, FedGroup, FedMA, FedPer, FeSEM, Local
from fl_lightning.methods.settings import Inference
from fl_lightning.nets import LeNetBN
from tests.support import CLASSES, blobs, fit, largest_difference, mlp, weights
from tests.support.stops import Stop, kill, make, run, stopped

IMAGE = (1, 28, 28)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.ln, self.head = nn.Linear(20, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.ln(self.fc(x))))


def lenet() -> LeNetBN:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LeNetBN(num_classes=CLASSES)


def test_one_client_is_the_central_model_and_has_no_bias(tmp_path: Path) -> None:
    callback = ParameterBiasCallback(folder=str(tmp_path))
    method = FedAvg(lenet(), lr=0.1, epochs=2, batch_size=8, momentum=0.5, engine="stacked")
    fit(method, blobs([30], IMAGE), rounds=3, callbacks=[callback])
    assert callback.bias["all"] < 1e-9
    assert callback.by_layer.keys() == {"bn1", "bn2"}


def test_errors_by_hand(tmp_path: Path) -> None:
    callback = ParameterBiasCallback(folder=str(tmp_path))
    method = FedAvg(lenet(), lr=0.1, batch_size=8, engine="stacked")
    fit(method, blobs((19, 9, 16), IMAGE), rounds=2, callbacks=[callback])
    initial = {n: v.double() if v.is_floating_point() else v for n, v in lenet().state_dict().items()}
    central, own = train_centrally(method, initial, method.federation, 2), weights(method)
    by_hand = {
        "mu": lambda s, n: s[f"{n}.running_mean"],
        "sigma": lambda s, n: (s[f"{n}.running_var"] + 1e-5).sqrt(),
        "beta": lambda s, n: s[f"{n}.bias"],
        "gamma": lambda s, n: s[f"{n}.weight"],
    }
    for kind, of in by_hand.items():
        errors = {n: (of(own, n) - of(central, n)).abs() for n in ("bn1", "bn2")}
        for layer, error in errors.items():
            assert callback.by_layer[layer][kind] == pytest.approx(float(error.mean()))
        assert callback.bias[kind] == pytest.approx(float(torch.cat(list(errors.values())).mean()))
    assert callback.bias["all"] == pytest.approx(sum(callback.bias[k] for k in by_hand) / 4)
    assert callback.bias["all"] > 1e-4
    rows = list(csv.DictReader((tmp_path / "parameter_bias.csv").open()))
    assert len(rows) == 2 * 4 + 4 + 1
    assert float(rows[-1]["mean absolute error"]) == pytest.approx(callback.bias["all"], rel=1e-4)


def test_layers_that_keep_nothing_are_measured_on_test_samples(tmp_path: Path) -> None:
    callback, net = ParameterBiasCallback(folder=str(tmp_path)), Layered().double()
    initial = {name: value.clone() for name, value in net.state_dict().items()}
    method, data = FedAvg(net, lr=0.1, batch_size=8, engine="stacked"), blobs()  # type: ignore[arg-type]
    fit(method, data, rounds=1, callbacks=[callback])
    assert set(callback.by_layer["ln"]) == {"mu", "sigma", "beta", "gamma"}
    x = data.federation.inputs[data.federation.test.flat].double()
    models = (weights(method), train_centrally(method, initial, method.federation, 1))
    own, other = (nn.functional.linear(x, m["fc.weight"], m["fc.bias"]) for m in models)
    assert callback.by_layer["ln"]["mu"] == pytest.approx(float((own.mean(0) - other.mean(0)).abs().mean()))
    sigmas = [features.std(0, correction=0) for features in (own, other)]
    assert callback.by_layer["ln"]["sigma"] == pytest.approx(float((sigmas[0] - sigmas[1]).abs().mean()))


def test_a_central_model_is_trained_once_for_all_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    real = central_module.train_centrally

    def counted(*args: Any) -> Any:
        trained.append(args[-1])
        return real(*args)

    monkeypatch.setattr(central_module, "train_centrally", counted)
    path = str(tmp_path / "shared.pt")
    found = []
    for lr, rounds in ((0.1, 1), (0.1, 1), (0.2, 1), (0.2, 2)):
        callback = ParameterBiasCallback(central=path, folder=str(tmp_path))
        method = FedAvg(lenet(), lr=lr, batch_size=8, engine="stacked")
        fit(method, blobs((19, 9), IMAGE), rounds=rounds, callbacks=[callback])
        found.append(callback.bias)
    assert trained == [1, 1, 2]
    assert found[0] == found[1]


def test_passes_are_those_of_the_clients_and_survive_a_resume(tmp_path: Path) -> None:
    """Half of the clients per round: as many rounds of all data as they add up to, also after a stop."""
    whole = ParameterBiasCallback(folder=str(tmp_path / "a"))
    run(make(FedAvg), tmp_path / "whole", whole)
    stopped(make(FedAvg), tmp_path / "part", ParameterBiasCallback(), Stop("on_round_end", 3, kill))
    part = ParameterBiasCallback(folder=str(tmp_path / "b"))
    run(make(FedAvg), tmp_path / "part", part, ckpt_path=str(tmp_path / "part" / "last.ckpt"))
    assert whole.before == part.before == 0
    assert largest_difference(whole.initial, part.initial) == 0
    assert part.bias == whole.bias


def test_a_run_that_is_stopped_after_its_last_round_compares_when_resumed(tmp_path: Path) -> None:
    """Its checkpoint is that of the last round, so Lightning does not train again."""
    whole = ParameterBiasCallback(folder=str(tmp_path / "a"))
    run(make(FedAvg), tmp_path / "whole", whole)
    stopped(make(FedAvg), tmp_path / "part", Stop("on_fit_end", 1, kill), ParameterBiasCallback())
    part = ParameterBiasCallback(folder=str(tmp_path / "b"))
    run(make(FedAvg), tmp_path / "part", part, ckpt_path=str(tmp_path / "part" / "last.ckpt"))
    assert part.bias == whole.bias != {}


def test_the_models_of_clusters_that_have_clients_are_compared(tmp_path: Path) -> None:
    """Clients go to the second or the third of three models: the first, which stays as it began, plays no part."""
    callback = ParameterBiasCallback(folder=str(tmp_path))
    method = FeSEM(lenet(), clusters=3, centres="same", lr=0.1, engine="stacked")
    method.nearest = lambda: {client: 1 + client % 2 for client in method.known}  # type: ignore[method-assign]
    fit(method, blobs((19, 9, 16), IMAGE), rounds=2, callbacks=[callback])
    central = callback.central_state(method.trainer, method)["bn1.running_mean"]
    errors = [(method.model_state(q)["bn1.running_mean"] - central).abs().mean() for q in (1, 2)]
    assert errors[0] != errors[1]
    assert callback.by_layer["bn1"]["mu"] == pytest.approx(float(sum(errors)) / 2)


def test_models_that_begin_with_different_weights_are_refused_before_training(tmp_path: Path) -> None:
    """One central model cannot begin with all of theirs; models that parted since, in a resumed run, are fine."""
    for method in (IFCA(lenet(), clusters=2), FeSEM(lenet(), clusters=2)):
        with pytest.raises(FederationError, match=f"models of {type(method).__name__} start with different weights"):
            fit(method, blobs((9, 8), IMAGE), rounds=1, callbacks=[ParameterBiasCallback()])
        assert method.completed_rounds == 0
    fit(IFCA(lenet(), clusters=1), blobs((9, 8), IMAGE), rounds=0, callbacks=[ParameterBiasCallback()])
    options = {"clusters": 2, "cold_steps": 1}
    stopped(make(FedGroup, **options), tmp_path, ParameterBiasCallback(), Stop("on_round_end", 3, kill))
    callback = ParameterBiasCallback(folder=str(tmp_path))
    run(make(FedGroup, **options), tmp_path, callback, ckpt_path=str(tmp_path / "last.ckpt"))
    assert callback.bias


def test_passes_leave_the_cold_start_out_and_are_one_at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    monkeypatch.setattr(central_module, "train_centrally", lambda *args: trained.append(args[-1]) or args[1])
    for method, data, rounds in (
        (FedGroup(lenet(), clusters=2, cold_steps=3, batch_size=8, engine="stacked"), blobs((9, 8, 9), IMAGE), 2),
        (FedAvg(lenet(), batch_size=8, engine="stacked"), blobs([8] * 8, IMAGE, fraction=0.125), 1),
        (FedAvg(lenet(), epochs=3, batch_size=8, engine="stacked"), blobs([8] * 4, IMAGE, fraction=0.5), 3),
    ):
        callback = ParameterBiasCallback(folder=str(tmp_path / type(method).__name__ / str(rounds)))
        fit(method, data, rounds=rounds, callbacks=[callback])
    assert trained == [2, 1, round(3 * 3 * 2 / 4)]


def test_a_central_model_of_no_pass_is_the_initial_one() -> None:
    method, data = FedAvg(mlp()), blobs()
    data.setup()
    initial = method.server_state()
    found = train_centrally(method, initial, data.federation, 0)
    assert all(torch.equal(value, initial[name]) for name, value in found.items())


def test_refusals() -> None:
    with pytest.raises(FederationError, match=r"FedPer has no shared model to compare, as clients keep head"):
        fit(FedPer(lenet()), blobs(shape=IMAGE), rounds=1, callbacks=[ParameterBiasCallback()])
    with pytest.raises(FederationError, match="MLP has no normalisation layers"):
        fit(FedAvg(mlp()), blobs(), rounds=1, callbacks=[ParameterBiasCallback()])
    growing = FedAvg(lenet())
    growing.grows = True
    with pytest.raises(FederationError, match="FedAvg adds units that a central model does not have"):
        fit(growing, blobs(shape=IMAGE), rounds=1, callbacks=[ParameterBiasCallback()])
    with pytest.raises(FederationError, match="FedMA adds units that a central model does not have"):
        fit(FedMA(lenet(), mode="grow"), blobs(shape=IMAGE), rounds=1, callbacks=[ParameterBiasCallback()])
    with pytest.raises(FederationError, match="needs FedDAF, not Local"):
        fit(Local(mlp()), blobs(), rounds=1, callbacks=[InferredDistributionCallback()])
    with pytest.raises(FederationError, match="number must be 2 or more"):
        InferredDistributionCallback(number=1)


def test_nearest_neighbours() -> None:
    rng = np.random.default_rng(0)
    a, b, far = (torch.from_numpy(rng.normal(size=(200, 3)) + shift) for shift in (0, 0, 9))
    assert abs(two_sample_score(a, b, rng) - 0.5) < 0.06
    assert two_sample_score(a, far, rng) == 1.0
    assert abs(two_sample_score(a, b[:20], rng) - 0.5) < 0.1  # as many of both, whichever are fewer
    line = torch.tensor([[0.0], [1.0], [5.0]])
    other = torch.tensor([[0.4], [6.0]])
    assert nearest_neighbour_accuracy(line, other) == 0.0  # 0 and 1 -> 0.4, 5 -> 6, and back


@pytest.mark.parametrize("original", [True, False])
def test_the_picture_of_what_is_inferred(original: bool, tmp_path: Path) -> None:
    callback = InferredDistributionCallback(number=40, original=original, folder=str(tmp_path))
    method = FedDAF(lenet(), lr=0.1, batch_size=8, warmup=0, inference=Inference(steps=20), engine="stacked")
    fit(method, blobs((12, 9, 8, 10, 8, 9), IMAGE), rounds=1, callbacks=[callback])
    assert 0 <= callback.score <= 1
    told = json.loads((tmp_path / "inferred_distribution.json").read_text())
    assert told == {"two_sample_score": callback.score, "clients": 6, "draws": 40}
    assert (tmp_path / "inferred_distribution.png").stat().st_size > 5000
    assert (tmp_path / "central.pt").exists() == original


def test_what_is_pictured_by_hand() -> None:
    data = blobs()
    method = FedAvg(mlp(), lr=0.1, batch_size=8, engine="stacked")
    fit(method, data, rounds=1)
    labels = [data.federation.targets[index].tolist() for index in data.federation.train]
    assert dominant_classes(method).tolist() == [max(range(CLASSES), key=own.count) for own in labels]
    index, state = data.federation.test.flat[:5], weights(method)
    hidden = nn.functional.linear(data.federation.inputs[index].double(), state["fc1.weight"], state["fc1.bias"])
    torch.testing.assert_close(penultimate(method, state, index), hidden.relu())
    chosen = some_tests(method, 7)
    assert len(set(chosen.tolist())) == 7
    assert set(chosen.tolist()) <= set(data.federation.test.flat.tolist())
    assert torch.equal(chosen, some_tests(method, 7))


def test_nothing_is_pictured_before_the_first_fit_of_the_autoencoder(tmp_path: Path) -> None:
    callback = InferredDistributionCallback(folder=str(tmp_path))
    fit(FedDAF(lenet(), batch_size=8, engine="stacked"), blobs((9, 8), IMAGE), rounds=1, callbacks=[callback])
    assert not list(tmp_path.iterdir())
