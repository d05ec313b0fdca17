"""Gradient leakage attacks on any model, as functions of its loss and tensors.

A step of SGD on one sample changes a dense first layer by an outer product of an error and the sample, regardless of
later layers. Its right singular vector is the sample up to scale and sign, which follow from the range of pixels
(:func:`rank_one`); with a bias, the ratio of two gradients is the sample (:func:`analytic`, Phong et al., 2017).
Several steps on the same sample also sum to an outer product. Otherwise, optimisation finds samples whose local steps
change the model in the observed direction (:class:`Matching`, Geiping et al., 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.metrics import total_variation
from fl_lightning.wire import State

#: ``loss(state, x, y)``: loss of a batch, given the model's named tensors.
Loss = Callable[[State, Tensor, Tensor], Tensor]
#: Differentiable conversion of images with pixels in [0, 1] to a model's inputs.
ToNet = Callable[[Tensor], Tensor]
#: Relative size below which an entry of a direction is rounding error.
ROUNDING = 1e-4
#: Errors of a direction's entries that count as noise.
SPREAD = 4.0
#: Fractions of the search after which the learning rate is divided by ten.
MILESTONES = (3 / 8, 5 / 8, 7 / 8)
#: Fraction of the steps used to try every class.
TRIAL = 0.2


def model_loss(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> Loss:
    """Return the loss of a model as a function of its named tensors.

    Args:
        model: any module; its own weights are not changed.
        loss: function of outputs and labels.
    """
    return lambda state, x, y: loss(torch.func.functional_call(model, state, (x,)), y)


def analytic(weight: Tensor, bias: Tensor) -> Tensor | None:
    """Return the input of a dense layer from its weight and bias gradients for one sample; None if both are zero.

    Args:
        weight: shape (out, in).
        bias: shape (out,).

    Example:
        >>> error, x = torch.tensor([0.5, -2.0]), torch.tensor([1.0, 3.0])
        >>> analytic(torch.outer(error, x), error)
        tensor([1., 3.])
    """
    row = int(bias.abs().argmax())
    return weight[row] / bias[row] if bool(bias[row].abs() > 0) else None


class RankOne(NamedTuple):
    """Rank-one approximation of a layer's change."""

    direction: Tensor
    """The right singular vector, of length one, shape (in,)."""
    share: float
    """Its share of the squared norm of the change; 1 for one sample, less for several."""
    error: float = 0.0
    """Error of the direction's entries relative to their root mean square, if the rest is noise."""


def rank_one(change: Tensor) -> RankOne | None:
    """Return the sample that a dense layer was trained on, up to scale and sign, for any labels and later layers.

    Args:
        change: gradient or change of the matrix that multiplies the input, shape (out, in): the weight of a dense
            layer, the right factors of a factorised one.

    Returns:
        None if nothing changed.

    Example:
        >>> found = rank_one(torch.outer(torch.tensor([0.5, -2.0]), torch.tensor([3.0, 4.0])))
        >>> found.direction.abs(), round(found.share, 6)
        (tensor([0.6000, 0.8000]), 1.0)
    """
    exact = change.double()
    total = exact.pow(2).sum()
    if not bool(total > 0):
        return None
    short = exact if len(exact) <= exact.shape[1] else exact.T
    values, vectors = torch.linalg.eigh(short @ short.T)
    direction = exact.T @ vectors[:, -1] if short is exact else vectors[:, -1]
    share = float(values[-1] / total)
    error = (max(0.0, 1 - share) / len(exact)) ** 0.5
    return RankOne((direction / direction.norm()).to(change.dtype), share, error)


def in_range(direction: Tensor, low: Tensor, high: Tensor, error: float = 0.0) -> Tensor:
    """Return the largest inputs along a direction within the range of pixels, the likelier sign first.

    An image with a black or white pixel is the largest one along its direction. The sign with more pixels at an end of
    the range is likelier.

    Args:
        direction: shape (n,).
        low: input of a black pixel, broadcast over the direction.
        high: input of a white pixel, likewise.
        error: error of the direction's entries, as in :attr:`RankOne.error`.

    Returns:
        Shape (2, n), or (1, n) if one sign gives no image.

    Example:
        >>> in_range(torch.tensor([-0.6, -0.6, 0.52]), torch.tensor(-1.0), torch.tensor(2.0))[0]
        tensor([-1.0000, -1.0000,  0.8667])
    """
    found: list[tuple[int, Tensor]] = []
    off = SPREAD * error * direction.double().pow(2).mean().sqrt()
    for signed in (direction.double(), -direction.double()):
        limits = torch.where(signed > 0, high.double(), low.double()) / signed
        limits = limits.masked_fill(signed.abs() < torch.maximum(ROUNDING * signed.abs().max(), off), torch.inf)
        ends = limits.isfinite() & (limits <= limits.min() * (1 + 10 * ROUNDING + 2 * off / signed.abs()))
        if bool(limits.min() > 0) and bool(ends.any()):
            found.append((int(ends.sum()), signed * limits[ends].mean()))
    found.sort(key=lambda one: -one[0])
    return torch.stack([image for _, image in found]).to(direction.dtype) if found else direction[None]


def labels_of_head(rows: Tensor, batch: int) -> Tensor:
    """Infer the sorted labels of a batch from the last layer's gradient (Zhao et al., 2020; Geng et al., 2021).

    The gradient of class c's row is the mean of (p_c - 1[y = c]) times positive features, so the rows of present
    classes are the negative ones. Every present class is counted once, further labels by how negative their rows are.

    Args:
        rows: gradient of the last bias, or of the last weight summed over its inputs, shape (classes,).
        batch: number of samples.

    Example:
        >>> labels_of_head(torch.tensor([-0.08, 0.25, -0.42, 0.25]), 3)
        tensor([0, 2, 2])
    """
    rows, impact = rows.clone(), -rows.clamp(max=0).sum() / batch
    found: list[int] = [int(c) for c in rows.argsort() if rows[c] < 0][:batch]
    for c in found:
        rows[c] += impact
    while len(found) < batch:
        c = int(rows.argmin())
        found.append(c)
        rows[c] += impact
    return torch.tensor(sorted(found), device=rows.device)


@dataclass(frozen=True)
class LocalSteps:
    """Local SGD as simulated by the adversary.

    Args:
        lr: learning rate.
        batches: sample indices of each step; None means one step on all samples.
        weight_decay: as in ``torch.optim.SGD``.
        momentum: as in ``torch.optim.SGD``.
        trained: the entries that the client trains, including private ones; None means the observed ones.
    """

    lr: float = 1.0
    batches: Sequence[Tensor] | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    trained: Sequence[str] | None = None

    def change(self, loss: Loss, state: State, names: Sequence[str], x: Tensor, y: Tensor) -> State:
        """Return received minus sent entries of a client trained on these samples, differentiable in the samples.

        Args:
            loss: the client's objective.
            state: the received model.
            names: the observed entries.
            x: inputs, shape (n, ...).
            y: labels, shape (n,).
        """
        trained = names if self.trained is None else self.trained
        own = {name: state[name].detach().clone().requires_grad_() for name in trained}
        now, velocity = dict(own), dict[str, Tensor]()
        for rows in [slice(None)] if self.batches is None else self.batches:
            value = loss({**state, **now}, x[rows], y[rows])
            found = torch.autograd.grad(
                value, [now[n] for n in trained], create_graph=True, allow_unused=True, materialize_grads=True
            )
            for name, gradient in zip(trained, found, strict=True):
                step = gradient + self.weight_decay * now[name]
                velocity[name] = step + self.momentum * velocity[name] if name in velocity else step
            now = {name: now[name] - self.lr * velocity[name] for name in trained}
        return {name: own[name] - now[name] for name in names}


class Match(NamedTuple):
    """Samples found for an observed change."""

    images: Tensor
    """Pixels in [0, 1], shape (n, ...)."""
    labels: Tensor
    """Their labels, shape (n,)."""
    distance: float
    """One minus the cosine of their change and the observed one."""


@dataclass(frozen=True)
class Matching:
    """Gradient matching: Adam on one minus the cosine of the changes plus total variation.

    Geiping et al. use the sign of the gradient in Adam, a total variation weight of 0.1 (0.2 in their normalisation,
    the mean over both directions instead of the sum), a learning rate of 0.1, divided by ten after 3/8, 5/8 and 7/8 of
    24,000 steps, and the best of 8 restarts.

    Args:
        steps: number of steps of Adam.
        starts: number of restarts, of which the best match is kept.
        rate: learning rate of Adam.
        variation: weight of the total variation.
        signed: whether Adam uses the signs of the gradient.
    """

    steps: int = 500
    starts: int = 1
    rate: float = 0.1
    variation: float = 0.1
    signed: bool = True

    def search(
        self,
        loss: Loss,
        state: State,
        change: State,
        labels: Tensor | None,
        shape: Sequence[int],
        rng: np.random.Generator,
        to_net: ToNet = lambda images: images,
        local: LocalSteps = LocalSteps(),  # noqa: B008 - frozen
        classes: int = 0,
    ) -> Match:
        """Search for samples whose local steps from ``state`` change the model in the observed direction.

        Args:
            loss: the client's objective.
            state: the model received by the client.
            change: the observed entries, received minus sent.
            labels: shape (n,), or None if unknown: then every class is tried for a single sample, and every restart
                draws random labels for several samples.
            shape: shape of the samples, (n, ...).
            rng: generator of the starts.
            to_net: conversion of pixels to the model's inputs.
            local: the client's local steps.
            classes: number of classes, if labels are unknown.
        """
        dtype = next(iter(change.values())).dtype
        device = next(iter(change.values())).device

        def descend(own: Tensor, steps: int) -> Match:
            start = seeding.uniform(rng, shape).to(device, dtype)
            return self.descend(loss, state, change, own, start, to_net, local, steps)

        if labels is None and shape[0] == 1:
            trials = [
                descend(torch.tensor([c], device=device), max(1, int(TRIAL * self.steps))) for c in range(classes)
            ]
            labels = min(trials, key=lambda one: one.distance).labels
        found = []
        for _ in range(self.starts):
            drawn = torch.from_numpy(rng.integers(classes, size=shape[0])).to(device) if labels is None else labels
            found.append(descend(drawn, self.steps))
        return min(found, key=lambda one: one.distance)

    def descend(
        self,
        loss: Loss,
        state: State,
        change: State,
        labels: Tensor,
        start: Tensor,
        to_net: ToNet,
        local: LocalSteps,
        steps: int,
    ) -> Match:
        """Run one search from ``start``."""
        images = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([images], self.rate)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(m * steps) for m in MILESTONES])
        wanted = torch.cat([value.flatten() for value in change.values()]).to(images)
        distance = torch.tensor(float("inf"))
        for _ in range(steps):
            own = local.change(loss, state, tuple(change), to_net(images), labels)
            distance = 1 - F.cosine_similarity(torch.cat([v.flatten() for v in own.values()]), wanted, dim=0)
            (gradient,) = torch.autograd.grad(distance + self.variation * total_variation(images).mean(), images)
            images.grad = gradient.sign() if self.signed else gradient
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                images.clamp_(0, 1)
        return Match(images.detach(), labels, float(distance.detach()))
