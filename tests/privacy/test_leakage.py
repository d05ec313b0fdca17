"""Gradient leakage: exact for a linear model and one sample, by hand and by the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.callbacks import DifferentialPrivacyCallback, GradientLeakageCallback
from fl_lightning.errors import FederationError
from fl_lightning.methods import IFCA, SCAFFOLD, FedAvg, FedBPS, FedMA, FedPer, Local, PFedMe, WAFFLe, WeightErosion
from fl_lightning.metrics import psnr
from fl_lightning.module import FederatedModule
from fl_lightning.nets import MLP, LossNet
from fl_lightning.privacy.gradients import LocalSteps, Matching
from fl_lightning.privacy.leakage import exact, gradient_of, labels_of, small_update
from fl_lightning.privacy.pixels import Pixels
from tests.support import blobs, fit, largest_difference, mlp, trainer, weights
from tests.support.privacy import SIDE, spots, stripes


def linear(bias: bool = True) -> MLP:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MLP(20, (), 4, bias=bias)


def test_a_linear_models_single_sample_is_exact() -> None:
    method, data = FedAvg(linear(), lr=0.1, engine="stacked"), blobs()
    fit(method, data, 1)
    row = data.federation.train[2][:1]
    before = weights(method)
    received, sent, _ = small_update(method, 2, row)
    gradient = gradient_of(method, received, sent)
    net = linear().double()
    net.load_state_dict(before)
    x, y = data.federation.inputs[row].double(), data.federation.targets[row]
    nn.functional.cross_entropy(net(x), y).backward()
    assert largest_difference(gradient, {n: p.grad for n, p in net.named_parameters()}) < 1e-12  # type: ignore[misc]
    pixels = Pixels.of(data.federation)
    found = exact(method, gradient, pixels)
    torch.testing.assert_close(found["analytic"], pixels.of_rows(row).double(), rtol=1e-6, atol=1e-6)
    assert labels_of(method, gradient, 1).tolist() == y.tolist()  # type: ignore[union-attr]
    assert largest_difference(before, weights(method)) == 0.0


@pytest.mark.parametrize(("kind", "options"), [(IFCA, {"clusters": 2}), (FedBPS, {"p": 0.0})])
def test_a_client_that_chooses_a_model_or_sends_more_than_it_is_no_safer(
    kind: type[FederatedModule], options: dict[str, Any], tmp_path: Path
) -> None:
    method, data = kind(linear(), lr=0.1, engine="stacked", **options), blobs()
    callback = GradientLeakageCallback(["server"], steps=1, clients=1, folder=str(tmp_path))
    fit(method, data, 1, callbacks=[callback])
    assert callback.report is not None
    (row,) = callback.report.select(variant="analytic")
    assert (row["label_acc"], row["psnr"] > 100) == (1.0, True)


def test_clients_of_fedma_are_attacked_after_a_test(tmp_path: Path) -> None:
    method, data = FedMA(mlp(), lr=0.1, batch_size=8, engine="stacked"), blobs()
    fit(method, data, 1).save_checkpoint(tmp_path / "run.ckpt")
    callback = GradientLeakageCallback(["server"], steps=1, clients=1, folder=str(tmp_path))
    again = FedMA(mlp(), lr=0.1, batch_size=8, engine="stacked")
    trainer(callbacks=[callback]).test(again, datamodule=data, ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)
    assert callback.report is not None
    assert callback.report.select(variant="analytic")


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weight_decay_is_accounted_for(decay: float) -> None:
    method, data = FedAvg(linear(), lr=0.1, weight_decay=decay, momentum=0.9, engine="stacked"), blobs()
    fit(method, data, 1)
    row = data.federation.train[0][:1]
    received, sent, _ = small_update(method, 0, row)
    pixels = Pixels.of(data.federation)
    found = exact(method, gradient_of(method, received, sent), pixels)["analytic"]
    torch.testing.assert_close(found, pixels.of_rows(row).double(), rtol=1e-6, atol=1e-6)


def test_labels_of_a_batch() -> None:
    """By hand: three samples of classes 0, 2 and 2, of all of which the model thinks all classes equally likely."""
    method = FedAvg(mlp())
    share = torch.tensor([1.0, 0.0, 2.0, 0.0]) / 3
    assert labels_of(method, {"head.bias": 0.25 - share}, 3).tolist() == [0, 2, 2]  # type: ignore[union-attr]
    rows = (0.25 - share)[:, None] * torch.rand(1, 16)
    assert labels_of(method, {"head.weight": rows}, 3).tolist() == [0, 2, 2]  # type: ignore[union-attr]


def test_without_a_bias_or_a_head_that_is_sent() -> None:
    method, data = FedAvg(linear(bias=False), lr=0.1, engine="stacked"), blobs()
    fit(method, data, 1)
    received, sent, _ = small_update(method, 0, torch.tensor([0]))
    assert set(exact(method, gradient_of(method, received, sent), Pixels.of(data.federation))) == {"rank_one"}
    personal = FedPer(mlp(), lr=0.1, engine="stacked")
    fit(personal, blobs(), 1)
    received, sent, _ = small_update(personal, 0, torch.tensor([0]))
    assert labels_of(personal, gradient_of(personal, received, sent), 1) is None


class Squared(LossNet):
    """A net whose loss is not the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, batch: Any) -> Tensor:
        x, y = batch if isinstance(batch, tuple) else (batch, None)
        scores = self.net(x).softmax(1)
        return scores if y is None else (scores - (y[:, None] == torch.arange(4)).to(x)).square().sum(1).mean()


def test_gradients_of_a_loss_of_the_nets_own_are_matched() -> None:
    method, data = FedAvg(Squared(), lr=0.1, engine="stacked"), blobs()
    fit(method, data, 1)
    rows, pixels = data.federation.train[1][:2], Pixels.of(data.federation)
    received, sent, _ = small_update(method, 1, rows)
    found = Matching(steps=1, variation=0.0).descend(
        lambda state, x, y: method.batch_loss(state, x, y, training=False)[0],
        {**method.server_state(), **received},
        gradient_of(method, received, sent),
        data.federation.targets[rows],
        pixels.of_rows(rows).double(),
        lambda images: pixels.to_net(images, torch.float64),
        LocalSteps(),
        1,
    )
    assert found.distance < 1e-9


@pytest.mark.parametrize("kind", [FedAvg, SCAFFOLD, WAFFLe, Local])
def test_callback_on_images(kind: type[FederatedModule], tmp_path: Path) -> None:
    def run(*callbacks: Any) -> FederatedModule:
        torch.manual_seed(0)
        options: dict[str, Any] = {"factors": {"fc1": 6}, "epochs": 2} if kind is WAFFLe else {}
        method = kind(MLP(SIDE * SIDE, (12,), 3, bias=True), lr=0.01, engine="stacked", **options)
        fit(method, stripes(), 2, callbacks=list(callbacks))
        return method

    callback = GradientLeakageCallback(steps=150 if kind is FedAvg else 10, clients=1, folder=str(tmp_path))
    attacked = run(callback)
    assert largest_difference(weights(attacked), weights(run())) == 0.0
    report = callback.report
    assert report is not None
    if kind is Local:
        assert report.rows == []
        assert "Nothing crossed the wire" in (tmp_path / "attack_leakage.md").read_text()
        return
    best = report.strongest(view="server")
    assert best is not None
    assert set(report.floor()) == {"grey", "mean"}
    assert [one for one in report.ways() if one["view"] == "baseline"] == []
    if kind is FedAvg:
        assert best["variant"] == "analytic"
        assert best["psnr"] > 100
        assert best["label_acc"] == 1.0
        (matched,) = report.select(view="server", variant="matching")
        assert matched["psnr"] > 25
        assert {row["psnr"] > 50 for row in report.select(view="outsider")} == {False}
    if kind is WAFFLe:
        assert {"ones", "prior_mean"} <= {row["assumption"] for row in report.select(view="server")}
        assert report.select(view="server", variant="rank_one")  # not exact, as no pixel is black or white
    if kind is FedAvg:
        shot = max(callback.images, key=lambda one: float(psnr(one.images, one.originals)))
        torch.testing.assert_close(shot.images.float(), shot.originals, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("kind", [FedAvg, FedPer, WAFFLe, PFedMe])
def test_no_method_hides_a_single_image_from_the_server(
    kind: type[FederatedModule], local_steps: int, tmp_path: Path
) -> None:
    """No bias, a head or factors kept at home, several steps: the first layer's update is an outer product."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"factors": {"fc1": 6}, "epochs": 2} if kind is WAFFLe else {}
    method = kind(MLP(SIDE * SIDE, (12,), 3), lr=0.01, engine="stacked", **options)
    callback = GradientLeakageCallback(
        ["outsider", "server"], steps=5, clients=1, local_steps=local_steps, folder=str(tmp_path)
    )
    fit(method, spots(), 1, callbacks=[callback])
    assert callback.report is not None
    best = callback.report.strongest(view="server")
    assert best is not None
    assert best["variant"] == "rank_one"
    assert best["psnr"] > 100


def test_an_attack_that_is_no_better_than_grey_says_so(tmp_path: Path) -> None:
    method = FedAvg(MLP(SIDE * SIDE, (12,), 3), lr=0.01, engine="stacked")
    callback = GradientLeakageCallback(["server"], batch=8, steps=1, variation=0.0, clients=1, folder=str(tmp_path))
    fit(method, stripes(), 1, callbacks=[callback])
    assert "No attack of **server** is better than the baseline" in (tmp_path / "attack_leakage.md").read_text()


def test_bad_settings_are_refused() -> None:
    with pytest.raises(FederationError, match="batch must be 1 or more, not 0"):
        GradientLeakageCallback(batch=0)
    every = WeightErosion(mlp(), agent_of_interest="all")
    with pytest.raises(FederationError, match=r"agent_of_interest=all .*: attack a run for one agent"):
        fit(every, blobs(), rounds=1, callbacks=[GradientLeakageCallback()])


def test_noise_of_the_clients_is_on_what_they_are_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="opacus is not installed: pip install '.[privacy]'")
    found = []
    for noise in (0.0, 100.0):
        torch.manual_seed(0)
        method = FedAvg(MLP(SIDE * SIDE, (12,), 3, bias=True), lr=0.01, engine="stacked")
        callback = GradientLeakageCallback(["server"], steps=1, clients=1, folder=str(tmp_path))
        fit(method, stripes(), 1, callbacks=[DifferentialPrivacyCallback(1.0, noise, "local"), callback])
        assert callback.report is not None
        (row,) = callback.report.select(variant="analytic")
        found.append(row["psnr"])
    assert found[0] > 100
    assert found[1] < 30
