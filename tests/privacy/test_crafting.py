"""A server that crafts its message, in a run and beside it, on nets where the answer is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.callbacks import ImprintCallback, SecureAggregationCallback
from fl_lightning.datamodules import IID, TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedPer, Local
from fl_lightning.nets import MLP, LeNet5
from fl_lightning.privacy.imprint import Imprint, crafted, dense_layers, gaussian_thresholds, read, sorts
from tests.support import fit, largest_difference, trainer, weights

CLIENTS, SAMPLES = 3, 6


def images(rows: int = 600, side: int = 5, **kwargs: Any) -> TensorFederation:
    """Noise of different brightness; most rows are nobody's."""
    generator = torch.Generator().manual_seed(0)
    light = torch.linspace(0.1, 0.9, rows)[torch.randperm(rows, generator=generator)]
    x = (light[:, None, None, None] + 0.1 * torch.randn(rows, 1, side, side, generator=generator)).clamp(0, 1)
    y = torch.randint(3, (rows,), generator=generator)
    scheme = IID(CLIENTS, train_samples=SAMPLES)
    return TensorFederation(x, y, num_classes=3, partition=scheme, **{"val_fraction": 0, **kwargs})


def perceptron(bias: bool = True) -> MLP:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MLP(25, (400,), 3, bias=bias)


def attacked(callback: ImprintCallback, rounds: int = 2, *others: Any, **options: Any) -> FedAvg:
    settings: dict[str, Any] = {"lr": 0.05, "batch_size": SAMPLES, "engine": "stacked"}
    method = FedAvg(perceptron(), **{**settings, **options})
    fit(method, images(), rounds, callbacks=[callback, *others])
    return method


def row_of(callback: ImprintCallback, view: str) -> dict[str, float]:
    assert callback.report is not None
    return callback.report.mean(callback.report.select(view=view))


def test_thresholds_are_quantiles_of_a_gaussian() -> None:
    x = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0)).double()
    means = x.mean(1)
    below = [float((means < t).double().mean()) for t in gaussian_thresholds(x, 3)]
    assert below == pytest.approx([0.25, 0.5, 0.75], abs=0.01)


def test_a_layer_in_front_of_a_convolution_gives_samples_away() -> None:
    """Every sample that is alone between two thresholds, and the others not."""
    torch.manual_seed(0)
    x = torch.rand(1, 2, 6, 6).double() + torch.tensor([0.0, 0.1, 0.2, 0.201, 0.4]).double()[:, None, None, None]
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)).double()
    start = float(x.mean((1, 2, 3)).min())
    front = Imprint(72, start - 0.05 + torch.arange(6).double() / 10).double()
    F.cross_entropy(model(front(x)), torch.tensor([0, 1, 1, 0, 1])).backward()  # type: ignore[no-untyped-call]
    assert front.weight.grad is not None
    assert front.bias.grad is not None
    found = read(front.weight.grad, front.bias.grad)
    nearest = torch.cdist(x.flatten(1), found).min(1).values
    assert float(nearest[[0, 1, 4]].max()) < 1e-8
    assert float(nearest[[2, 3]].min()) > 1e-5


def test_whether_a_net_can_be_crafted_is_tried_out() -> None:
    """Dense layers with a ReLU between sort samples; with a tanh they do not, and others have no such layers."""
    torch.manual_seed(0)
    x, y = torch.rand(8, 12).double(), torch.arange(8) % 3
    for between, can in ((nn.ReLU(), True), (nn.Tanh(), False)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 50), between, nn.Linear(50, 3)).double()
        layers = dense_layers(model, 12)
        assert layers == ("1", "3")
        state = {name: value.detach() for name, value in model.named_parameters()}
        state |= crafted(state, layers, gaussian_thresholds(x, 50))
        loss = lambda own, a, b, m=model: F.cross_entropy(torch.func.functional_call(m, own, (a,)), b)  # noqa: E731
        assert sorts(loss, state, "1", x, y) is can
    assert dense_layers(nn.Sequential(nn.Linear(12, 50, bias=False), nn.ReLU(), nn.Linear(50, 3)), 12) is None
    assert dense_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(50, 3)), 12) is None
    assert dense_layers(nn.Sequential(nn.Linear(12, 3)), 12) is None


@pytest.mark.parametrize("place", ["first", "front"])
def test_an_extra_request_reads_samples_and_disturbs_nothing(place: Any, tmp_path: Path) -> None:
    callback = ImprintCallback(["server", "colluding"], place, 400, SAMPLES, clients=2, every=1, folder=str(tmp_path))
    plain = FedAvg(perceptron(), lr=0.05, batch_size=SAMPLES, engine="stacked")
    fit(plain, images(), 2)
    assert largest_difference(weights(attacked(callback)), weights(plain)) == 0.0
    for view in ("server", "colluding"):
        found = row_of(callback, view)
        assert found["share"] > 0.8
        assert found["psnr"] > 60
    assert callback.report is not None
    assert callback.report.floor() == {"grey": 0.0, "mean": 0.0}
    if place == "first":  # nothing moves the bins
        for one in callback.readings:
            exact = (one.images - one.originals).flatten(1).abs().amax(1) < 1e-4
            assert int(exact.sum()) >= SAMPLES - 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "attack_imprint.json",
        "attack_imprint.md",
        "imprint_server.png",
        "imprint_colluding.png",
    }


def test_behind_secure_aggregation_the_mean_is_read(tmp_path: Path) -> None:
    callback = ImprintCallback(batch=SAMPLES, folder=str(tmp_path))
    attacked(callback, 2, SecureAggregationCallback())
    assert callback.report is not None
    assert callback.report.views() == ["sums"]
    assert row_of(callback, "sums")["share"] > 0.7


def test_several_steps_give_less_away(tmp_path: Path) -> None:
    shares = []
    for steps in (1, 30):
        callback = ImprintCallback(batch=SAMPLES, local_steps=steps, folder=str(tmp_path))
        attacked(callback)
        shares.append(row_of(callback, "server")["share"])
    assert shares[0] > shares[1]


def test_a_malicious_server_disturbs_one_round(tmp_path: Path) -> None:
    """It reads whole clients, and its model after the round is the one before it."""
    callback = ImprintCallback(disturb=True, attacked_round=1, clients=2, folder=str(tmp_path))
    models: list[dict[str, Tensor]] = []

    class Watch(ImprintCallback):
        attack = "watch"

        def on_round_end(self, trainer: Any, pl_module: Any, messages: Any) -> None:
            models.append(weights(pl_module))

        def strike(self, trainer: Any, run: Any) -> list[dict[str, Any]]:
            return []

    attacked(callback, 3, Watch(folder=str(tmp_path)))
    layers = ("fc1.weight", "fc1.bias", "head.weight")
    before, attacked_now, after = ({name: model[name] for name in layers} for model in models)
    assert largest_difference(before, attacked_now) < 1e-12
    assert largest_difference(attacked_now, after) > 1e-4
    assert row_of(callback, "server")["share"] > 0.85
    assert callback.report is not None
    assert len(callback.report.select(view="server")) == 2
    assert "which it disturbed" in callback.report.markdown()


def test_a_resumed_run_reads_the_same(tmp_path: Path) -> None:
    def callback() -> ImprintCallback:
        return ImprintCallback(disturb=True, folder=str(tmp_path))

    def method() -> FedAvg:
        return FedAvg(perceptron(), lr=0.05, batch_size=SAMPLES, engine="stacked")

    whole, first, second = callback(), callback(), callback()
    fit(method(), images(), 3, callbacks=[whole])
    fit(method(), images(), 2, callbacks=[first]).save_checkpoint(tmp_path / "run.ckpt")
    fit(method(), images(), 3, ckpt_path=str(tmp_path / "run.ckpt"), callbacks=[second])
    assert whole.report is not None
    assert second.report is not None
    assert second.report.json() == whole.report.json()


def test_after_a_test(tmp_path: Path) -> None:
    fit(FedAvg(perceptron(), lr=0.05, engine="stacked"), images(), 1).save_checkpoint(tmp_path / "run.ckpt")
    callback = ImprintCallback(place="front", folder=str(tmp_path))
    again = FedAvg(perceptron(), lr=0.05, engine="stacked")
    trainer(callbacks=[callback]).test(again, datamodule=images(), ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)
    assert row_of(callback, "server")["share"] > 0.5


def test_what_cannot_be_crafted_is_refused(tmp_path: Path) -> None:
    data = images()
    cannot = "cannot sort samples"
    for method in (
        FedAvg(MLP(25, (20,), 3), engine="stacked"),  # no bias
        FedPer(perceptron(), engine="stacked"),  # the head stays
    ):
        with pytest.raises(FederationError, match=cannot):
            fit(method, images(), 1, callbacks=[ImprintCallback(folder=str(tmp_path))])
        assert method.completed_rounds == 0, "refused before the first round"
    with pytest.raises(FederationError, match=cannot):  # before the first round
        fit(FedAvg(MLP(25, (20,), 3), engine="stacked"), data, 1, callbacks=[ImprintCallback(disturb=True)])
    with pytest.raises(FederationError, match="has no view outsider, as only a server crafts"):
        ImprintCallback(["outsider"])
    with pytest.raises(FederationError, match="set place='first' with disturb"):
        ImprintCallback(place="front", disturb=True)
    with pytest.raises(FederationError, match="bins must be 2 or more, not 1"):
        ImprintCallback(bins=1)


def test_clients_that_send_nothing_are_not_read(tmp_path: Path) -> None:
    callback = ImprintCallback(place="front", folder=str(tmp_path))
    fit(Local(perceptron(), lr=0.05, engine="stacked"), images(), 1, callbacks=[callback])
    assert callback.report is not None
    assert callback.report.rows == []


def test_a_convolutional_net_has_a_layer_put_in_front(tmp_path: Path) -> None:
    torch.manual_seed(0)
    method = FedAvg(LeNet5(num_classes=3), lr=0.05, engine="sequential")
    callback = ImprintCallback(place="front", clients=1, batch=4, bins=400, folder=str(tmp_path))
    fit(method, images(300, 28), 1, callbacks=[callback])
    assert row_of(callback, "server")["share"] >= 0.75
