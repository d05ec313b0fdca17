"""Our attacks beside those of breaching, Privacy Meter and ART, on the same models and samples of Digits.

    python benchmarks/outside.py --steps 2000

A package that is not installed is left out. ``Matching`` and breaching's ``invertinggradients`` take as many steps from
one start each; labels are known to both. Privacy Meter 1.0.1 has no LiRA and no RMIA, which ``membership.py`` compares
with plain loops of the papers' formulas; its population and reference attacks get the same shadows here. A judge is a
classifier that was trained apart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.nn.functional as F
from membership import asked, fitted
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fl_lightning.metrics import attack_auroc, psnr
from fl_lightning.privacy.gradients import Matching, analytic, model_loss
from fl_lightning.privacy.imprint import Imprint, gaussian_thresholds, read
from fl_lightning.privacy.inversion import Inversion
from fl_lightning.privacy.scores import lira_offline, loss_scores, rmia

SHAPE = (1, 8, 8)
#: Images that are searched, and samples of a batch that is imprinted.
IMAGES, BATCH, BINS = 5, 32, 200
EXACT = 150.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing of what packages print."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def quality(images: Tensor, originals: Tensor) -> float:
    """Mean PSNR in dB, of at most 150."""
    return float(psnr(images.double().clamp(0, 1), originals.double()).clamp(max=EXACT).mean())


def line(kind: str, name: str, score: float, unit: str) -> None:
    """A row of the table."""
    print(f"| {kind} | {name} | {score:.{3 if unit == 'AUROC' else 1}f} {unit} |", flush=True)


def convolutional(channels: int = 1) -> nn.Module:
    """A net of two convolutions, untrained."""
    torch.manual_seed(0)
    first = [nn.Conv2d(channels, 16, 3, padding=1), nn.Sigmoid()]
    return nn.Sequential(*first, nn.Conv2d(16, 16, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(1024, 10))


def dense() -> nn.Module:
    """A perceptron, untrained."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def gradients_of(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Gradients of a model's parameters."""
    return [*torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])]


def breached(
    name: str, model: nn.Module, shared: tuple[list[Tensor], Tensor], shape: tuple[int, ...], **options: Any
) -> Tensor:
    """Images as one of breaching's attacks finds them."""
    import breaching

    gradients, y = shared
    config = breaching.get_attack_config(name)
    for key in options.keys() - {"secrets", "scale"}:
        config.optim[key] = options[key]
    setup = {"dtype": torch.float, "device": torch.device("cpu")}
    attacker = breaching.attacks.prepare_attack(model, nn.CrossEntropyLoss(), config, setup)
    channels = shape[0]
    mean, std = options.get("scale", (0.0, 1.0))
    data = SimpleNamespace(shape=shape, modality="vision", mean=[mean] * channels, std=[std] * channels, classes=10)
    payload = [{"parameters": [p.detach() for p in model.parameters()], "buffers": [], "metadata": data}]
    told = {"num_data_points": len(y), "labels": y, "local_hyperparams": None, "num_users": 1}
    sent = [{"gradients": [g.detach() for g in gradients], "buffers": None, "metadata": told}]
    found, _ = attacker.reconstruct(payload, sent, options.get("secrets", {}), dryrun=False)
    images: Tensor = found["data"]
    return images.detach().view(-1, *shape)


def inverted(x: Tensor, y: Tensor, steps: int, outside: bool) -> None:
    """Gradient inversion: one image from one gradient; breaching's total variation takes three channels."""
    colour = (3, *SHAPE[1:])
    for kind, model, theirs, shape in (
        ("gradient of a convolutional net", convolutional(3), "invertinggradients", colour),
        ("gradient of a dense net", dense(), "analytic", SHAPE),
    ):
        ours, others = [], []
        length = {} if theirs == "analytic" else {"max_iterations": steps, "callback": steps}
        images = x[:IMAGES].expand(-1, *shape)
        state = {name: value.detach() for name, value in model.named_parameters()}
        for k in range(IMAGES):
            image, label = images[k : k + 1], y[k : k + 1]
            gradients = gradients_of(model, image, label)
            if theirs == "analytic":
                found = analytic(gradients[0], gradients[1])
                assert found is not None
                ours.append(quality(found.view(1, *shape), image))
            else:
                change = dict(zip(state, gradients, strict=True))
                match = Matching(steps).search(
                    model_loss(model), state, change, label, image.shape, np.random.default_rng(k)
                )
                ours.append(quality(match.images, image))
            if outside:
                with quiet():
                    torch.manual_seed(k)
                    answer = breached(theirs, model, (gradients, label), shape, **length)
                    others.append(quality(answer, image))
        line(kind, "grey image", quality(torch.full_like(images, 0.5), images), "dB")
        line(kind, "`analytic`" if theirs == "analytic" else "`Matching`", float(np.mean(ours)), "dB")
        if outside:
            line(kind, f"breaching, `{theirs}`", float(np.mean(others)), "dB")


def imprinted(x: Tensor, y: Tensor, own: Tensor, outside: bool) -> None:
    """A crafting server: a batch behind an imprint layer, for which breaching has a block and a reading of its own."""
    kind = f"imprint, batch of {BATCH}, {BINS} bins"
    x, y = x[:BATCH], y[:BATCH]
    front = Imprint(64, gaussian_thresholds(own, BINS))
    model = nn.Sequential(front, convolutional())
    weight, bias = gradients_of(model, x, y)[:2]
    found = read(weight, bias).view(-1, *SHAPE)
    line(kind, "Imprint and read", 100 * share(found, x), "% of samples at 40 dB")
    if not outside:
        return
    with quiet():
        import breaching  # noqa: F401 - its configuration speaks
    from breaching.cases.malicious_modifications.imprint import ImprintBlock

    # Its bins are quantiles of a normal distribution of mean 0, so it gets inputs of that scale.
    mean, std = float(own.mean()), float(own.flatten(1).mean(1).std())
    for name, inputs, scale in (("as given", x, (0.0, 1.0)), ("standardised", (x - mean) / std, (mean, std))):
        with quiet():
            block = ImprintBlock(SHAPE, num_bins=BINS, linfunc="avg")
            theirs = nn.Sequential(block, convolutional())
            secrets = {"ImprintBlock": {"weight_idx": 0, "bias_idx": 1, "shape": SHAPE, "structure": block.structure}}
            gradients = gradients_of(theirs, inputs, y)
            images = breached("imprint", theirs, (gradients, y), SHAPE, secrets=secrets, scale=scale)
        images = images if name == "as given" else images * std + mean
        line(kind, f"breaching, imprint, inputs {name}", 100 * share(images, x), "% of samples at 40 dB")


def share(found: Tensor, x: Tensor) -> float:
    """Part of the samples that came out at 40 dB or more."""
    far = torch.cdist(x.flatten(1).double(), found.clamp(0, 1).flatten(1).double())
    near = found.clamp(0, 1)[far.argmin(1)].view_as(x)
    return float((psnr(near.double(), x.double()) >= 40).double().mean())


def members(x: Tensor, y: Tensor, shadows: int, outside: bool) -> None:
    """Membership: our scores and Privacy Meter's, with references that have seen no sample in question."""
    x, flags = x.flatten(1), torch.arange(1000) < 500
    rest_x, rest_y = x[1000:], y[1000:]
    x, y = x[:1000], y[:1000]
    target_model = fitted(x[flags], y[flags], 0)
    drawn = (torch.randperm(len(rest_y), generator=torch.Generator().manual_seed(k))[:500] for k in range(shadows))
    models = [fitted(rest_x[rows], rest_y[rows], 1 + k) for k, rows in enumerate(drawn)]
    target, known = asked(target_model, x, y), [asked(one, x, y) for one in models]
    nobody = torch.ones(shadows, len(y), dtype=torch.bool)
    others = (-asked(target_model, rest_x, rest_y).loss).exp()
    theirs = torch.stack([-asked(one, rest_x, rest_y).loss for one in models]).exp()
    scores = {
        "loss": loss_scores(target.loss),
        "LiRA offline": lira_offline(target.confidence, torch.stack([one.confidence for one in known]), nobody),
        "RMIA offline": rmia(
            (-target.loss).exp(), torch.stack([-one.loss for one in known]).exp(), nobody, others, theirs
        ),
    }
    kind = f"membership, {shadows} references"
    for name, value in scores.items():
        line(kind, name, float(attack_auroc(value, flags)), "AUROC")
    if outside:
        with quiet():
            found = metered(target_model, models, x, y, flags, rest_x, rest_y)
        for name, value in found.items():
            line(kind, f"Privacy Meter, {name}", float(attack_auroc(value, flags)), "AUROC")


def metered(
    target: nn.Module, models: list[nn.Module], x: Tensor, y: Tensor, flags: Tensor, rest_x: Tensor, rest_y: Tensor
) -> dict[str, Tensor]:
    """Scores of Privacy Meter's attacks: the share of its thresholds at which a sample is called a member.

    It imports TensorFlow and Transformers for models of theirs; where they are missing, stubs do, as the model is none.
    """
    for name in ("tensorflow", "transformers"):
        if not installed(name):
            sys.modules[name] = MagicMock()
    from privacy_meter.dataset import Dataset
    from privacy_meter.hypothesis_test import linear_itp_threshold_func
    from privacy_meter.information_source import InformationSource
    from privacy_meter.information_source_signal import ModelLoss
    from privacy_meter.metric import PopulationMetric, ReferenceMetric
    from privacy_meter.model import PytorchModelTensor

    def data(**splits: tuple[Tensor, Tensor]) -> Dataset:
        return Dataset({name: {"x": a, "y": b} for name, (a, b) in splits.items()}, "x", "y")

    def wrapped(one: nn.Module) -> PytorchModelTensor:
        return PytorchModelTensor(one, nn.CrossEntropyLoss(reduction="none"))

    own = InformationSource([wrapped(target)], [data(train=(x[flags], y[flags]), test=(x[~flags], y[~flags]))])
    population = InformationSource([wrapped(target)], [data(train=(rest_x, rest_y), test=(rest_x, rest_y))])
    references = InformationSource([wrapped(one) for one in models], own.datasets)
    found = {}
    for name, kind, source in (
        ("population", PopulationMetric, population),
        ("reference", ReferenceMetric, references),
    ):
        metric = kind(own, source, [ModelLoss()], linear_itp_threshold_func)
        metric.prepare_metric()
        (result,) = metric.run_metric(np.linspace(0, 1, 1001))
        found[name] = torch.from_numpy(np.asarray(result.predicted_labels, dtype=float).mean(0))
    return found


def pictured(x: Tensor, y: Tensor, outside: bool) -> None:
    """Model inversion: the share of images in which a judge sees the class, and PSNR to the class's mean."""
    model, judge = fitted(x[:800].flatten(1), y[:800], 0), fitted(x[800:1600].flatten(1), y[800:1600], 1)
    means = torch.stack([x[:800][y[:800] == c].mean(0) for c in range(10)])
    answer: Callable[[Tensor], Tensor] = lambda images: model(images.flatten(1))  # noqa: E731
    told = {}
    for variation, norm in ((1.0, 1e-4), (0.1, 1e-4), (0.01, 1e-4), (0.1, 0.1)):
        attack = Inversion(starts=1, variation=variation, norm=norm)
        made = attack.reconstruct([answer], range(10), SHAPE, np.random.default_rng(0))
        told[f"`Inversion(variation={variation:g}, norm={norm:g})`"] = made[:, 0]
    if outside:
        from art.attacks.inference.model_inversion import MIFace
        from art.estimators.classification import PyTorchClassifier

        with quiet():
            wrapped = PyTorchClassifier(
                nn.Sequential(nn.Flatten(), model), nn.CrossEntropyLoss(), SHAPE, 10, clip_values=(0, 1)
            )
            faces = MIFace(wrapped, max_iter=1000, window_length=100, threshold=1.0, learning_rate=0.1, verbose=False)
            start = np.full((10, *SHAPE), 0.5, dtype=np.float32)
            told["ART, MIFace"] = torch.from_numpy(faces.infer(start, np.arange(10)))
    for name, found in told.items():
        seen = float((judge(found.flatten(1).float()).argmax(1) == torch.arange(10)).double().mean())
        line("model inversion", name, 100 * seen, f"% seen by the judge, {quality(found, means):.1f} dB to class means")


def installed(name: str) -> bool:
    """Whether a package can be imported."""
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            __import__(name)
    except ImportError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--shadows", type=int, default=16)
    parts = ("gradients", "imprint", "membership", "inversion")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    data = load_digits()
    x, y = torch.tensor(data.images).float()[:, None] / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    print("| attack | implementation | result |\n|---|---|---|")
    if "gradients" in arguments.parts:
        inverted(x, y, arguments.steps, installed("breaching"))
    if "imprint" in arguments.parts:
        imprinted(x, y, x[1000:1500], installed("breaching"))
    if "membership" in arguments.parts:
        members(x, y, arguments.shadows, installed("privacy_meter"))
    if "inversion" in arguments.parts:
        pictured(x, y, installed("art"))


if __name__ == "__main__":
    main()
