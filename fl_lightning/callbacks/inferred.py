"""Distributions that FedDAF infers, beside the clients' data: t-SNE pictures and a two-sample score."""

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

#: Dimensions that principal components leave before t-SNE, and its perplexity.
DIMENSIONS, PERPLEXITY = 50, 30.0
#: How often draws are compared with the clients' vectors, each time as many as there are clients.
REPETITIONS = 40
PICTURE = "inferred_distribution.png"


class InferredDistributionCallback(CentralCallback):
    """At the end of a fit of FedDAF, pictures what its autoencoder inferred (the paper's figure 4).

    Left, features of test samples before the last layer of a central model, coloured by class; right, draws of the
    inferred distribution of statistics and the clients' own statistics, coloured by the client's dominant class.
    Written to ``inferred_distribution.png``, and to ``inferred_distribution.json`` a number: how often the nearest
    neighbour of a vector is of its own kind, draw or client. 0.5 says that they cannot be told apart, 1 that they
    always can.

    Attributes:
        score: that number.

    Args:
        number: test samples, and draws.
        original: whether to make the left picture, which takes a central model.
        central: file of the central model; None keeps it as ``central.pt`` in ``folder``.
        folder: where results are written; None means the Trainer's log folder.
    """

    def __init__(
        self, number: TwoOrMore = 2000, original: bool = True, central: str | None = None, folder: str | None = None
    ) -> None:
        super().__init__(central, folder)
        self.number, self.original = number, original
        self.score = float("nan")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods that infer no distribution."""
        super().setup(trainer, pl_module, stage)
        if not hasattr(pl_module, "fusion"):
            given = type(pl_module).__name__
            raise FederationError(f"InferredDistributionCallback needs FedDAF, not {given}.")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw, compare, picture."""
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
        """The score, for a table of results."""
        return {"two_sample_score": self.score}


def nearest_neighbour_accuracy(a: Tensor, b: Tensor) -> float:
    """How often the nearest other vector of ``a`` and ``b`` together is of the same set.

    Args:
        a: shape (n, dimensions).
        b: shape (m, dimensions); with m = n, 1/2 is expected of two samples of one distribution.

    Example:
        >>> nearest_neighbour_accuracy(torch.tensor([[0.0], [0.1]]), torch.tensor([[5.0], [5.1]]))
        1.0
    """
    both = torch.cat([a, b]).double()
    distance = torch.cdist(both, both).fill_diagonal_(torch.inf)
    kind = torch.arange(len(both), device=both.device) >= len(a)
    return float((kind[distance.argmin(1)] == kind).double().mean())


def two_sample_score(a: Tensor, b: Tensor, rng: np.random.Generator) -> float:
    """Mean accuracy of the nearest neighbour between as many vectors of ``a`` and of ``b``, chosen several times."""
    size = min(len(a), len(b))

    def some(vectors: Tensor) -> Tensor:
        if len(vectors) == size:
            return vectors
        return vectors[torch.from_numpy(rng.choice(len(vectors), size, replace=False))]

    return float(np.mean([nearest_neighbour_accuracy(some(a), some(b)) for _ in range(REPETITIONS)]))


def dominant_classes(module: FederatedModule) -> Tensor:
    """The class that each client has most training samples of, shape (clients,)."""
    federation = module.federation
    counts = [federation.targets[index].bincount(minlength=federation.num_classes) for index in federation.train]
    return torch.stack(counts).argmax(1).cpu()


@torch.no_grad()
def penultimate(module: FederatedModule, state: State, index: Tensor) -> Tensor:
    """Inputs of the net's last dense layer for some samples, shape (n, features)."""
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
    """Two dimensions by t-SNE, after principal components, always the same; shape (n, 2)."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    x = vectors.double().cpu().numpy()
    if min(x.shape) > DIMENSIONS:
        x = PCA(DIMENSIONS, random_state=0).fit_transform(x)
    perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
    points: np.ndarray[Any, Any] = TSNE(perplexity=perplexity, random_state=0).fit_transform(x)
    return points


def picture(panels: dict[str, tuple[np.ndarray[Any, Any], Tensor | Sequence[int], int]], path: Path) -> None:
    """Panels side by side: points, the colour of each, and how many of the last ones are drawn as crosses."""
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
