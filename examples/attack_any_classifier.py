"""Attacks on an ordinary LightningModule without any federation.

Gradient leakage, membership inference, model inversion, property inference, and a batch behind a crafted layer.

python examples/attack_any_classifier.py
"""

from __future__ import annotations

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.metrics import attack_auroc, auroc_interval, psnr
from fl_lightning.privacy.gradients import in_range, rank_one
from fl_lightning.privacy.imprint import Imprint, gaussian_thresholds, read
from fl_lightning.privacy.inversion import Inversion
from fl_lightning.privacy.properties import Property, answer_profile, draw_clients, infer_property
from fl_lightning.privacy.scores import lira_offline, lira_online, loss_scores

SHADOWS = 4
#: Shadows with a property, and as many without.
PROPERTY_SHADOWS = 8


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


@torch.no_grad()
def answers(model: Classifier, x: Tensor, y: Tensor) -> Tensor:
    """Answers of a model for samples, by their classes."""
    return answer_profile(model(x), y, 10)


def main() -> None:
    """Run all attacks."""
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
    models = [fitted(x[rows[own]], y[rows[own]]) for own in inside]
    judge, shadows = models[0], torch.stack([log_odds(one, x[rows], y[rows]) for one in models])
    target, flags = log_odds(model, x[rows], y[rows]), torch.arange(len(rows)) < len(members)
    scores = {
        "loss": loss_scores(F.softplus(-target)),
        "LiRA offline": lira_offline(target, shadows, ~inside),
        "LiRA online": lira_online(target, shadows, inside, ~inside),
    }
    for name, score in scores.items():
        low, high = auroc_interval(score, flags)
        print(f"{name}: AUROC {float(attack_auroc(score, flags)):.3f} ({low:.3f} to {high:.3f})")

    # What the classes look like to the model, as another model sees it.
    images = Inversion(steps=200, starts=1, variation=0.1).reconstruct(
        [lambda images: model(images.flatten(1))], range(10), (1, 8, 8), np.random.default_rng(0)
    )
    seen = judge(images.flatten(1)).argmax(1) == torch.arange(10)
    print(f"model inversion: another model sees the class in {int(seen.sum())} of 10 images")

    # Was at least a fifth of the training data of class 3? Shadows answer for the adversary's own samples.
    often: Property = lambda labels: bool((labels == 3).double().mean() >= 0.2)  # noqa: E731
    sides = draw_clients(y[rest], 10, often, PROPERTY_SHADOWS, 100, np.random.default_rng(0))
    made = torch.stack(
        [answers(fitted(x[rest[own]], y[rest[own]]), x[rest], y[rest]) for side in sides for own in side]
    )
    target = answers(model, x[rest], y[rest])[None]
    for name, one in infer_property(made[:PROPERTY_SHADOWS], made[PROPERTY_SHADOWS:], target).items():
        told, truth = bool(one.scores[0] >= one.line), often(y[members])
        print(f"property by {name}: {told}, in truth {truth} (AUROC on shadows {one.shadow_auroc:.2f})")

    # A malicious server puts a layer in front of the model, and reads a batch out of one gradient.
    batch = rest[:16]
    front = Imprint(64, gaussian_thresholds(x[members], 200))
    loss = F.cross_entropy(model(front(x[batch])), y[batch])
    read_back = read(*torch.autograd.grad(loss, [front.weight, front.bias]))
    nearest = read_back[torch.cdist(x[batch], read_back).argmin(1)]
    print(f"crafted layer: {int((psnr(nearest, x[batch]) >= 40).sum())} of 16 images at 40 dB or more")


if __name__ == "__main__":
    main()
