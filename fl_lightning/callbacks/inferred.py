"""FedDAF's inferred distribution compared with the clients' data: t-SNE figures and a two-sample score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.callbacks.central import CentralCallback, some_tests
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.ranges import TwoOrMore
from fl_lightning.wire import State

#: Number of principal components before t-SNE, and its perplexity.
DIMENSIONS, PERPLEXITY = 50, 30.0
#: Number of comparisons of draws with the clients' vectors, each with as many draws as clients.
REPETITIONS = 40
PICTURE = "inferred_distribution.png"


class InferredDistributionCallback(CentralCallback):
    """Draws the distribution inferred by FedDAF at the end of a fit (the paper's figure 4).

    Left: features of test samples before the last layer of a central model, coloured by class. Right: draws of the
    inferred distribution of statistics and the clients' own statistics, coloured by the client's dominant class.
    Written to ``inferred_distribution.png``. ``inferred_distribution.json`` contains the accuracy of a nearest
    neighbour classifier of draws and clients, 0.5 if they are indistinguishable and 1 if they are separable.

    Attributes:
        score: this accuracy.

    Args:
        number: number of test samples and of draws.
        original: whether to draw the left panel, which needs a central model.
        central: file of the central model; None stores it as ``central.pt`` in ``folder``.
        folder: folder of the results; None means the Trainer's log folder.
    """

    def __init__(
        self, number: TwoOrMore = 2000, original: bool = True, central: str | None = None, folder: str | None = None
    ) -> None:
        super().__init__(central, folder)
        self.number, self.original = number, original
        self.score = float("nan")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods other than FedDAF."""
        super().setup(trainer, pl_module, stage)
        if not hasattr(pl_module, "fusion"):
            given = type(pl_module).__name__
            raise FederationError(f"InferredDistributionCallback needs FedDAF, not {given}.")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sample, compare and draw."""
        module: Any = pl_module
        if trainer.fast_dev_run or module.fusion.vae is None:  # type: ignore[attr-defined]
            return
        draws, rows = module.fusion.inferred(self.number, seeding.stream(module.seed, "inferred"))
        projection, observed = module.fusion.projection, module.fusion.observed
        scale = torch.where(projection.std.isinf(), 1.0, projection.std)
        a, b = observed / scale, draws / scale
        self.score = two_sample_score(a, b, seeding.stream(module.seed, "compare"))
        classes = dominant_classes(module)[module.fusion.clients]
        panels = {}
        if self.original:
            index = some_tests(module, self.number)
            features = penultimate(module, self.central_state(trainer, module), index)
            panels["original: features of a central model"] = (embed(features), module.federation.targets[index], 0)
        points = embed(torch.cat([b, a]))
        panels["inferred (dots) and clients (crosses)"] = (points, torch.cat([classes[rows], classes]), len(a))
        folder = self.out(trainer)
        picture(panels, folder / PICTURE)
        told = {"two_sample_score": self.score, "clients": len(a), "draws": self.number}
        (folder / "inferred_distribution.json").write_text(json.dumps(told, indent=1) + "\n")
        rank_zero_info(f"Two-sample score {self.score:.3f}: {folder / PICTURE}")

    def run_metrics(self) -> dict[str, float]:
        """Return the score, for tables of results."""
        return {"two_sample_score": self.score}


def nearest_neighbour_accuracy(a: Tensor, b: Tensor) -> float:
    """Return how often the nearest neighbour among all vectors is of the same set.

    Args:
        a: shape (n, dimensions).
        b: shape (m, dimensions); for m = n and equal distributions, 1/2 is expected.

    Example:
        >>> nearest_neighbour_accuracy(torch.tensor([[0.0], [0.1]]), torch.tensor([[5.0], [5.1]]))
        1.0
    """
    both = torch.cat([a, b]).double()
    distance = torch.cdist(both, both).fill_diagonal_(torch.inf)
    kind = torch.arange(len(both), device=both.device) >= len(a)
    return float((kind[distance.argmin(1)] == kind).double().mean())


def two_sample_score(a: Tensor, b: Tensor, rng: np.random.Generator) -> float:
    """Return the mean nearest neighbour accuracy over several subsets of ``a`` and ``b`` of equal size."""
    size = min(len(a), len(b))

    def some(vectors: Tensor) -> Tensor:
        if len(vectors) == size:
            return vectors
        return vectors[torch.from_numpy(rng.choice(len(vectors), size, replace=False))]

    return float(np.mean([nearest_neighbour_accuracy(some(a), some(b)) for _ in range(REPETITIONS)]))


def dominant_classes(module: FederatedModule) -> Tensor:
    """Return each client's most frequent training class, shape (clients,)."""
    federation = module.federation
    counts = [federation.targets[index].bincount(minlength=federation.num_classes) for index in federation.train]
    return torch.stack(counts).argmax(1).cpu()


@torch.no_grad()
def penultimate(module: FederatedModule, state: State, index: Tensor) -> Tensor:
    """Return the inputs of the net's last dense layer for some samples, shape (n, features)."""
    dense = [layer for layer in module.functional.skeleton.modules() if isinstance(layer, nn.Linear)]
    found: list[Tensor] = []
    hook = dense[-1].register_forward_pre_hook(lambda layer, args: found.append(args[0].flatten(1)))
    try:
        for part in torch.split(index, 128):
            x = module.federation.features(module.federation.inputs[part], module.compute_dtype)
            module.call(state, x, training=False)
    finally:
        hook.remove()
    return torch.cat(found)


def embed(vectors: Tensor) -> np.ndarray[Any, Any]:
    """Embed vectors in two dimensions by PCA and t-SNE, deterministically; shape (n, 2)."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    x = vectors.double().cpu().numpy()
    if min(x.shape) > DIMENSIONS:
        x = PCA(DIMENSIONS, random_state=0).fit_transform(x)
    perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
    points: np.ndarray[Any, Any] = TSNE(perplexity=perplexity, random_state=0).fit_transform(x)
    return points


def picture(panels: dict[str, tuple[np.ndarray[Any, Any], Tensor | Sequence[int], int]], path: Path) -> None:
    """Draw panels side by side: points, colours, and the number of last points drawn as crosses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(panels), 5), layout="constrained")
    for axes, (title, (points, colours, crosses)) in zip(
        np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True
    ):
        dots = len(points) - crosses
        shades = np.asarray(colours)
        axes.scatter(*points[:dots].T, c=shades[:dots], cmap="tab10", s=6, alpha=0.6)
        if crosses:
            axes.scatter(*points[dots:].T, c=shades[dots:], cmap="tab10", s=60, marker="X", edgecolors="black")
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=110)
