"""LiRA and RMIA on an ordinary classifier of Digits, beside plain loops of the papers' formulas and ART's black box.

    python benchmarks/membership.py --shadows 16

Each of some shadows is trained on a random half of all samples. ``plain`` is written out here, sample by sample, with
SciPy's Gaussians; ART's attack is taught by one shadow's answers. ART is compared where it is installed.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import norm
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fl_lightning.metrics import attack_auroc, auroc_interval, tpr_at_fpr
from fl_lightning.privacy.inference import Answers, answers_of
from fl_lightning.privacy.scores import lira_offline, lira_online, loss_scores, rmia
from fl_lightning.sheet import markdown_head, markdown_row

OFFSET = 0.3


def fitted(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """A perceptron that knows its samples well."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(25):
        for rows in torch.split(torch.randperm(len(x)), 32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval().requires_grad_(False)


def asked(model: nn.Module, x: Tensor, y: Tensor) -> Answers:
    """Answers of a model."""
    return answers_of(model(x).double(), y)


def plain_lira(target: Tensor, odds: Tensor, inside: Tensor, online: bool) -> Tensor:
    """Of every sample by itself, each with a variance of its own."""
    found = []
    for k in range(len(target)):
        value = float(target[k])
        sides = [odds[mask, k].numpy() for mask in (inside[:, k], ~inside[:, k])]
        near, far = (norm(side.mean(), max(side.std(ddof=1), 1e-4)) for side in sides)
        found.append(near.logpdf(value) - far.logpdf(value) if online else -far.logsf(value))
    return torch.tensor(found, dtype=torch.float64)


def plain_rmia(p: Tensor, q: Tensor, inside: Tensor, others: Tensor, theirs: Tensor) -> Tensor:
    """Sample by sample, other by other, online."""
    found = []
    population = others / (((1 + OFFSET) * theirs.mean(0) + 1 - OFFSET) / 2)
    for k in range(len(p)):
        mean = (q[inside[:, k], k].mean() + q[~inside[:, k], k].mean()) / 2
        found.append(np.mean([float(p[k] / mean / ratio) >= 1 for ratio in population]))
    return torch.tensor(found, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shadows", type=int, default=16)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    data = load_digits()
    x, y = torch.tensor(data.data).float() / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    rows, rest = order[:1000], order[1000:1700]
    x_own, y_own, flags = x[rows], y[rows], torch.arange(1000) < 500
    target_model = fitted(x_own[flags], y_own[flags], 0)
    inside = torch.stack([torch.randperm(1000) < 500 for _ in range(arguments.shadows // 2)])
    inside = torch.cat((inside, ~inside))
    shadows = [fitted(x_own[mask], y_own[mask], 1 + number) for number, mask in enumerate(inside)]
    target, known = asked(target_model, x_own, y_own), [asked(one, x_own, y_own) for one in shadows]
    odds, chances = torch.stack([one.confidence for one in known]), torch.stack([-one.loss for one in known]).exp()
    others = (-asked(target_model, x[rest], y[rest]).loss).exp()
    theirs = torch.stack([-asked(one, x[rest], y[rest]).loss for one in shadows]).exp()
    chance = (-target.loss).exp()
    scores = {
        "loss": loss_scores(target.loss),
        "LiRA offline": lira_offline(target.confidence, odds, ~inside),
        "LiRA offline, plain": plain_lira(target.confidence, odds, inside, online=False),
        "LiRA online": lira_online(target.confidence, odds, inside, ~inside),
        "LiRA online, plain": plain_lira(target.confidence, odds, inside, online=True),
        "RMIA online": rmia(chance, chances, ~inside, others, theirs, inside),
        "RMIA online, plain": plain_rmia(chance, chances, inside, others, theirs),
        **art(target_model, shadows[0], inside[0], x_own, y_own),
    }
    print(markdown_head(["attack", "AUROC (95%)", "members found at 1% false alarms"]))
    for name, value in scores.items():
        low, high = auroc_interval(value, flags)
        found = float(tpr_at_fpr(value, flags, 0.01))
        auroc = f"{float(attack_auroc(value, flags)):.3f} ({low:.3f} to {high:.3f})"
        print(markdown_row([name, auroc, f"{100 * found:.1f}"]))


def art(target: nn.Module, shadow: nn.Module, inside: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """ART's black-box attacks, taught by a shadow."""
    try:
        from art.attacks.inference.membership_inference import MembershipInferenceBlackBox
        from art.estimators.classification import PyTorchClassifier
    except ImportError:
        return {}
    found = {}
    for kind in ("loss", "prediction"):
        teacher, pupil = (PyTorchClassifier(one, nn.CrossEntropyLoss(), (64,), 10) for one in (shadow, target))
        attack = MembershipInferenceBlackBox(teacher, input_type=kind, attack_model_type="gb")
        parts = [(x[mask].numpy(), y[mask].numpy()) for mask in (inside, ~inside)]
        attack.fit(*parts[0], *parts[1])
        attack._estimator = pupil
        answer = attack.infer(x.numpy(), y.numpy(), probabilities=True)
        found[f"ART black box, gb on {kind}"] = torch.tensor(np.asarray(answer).reshape(len(x), -1)[:, -1]).double()
    return found


if __name__ == "__main__":
    main()
