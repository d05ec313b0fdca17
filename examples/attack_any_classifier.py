"""Attacks on an ordinary LightningModule without any federation: gradient leakage and membership inference.

python examples/attack_any_classifier.py
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.metrics import attack_auroc, auroc_interval, psnr
from fl_lightning.privacy.gradients import in_range, rank_one
from fl_lightning.privacy.scores import lira_offline, lira_online, loss_scores

SHADOWS = 4


class Classifier(L.LightningModule):
    """An ordinary classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Scores by class."""
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 5e-3)


def fitted(x: Tensor, y: Tensor) -> Classifier:
    """A classifier that overfits these samples."""
    model = Classifier()
    trainer = L.Trainer(
        max_epochs=15,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), 32, shuffle=True))
    return model.eval()


@torch.no_grad()
def log_odds(model: Classifier, x: Tensor, y: Tensor) -> Tensor:
    """The model's confidence in the true classes."""
    p = model(x).double().log_softmax(1)
    own = p.gather(1, y[:, None])[:, 0]
    return own - p.scatter(1, y[:, None], -torch.inf).logsumexp(1)


def main() -> None:
    """Run both attacks."""
    L.seed_everything(0, verbose=False)
    data = load_digits()
    x, y = torch.tensor(data.data).float() / 16, torch.tensor(data.target)
    order = torch.randperm(len(x))
    members, rest = order[:300], order[300:600]
    model = fitted(x[members], y[members])

    # One gradient of one image: it is recovered although the first layer has no bias.
    image = x[rest[:1]]
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(image), y[rest[:1]]), model.net[0].weight)
    direction = rank_one(gradient).direction
    found = in_range(direction, torch.tensor(0.0), torch.tensor(1.0))[:1]
    print(f"one image from one gradient: {float(psnr(found, image)):.0f} dB")

    # Membership, with shadow models that are each trained on half of the samples in question.
    rows = torch.cat((members, rest))
    inside = torch.stack([torch.randperm(len(rows)) < len(rows) // 2 for _ in range(SHADOWS // 2)])
    inside = torch.cat((inside, ~inside))
    shadows = torch.stack([log_odds(fitted(x[rows[own]], y[rows[own]]), x[rows], y[rows]) for own in inside])
    target, flags = log_odds(model, x[rows], y[rows]), torch.arange(len(rows)) < len(members)
    scores = {
        "loss": loss_scores(F.softplus(-target)),
        "LiRA offline": lira_offline(target, shadows, ~inside),
        "LiRA online": lira_online(target, shadows, inside, ~inside),
    }
    for name, score in scores.items():
        low, high = auroc_interval(score, flags)
        print(f"{name}: AUROC {float(attack_auroc(score, flags)):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
