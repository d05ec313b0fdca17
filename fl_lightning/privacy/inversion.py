"""Model inversion (Fredrikson et al., 2015): images of classes from a client's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.metrics import total_variation
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.data import as_clients
from fl_lightning.privacy.gradients import ToNet
from fl_lightning.privacy.judge import Judge
from fl_lightning.privacy.leakage import compare
from fl_lightning.privacy.pixels import Pixels
from fl_lightning.privacy.report import BASELINE, Row
from fl_lightning.privacy.views import View
from fl_lightning.privacy.wiretap import Run
from fl_lightning.wire import State, fast_copy

#: A differentiable model: inputs to logits.
Answer = Callable[[Tensor], Tensor]
#: Maximum number of training images in a class mean, the target of reconstructions.
OF_A_CLASS = 100


@dataclass(frozen=True)
class Inversion:
    """Options of reconstruction: Adam on the cross-entropy of the class, total variation and squared norm.

    Args:
        steps: steps of Adam.
        starts: number of reconstructions of each class, from different noise.
        rate: learning rate of Adam.
        variation: weight of the total variation, a smoothness prior.
        norm: weight of the squared norm, the prior that images are dark.
    """

    steps: int = 500
    starts: int = 10
    rate: float = 0.1
    variation: float = 1.0
    norm: float = 1e-4

    def reconstruct(
        self,
        models: Sequence[Answer],
        classes: Sequence[int],
        shape: Sequence[int],
        rng: np.random.Generator,
        to_net: ToNet = lambda images: images,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Reconstruct images of classes: minimise CE(f(x), y) + variation TV(x) + norm ||x||^2.

        Args:
            models: one or more, such as modules in evaluation mode; their losses are averaged.
            classes: the classes.
            shape: shape of an image, with channels first.
            rng: generator of the starts.
            to_net: conversion of pixels to the models' inputs.
            device: device of the models.

        Returns:
            Pixels in [0, 1], shape (classes, starts, ...).
        """
        free = seeding.normal(rng, (len(classes) * self.starts, *shape)).to(device).requires_grad_()
        target = torch.tensor(classes, device=device).repeat_interleave(self.starts)
        optimizer = torch.optim.Adam([free], self.rate)
        for _ in range(self.steps):
            images = torch.sigmoid(free)
            loss = self.variation * total_variation(images).sum() + self.norm * images.pow(2).sum()
            x = to_net(images)
            for model in models:
                loss = loss + F.cross_entropy(model(x), target, reduction="sum") / len(models)
            (free.grad,) = torch.autograd.grad(loss, free)
            optimizer.step()
        images = torch.sigmoid(free.detach())
        return images.view(len(classes), self.starts, *shape)


class Reconstructed(NamedTuple):
    """The reconstructions of one client's classes under one view."""

    client: int
    view: str
    assumption: str
    classes: list[int]
    images: Tensor
    """Shape (classes, starts, ...)."""
    means: Tensor
    """Class means, shape (classes, ...)."""


def invert(
    run: Run,
    views: Sequence[View],
    inversion: Inversion,
    judge: Judge,
    reference_rows: Tensor,
    groups: dict[int, str] | None = None,
    most_classes: int = 10,
) -> tuple[list[Row], list[Reconstructed]]:
    """Invert the models that adversaries have of the clients, for every class of a client.

    Args:
        run: the run.
        views: the adversaries.
        inversion: options of reconstruction.
        judge: the classifier that evaluates reconstructions.
        reference_rows: the adversary's own samples, to guess unseen entries with.
        groups: the clients' groups, for the report.
        most_classes: maximum number of reconstructed classes of a client.

    Returns:
        One row per client, view and assumption with ``psnr`` (dB, to the mean of the client's own training images of
        the class), ``ssim`` and ``attack_acc`` (share that the judge gives the class); for each client the baselines
        that need no model, a grey image and the mean of the adversary's own samples of all classes and of the class;
        and the images.
    """
    module = run.module
    federation, pixels = module.federation, Pixels.of(module.federation)
    reference = as_clients(federation, [reference_rows]) if len(reference_rows) else None
    rows: list[Row] = []
    images: list[Reconstructed] = []
    for client in run.each(run.clients):
        classes, means = _held(module, pixels, client, most_classes)
        original = classes
        if federation.label_maps is not None:  # the judge knows the labels of the data, not the client's own
            original = federation.label_maps[client].argsort()[torch.tensor(classes)].tolist()
        where = {"client": client, "group": (groups or {}).get(client, "")}
        for name, baseline in _baselines(pixels, reference_rows, original).items():
            scores = compare(baseline, means) | {"attack_acc": judge.share(baseline, original, 1)}
            rows.append({"view": BASELINE, "assumption": "", "variant": name, **where, **scores})
        known: list[tuple[Sequence[State], Tensor]] = []
        for view in views:
            for assumption, states in view.observe(run, client, reference).items():
                before = (made for models, made in known if _same(models, states))
                found = next(before, None)
                if found is None:
                    rng = seeding.stream(module.seed, "attack.inversion", client=client)
                    found = inversion.reconstruct(
                        [partial(_answer, module, fast_copy(state)) for state in states],
                        classes,
                        federation.inputs.shape[1:],
                        rng,
                        partial(pixels.to_net, dtype=module.compute_dtype),
                        federation.device,
                    )
                    known.append((states, found))
                near = means[:, None].expand_as(found)
                judged = judge.share(found.flatten(0, 1), original, inversion.starts)
                scores = compare(found.flatten(0, 1), near.flatten(0, 1)) | {"attack_acc": judged}
                how = {"view": view.name, "assumption": assumption, "variant": "gradient"}
                rows.append({**how, **where, **scores})
                images.append(Reconstructed(client, view.name, assumption, original, found.cpu(), means.cpu()))
    return rows, images


def _answer(module: FederatedModule, state: State, x: Tensor) -> Tensor:
    return module.call(state, x, training=False)[0]


def _baselines(pixels: Pixels, rows: Tensor, classes: Sequence[int]) -> dict[str, Tensor]:
    """Return images that need no model: grey, the mean of the adversary's own samples, and its class means."""
    shape = (len(classes), *pixels.federation.inputs.shape[1:])
    found = {"grey": torch.full(shape, 0.5, device=pixels.federation.device)}
    if len(rows):
        own, labels = pixels.of_rows(rows), pixels.federation.targets[rows.to(pixels.federation.device)]
        everything = own.mean(0)
        found["mean"] = everything.expand(shape)
        means = [own[labels == c].mean(0) if bool((labels == c).any()) else everything for c in classes]
        found["class mean"] = torch.stack(means)
    return found


def _same(left: Sequence[State], right: Sequence[State]) -> bool:
    """Whether two adversaries have the same models and thus the same reconstructions."""
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
        for a, b in zip(left, right, strict=True)
    )


def _held(module: FederatedModule, pixels: Pixels, client: int, most: int) -> tuple[list[int], Tensor]:
    """Return the classes that a client trains on, in its own labelling, and its class means."""
    federation = module.federation
    index = federation.train[client]
    labels = federation.targets[index]
    if federation.label_maps is not None:
        labels = federation.label_maps[client][labels]
    classes = torch.bincount(labels, minlength=federation.num_classes).nonzero().flatten().tolist()[:most]
    rng = seeding.stream(module.seed, "attack.means", client=client)
    means = []
    for c in classes:
        own = index[labels == c]
        some = seeding.permutation(rng, len(own))[:OF_A_CLASS].to(own.device)
        means.append(pixels.of_rows(own[some]).mean(0))
    return classes, torch.stack(means)
