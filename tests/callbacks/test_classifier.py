"""Attacks on a stock LightningModule: what it learnt by heart is found, what it did not learn is not."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.callbacks import ClassifierAttackCallback
from fl_lightning.errors import FederationError
from fl_lightning.privacy.gradients import Matching
from fl_lightning.privacy.inversion import Inversion


class Stock(L.LightningModule):
    def __init__(self, rate: float = 5e-3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 64, bias=False), nn.ReLU(), nn.Linear(64, 4))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.rate)


def samples() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Noise with random labels, that can only be learnt by heart; some pixels are black or white."""
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.rand(200, 1, 6, 6, generator=generator) - 0.5).clamp(0, 1)
    y = torch.randint(4, (200,), generator=generator)
    return (x[:100], y[:100]), (x[100:], y[100:])


def fitted(callback: ClassifierAttackCallback | None, rate: float = 5e-3, epochs: int = 25) -> Stock:
    module, (members, _) = Stock(rate), samples()
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
    )
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(TensorDataset(*members), 20, shuffle=True))
    return module


def test_what_is_known_by_heart_is_found(tmp_path: Path) -> None:
    callback = ClassifierAttackCallback(
        *samples(), Stock, shadows=4, epochs=25, batch_size=20, matching=Matching(20), folder=str(tmp_path)
    )
    attacked, plain = fitted(callback), fitted(None)
    assert all(torch.equal(a, b) for a, b in zip(attacked.parameters(), plain.parameters(), strict=True))
    for name in ("loss", "lira", "lira_online", "rmia", "rmia_online"):
        assert callback.scores[name]["auroc"] > 0.9, name
        assert callback.scores[name]["auroc_low"] > 0.8
    assert callback.scores["leakage"]["rank_one"] > 100
    assert callback.scores["leakage"]["matching"] > callback.scores["leakage"]["grey"]
    assert json.loads((tmp_path / "attack_classifier.json").read_text())["loss"]["auroc"] > 0.9
    assert {path.name for path in tmp_path.glob("*.png")} == {"attack_membership.png", "attack_leakage.png"}


def test_what_learnt_nothing_gives_chance(tmp_path: Path) -> None:
    callback = ClassifierAttackCallback(
        *samples(), lambda: Stock(0.0), shadows=2, epochs=1, matching=None, folder=str(tmp_path)
    )
    fitted(callback, 0.0, 1)
    for name in ("loss", "rmia", "rmia_online"):
        found = callback.scores[name]
        assert found["auroc_low"] - 1e-9 <= 0.5 <= found["auroc_high"] + 1e-9, name
    assert "leakage" not in callback.scores


def blobs(shares: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Classes that are bright in a row of their own, in these shares."""
    generator = torch.Generator().manual_seed(1)
    y = torch.multinomial(torch.tensor(shares), 200, replacement=True, generator=generator)
    x = 0.3 * torch.rand(200, 1, 6, 6, generator=generator)
    x[torch.arange(200), 0, y] += 0.6
    return x, y


@pytest.mark.parametrize("much", [True, False])
def test_classes_are_reconstructed_and_their_shares_inferred(much: bool, tmp_path: Path) -> None:
    """The training data has 70% or 10% of class 0."""
    members, others = blobs((0.7, 0.1, 0.1, 0.1) if much else (0.1, 0.3, 0.3, 0.3)), blobs((0.4, 0.2, 0.2, 0.2))
    callback = ClassifierAttackCallback(
        members,
        others,
        lambda: Stock(),
        shadows=6,
        epochs=4,
        matching=None,
        inversion=Inversion(steps=150, starts=2, variation=0.1),
        holds=lambda labels: bool((labels == 0).double().mean() >= 0.4),
        property_size=60,
        folder=str(tmp_path),
    )
    module = Stock()
    trainer = L.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, DataLoader(TensorDataset(*members), 20, shuffle=True))
    callback._strike(trainer, module)
    assert callback.scores["inversion"]["same"] == 1.0
    assert callback.scores["inversion"]["psnr"] > 5
    found = callback.scores["property"]
    assert found["truth"] == found["answer"] == float(much)
    assert found["shadow_auroc"] > 0.8
    assert (tmp_path / "attack_inversion.png").exists()


def test_bad_settings_are_refused() -> None:
    with pytest.raises(FederationError, match="trains shadows: pass make"):
        ClassifierAttackCallback(*samples(), holds=lambda labels: True)
    with pytest.raises(FederationError, match="shadows must be an even number of 2 or more, not 3"):
        ClassifierAttackCallback(*samples(), shadows=3)
    with pytest.raises(FederationError, match="needs members and non-members"):
        ClassifierAttackCallback(samples()[0], (torch.zeros(0, 36), torch.zeros(0)))
