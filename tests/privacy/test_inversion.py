"""Model inversion: PSNR identities, a linear model by hand, and the callback's report and pictures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning.callbacks import ModelInversionCallback, inversion
from fl_lightning.callbacks.attacks import ALL_VIEWS
from fl_lightning.callbacks.inversion import TRIED
from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg
from fl_lightning.metrics import psnr, ssim, total_variation
from fl_lightning.nets import MLP
from fl_lightning.privacy.inversion import Inversion
from fl_lightning.privacy.judge import Judge
from fl_lightning.privacy.pixels import Pixels
from fl_lightning.privacy.shadows import train_shadows
from tests.support import fit, largest_difference, trainer, weights
from tests.support.privacy import SIDE, stripes


def test_psnr_identities() -> None:
    x = torch.rand(3, 1, 8, 8)
    assert psnr(x, x).tolist() == [math.inf] * 3
    torch.testing.assert_close(psnr(x + 0.1, x), torch.full((3,), 20.0).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(psnr(10 * x, 10 * x + 1, 10.0), torch.full((3,), 20.0).double(), rtol=1e-5, atol=0)
    assert torch.equal(psnr(x, x.flip(0)), psnr(x.flip(0), x))
    images = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(ssim(images, images), torch.ones(2), rtol=1e-5, atol=1e-6)
    assert bool((ssim(images, 1 - images) < 0.5).all())
    assert ssim(torch.rand(2, 5), torch.rand(2, 5)).isnan().all()
    assert float(total_variation(torch.ones(1, 1, 4, 4))) == 0.0


def test_pixels_there_and_back() -> None:
    pixels = Pixels.of(stripes().federation)
    images = pixels.of_rows(torch.arange(5))
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    inputs = pixels.federation.features(pixels.federation.inputs[:5], torch.float32)
    torch.testing.assert_close(pixels.to_net(images, torch.float32), inputs)
    torch.testing.assert_close(pixels.from_net(inputs), images, rtol=1e-5, atol=1e-6)
    tokens = TensorFederation(torch.ones(6, 3).long(), torch.arange(6) % 2, train=[[0, 1]], test=[[2]]).federation
    with pytest.raises(FederationError, match="token numbers, not images"):
        Pixels.of(tokens)


def test_a_linear_model_shows_its_classes(tmp_path: Path) -> None:
    """Softmax regression on stripes: the reconstruction is brighter where the class is, and the judge sees it."""
    torch.manual_seed(0)
    callback = ModelInversionCallback(steps=120, starts=2, judge_epochs=8, judge=str(tmp_path / "judge.pt"))
    method = FedAvg(MLP(SIDE * SIDE, (), 3), lr=0.01, epochs=5, engine="stacked")
    logger = TensorBoardLogger(tmp_path, "tb")
    fit(method, stripes(), 3, callbacks=[callback], logger=logger, precision="32-true")
    report = callback.report
    assert report is not None
    assert report.notes["accuracy of the judging classifier"] > 0.95
    best = report.strongest(view="outsider")
    assert best is not None
    assert best["attack_acc"] == 1.0
    assert best["psnr"] > 5
    assert -1 <= best["ssim"] <= 1
    images = next(one for one in callback.images if one.view == "outsider")
    assert images.images.shape == (3, 2, 1, SIDE, SIDE)
    above, below = images.images[0, :, 0, : SIDE // 2].mean(), images.images[0, :, 0, SIDE // 2 :].mean()
    assert float(above) > float(below) + 0.1
    by_hand = psnr(images.images.flatten(0, 1), images.means.repeat_interleave(2, 0)).mean()
    (row,) = report.select(view="outsider", client=images.client)
    assert row["psnr"] == pytest.approx(float(by_hand))
    events = EventAccumulator(logger.log_dir).Reload()
    assert set(events.Tags()["images"]) == {f"inversion/{view}" for view in report.views()}
    assert (Path(logger.log_dir) / "inversion.pt").exists()
    assert callback.run_metrics()["inversion_judge_acc"] > 95
    grey = [row["psnr"] for row in report.baselines if row["variant"] == "grey"]
    assert callback.run_metrics()["inversion_psnr/baseline/grey"] == pytest.approx(sum(grey) / len(grey))
    again = Judge.trained(method.federation, seed=5, path=str(tmp_path / "judge.pt"))
    assert 100 * again.accuracy == callback.run_metrics()["inversion_judge_acc"]
    other = replace(method.federation, targets=method.federation.targets.flip(0))
    with pytest.raises(FederationError, match="holds no classifier for this data"):
        Judge.trained(other, seed=5, path=str(tmp_path / "judge.pt"))
    (tmp_path / "other.pt").write_text("no")
    with pytest.raises(FederationError, match="holds no classifier for this data"):
        Judge.trained(method.federation, seed=5, path=str(tmp_path / "other.pt"))


def softmax_regression() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """An ordinary model of the stripes, trained by plain PyTorch, and its pixels and labels."""
    federation = stripes().federation
    x, y = Pixels.of(federation).of_rows(torch.arange(120)), federation.targets[:120]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval().requires_grad_(False), x, y


def test_an_ordinary_model_is_inverted_as_well_as_by_others() -> None:
    """Gradient descent on the plain loss (Fredrikson et al., 2015), written out, with as many steps, shows less."""
    model, x, y = softmax_regression()
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    found = Inversion(steps=150, starts=1).reconstruct([model], [0, 1, 2], (1, SIDE, SIDE), np.random.default_rng(0))
    assert found.shape == (3, 1, 1, SIDE, SIDE)
    plain = torch.zeros(3, 1, SIDE, SIDE).requires_grad_()
    for _ in range(150):
        cost = 1 - model(plain).softmax(1).diagonal().sum()
        (gradient,) = torch.autograd.grad(cost, plain)
        plain = (plain - 0.1 * gradient).clamp(0, 1).detach().requires_grad_()
    ours, theirs = psnr(found[:, 0], means), psnr(plain, means)
    assert float(ours.mean()) > float(theirs.mean())
    assert model(found[:, 0]).argmax(1).tolist() == [0, 1, 2]


def test_inversion_is_as_strong_as_the_toolbox() -> None:
    pytest.importorskip("art", reason="adversarial-robustness-toolbox is not installed: pip install '.[oracle]'")
    from art.attacks.inference.model_inversion import MIFace
    from art.estimators.classification import PyTorchClassifier

    model, x, y = softmax_regression()
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    estimator = PyTorchClassifier(model, torch.nn.CrossEntropyLoss(), (1, SIDE, SIDE), 3, clip_values=(0.0, 1.0))
    theirs = MIFace(estimator, max_iter=150, threshold=1.0, verbose=False).infer(None, np.arange(3))
    ours = Inversion(steps=150, starts=1).reconstruct([model], [0, 1, 2], (1, SIDE, SIDE), np.random.default_rng(0))
    assert float(psnr(ours[:, 0], means).mean()) > float(psnr(torch.from_numpy(theirs), means).mean())


def test_the_prior_is_chosen_on_a_federation_of_the_adversarys_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    callback = ModelInversionCallback(["outsider"], 40, 1, variation=None, judge_epochs=1, folder=str(tmp_path))
    method = FedAvg(MLP(SIDE * SIDE, (), 3), lr=0.01, epochs=2, engine="stacked")
    fit(method, stripes(600), 2, callbacks=[callback], precision="32-true")
    assert callback.report is not None
    chosen = callback.report.notes["weight of the total variation"]
    assert chosen in TRIED
    psnrs = {}
    for weight in TRIED:
        torch.manual_seed(0)
        other = ModelInversionCallback(["outsider"], 40, 1, variation=weight, judge_epochs=1, folder=str(tmp_path))
        fresh = FedAvg(MLP(SIDE * SIDE, (), 3), lr=0.01, epochs=2, engine="stacked")
        fit(fresh, stripes(600), 2, callbacks=[other], precision="32-true")
        psnrs[weight] = other.report.strongest(view="outsider")["psnr"]  # type: ignore[union-attr, index]
    assert psnrs[chosen] > max(psnrs.values()) - 0.5
    assert psnrs[chosen] > min(psnrs.values()) + 0.5
    blind = trainer(callbacks=[ModelInversionCallback(["outsider"], 5, 1, variation=None)], precision="32-true")
    with pytest.raises(FederationError, match=r"initial weights of the run are unknown.*a number as variation"):
        blind.test(method, datamodule=stripes(), verbose=False)


def test_the_adversarys_federation_trains_as_many_clients_in_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        shadows = train_shadows(*arguments, **options)
        messages.append(sum(len(sent) for sent in shadows[0].run.wire.sent.values()))
        return shadows

    monkeypatch.setattr(inversion, "train_shadows", counted)
    callback = ModelInversionCallback(["outsider"], 1, 1, variation=None, judge_epochs=1, folder=str(tmp_path))
    method = FedAvg(MLP(SIDE * SIDE, (), 3), lr=0.01, engine="stacked")
    data = stripes(600)
    data.fraction = 0.5
    fit(method, data, 3, callbacks=[callback], precision="32-true")
    assert messages == [3], "one of two clients in each of three rounds"


def test_own_labellings_are_translated_and_nothing_changes(tmp_path: Path) -> None:
    """A client whose labels are permuted is attacked under its own, and judged under those of the data."""

    def run(*callbacks: ModelInversionCallback) -> FedAvg:
        torch.manual_seed(0)
        method = FedAvg(MLP(SIDE * SIDE, (), 3), lr=0.01, epochs=5, engine="stacked")
        fit(method, stripes(maps=True), 2, callbacks=list(callbacks), precision="32-true")
        return method

    callback = ModelInversionCallback(["outsider"], 120, 1, judge_epochs=8, folder=str(tmp_path))
    attacked, plain = run(callback), run()
    assert largest_difference(weights(attacked), weights(plain)) == 0.0
    assert callback.report is not None
    assert [row["attack_acc"] for row in callback.report.rows] == [1.0, 1.0]


def test_after_a_test(tmp_path: Path) -> None:
    torch.manual_seed(0)
    method = FedAvg(MLP(SIDE * SIDE, (), 3), lr=0.01, engine="stacked")
    fit(method, stripes(), 1, precision="32-true")
    callback = ModelInversionCallback(["outsider"], 5, 1, judge_epochs=1, clients=1, folder=str(tmp_path))
    trainer(callbacks=[callback], precision="32-true").test(method, datamodule=stripes(), verbose=False)
    assert (tmp_path / "attack_inversion.md").exists()
    with pytest.raises(FederationError, match="steps must be 1 or more, not 0"):
        ModelInversionCallback(steps=0)


def test_adversaries_with_the_same_model_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg's client has two models, its own and the global one: two reconstructions, whoever asks."""
    made: list[int] = []
    reconstruct = Inversion.reconstruct
    monkeypatch.setattr(Inversion, "reconstruct", lambda *args: (made.append(1), reconstruct(*args))[1])

    def rows(*views: str) -> dict[tuple[str, str], float]:
        torch.manual_seed(0)
        callback = ModelInversionCallback(views, 20, 2, judge_epochs=1, clients=1, memory=1, folder=str(tmp_path))
        method = FedAvg(MLP(SIDE * SIDE, (), 3), lr=0.01, engine="stacked")
        fit(method, stripes(), 1, callbacks=[callback], precision="32-true")
        assert callback.report is not None
        return {(row["view"], row["assumption"]): row["psnr"] for row in callback.report.rows}

    together = rows(*ALL_VIEWS)
    assert len(made) == 2
    assert len(together) == 5
    alone = {key: value for view in ALL_VIEWS for key, value in rows(view).items()}
    assert together == alone
    assert len(set(together.values())) == 2
