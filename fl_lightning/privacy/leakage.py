"""Gradient leakage: reconstruct a client's samples from its update after a few steps on a small batch.

Applies the attacks of :mod:`fl_lightning.privacy.gradients` to a federated run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.engine import Plan, SequentialEngine
from fl_lightning.errors import FederationError
from fl_lightning.exchange import train_clients
from fl_lightning.metrics import psnr, ssim
from fl_lightning.module import FederatedModule
from fl_lightning.parties import LocalData, Memory
from fl_lightning.privacy import gradients
from fl_lightning.privacy.data import as_clients
from fl_lightning.privacy.gradients import LocalSteps, Matching
from fl_lightning.privacy.pixels import Pixels
from fl_lightning.privacy.profiles import remaining
from fl_lightning.privacy.report import BASELINE, Row
from fl_lightning.privacy.views import View
from fl_lightning.privacy.wiretap import Protection, Run, Wire
from fl_lightning.wire import Message, State, Weighting, message_weights, weighted_mean

#: PSNR in dB above which a reconstruction is exact up to rounding.
EXACT = 150.0


def small_update(
    module: FederatedModule,
    client: int,
    rows: Tensor,
    protect: Protection | None = None,
    steps: int = 1,
    received: State | None = None,
) -> tuple[State, State, State]:
    """Request a client's exchange after few steps on a few of its samples; its new state is discarded.

    If the client receives several models, only the one it trains is returned.

    Args:
        module: the method under its Trainer.
        client: the client.
        rows: the client's samples in the batch.
        protect: the client's defences, applied to the message.
        steps: number of local steps, all on the same samples.
        received: the down message; None means the server's.
    """
    federation = module.federation
    received = module.message_down(client) if received is None else received
    data = as_clients(federation, [rows] * federation.num_clients)
    if federation.label_maps is not None:
        data = replace(data, label_maps=federation.label_maps)
    me = replace(module.simulation.me(client, module.setting()), data=LocalData(data, client), memory=Memory())
    method = module.plan(me)
    phases = [replace(phase, epochs=steps) for phase in method.phases()]
    step = Plan(method, phases, replace(method.local, batch_size=len(rows), epochs=steps))
    (one,) = train_clients(module, SequentialEngine(), {client: received}, [me], plan=step)
    message = Message(client, one.up, len(rows))
    if protect is not None:
        protect(received, message)
    if received and not module.revealed(received):  # several models; the client's reply identifies its own
        begun = module.enter(received, me)
        received = {name: begun[name] for name in module.shared_names}
    return received, message.tensors, one.keep or {}


def gradient_of(module: FederatedModule, received: State, sent: State, steps: int = 1) -> State:
    """Return the sum of gradients of local SGD steps, computed from the change of shared trainable entries.

    Args:
        module: the method, for its learning rate and weight decay.
        received: the down message.
        sent: the up message.
        steps: number of local steps; weight decay is removed exactly for a single step.
    """
    before, after, local = module.revealed(received), module.revealed(sent), module.local
    if local.not_plain or local.schedule is not None:
        raise FederationError(
            "The attack computes gradients from steps of plain SGD at one learning rate: leave "
            f"{local.not_plain or 'lr_schedule'} out."
        )
    if not local.lr:
        return {}
    names = [name for name in module.trainable_names if name in before and name in after]
    decayed = (1 - local.lr * local.weight_decay) ** steps
    return {n: (decayed * before[n] - after[n]) / local.lr for n in names}


def labels_of(module: FederatedModule, gradient: State, batch: int) -> Tensor | None:
    """Infer the classes of a batch from the last layer's gradient; None if that layer is private."""
    head = _layer(module, -1)
    if f"{head}.bias" in gradient:
        return gradients.labels_of_head(gradient[f"{head}.bias"], batch)
    if f"{head}.weight" in gradient:
        return gradients.labels_of_head(gradient[f"{head}.weight"].sum(1), batch)
    return None


def exact(module: FederatedModule, gradient: State, pixels: Pixels) -> dict[str, Tensor]:
    """Reconstruct one sample from the first layer's gradient, by attack; empty if it is not dense or not seen."""
    first, shape = _layer(module, 0), pixels.federation.inputs.shape[1:]
    weight, bias = gradient.get(f"{first}.weight"), gradient.get(f"{first}.bias")
    factors = gradient.get(f"{first}.wb")
    found: dict[str, Tensor] = {}
    if weight is not None and bias is not None and _fits(weight, shape):
        sample = gradients.analytic(weight, bias)
        if sample is not None:
            found["analytic"] = pixels.from_net(sample.view(1, *shape))
    for matrix in (weight, factors):
        one = gradients.rank_one(matrix) if matrix is not None and _fits(matrix, shape) else None
        if one is not None:
            low, high = (_end(pixels, value, one.direction) for value in (0.0, 1.0))
            found["rank_one"] = pixels.from_net(
                gradients.in_range(one.direction, low, high, one.error)[0].view(1, *shape)
            )
    return found


class Leaked(NamedTuple):
    """Result of one attack on one client's batch."""

    client: int
    view: str
    assumption: str
    variant: str
    images: Tensor
    """Pixels in [0, 1] in the order of the originals, shape (n, ...)."""
    originals: Tensor
    """The batch, likewise."""
    labels: list[int]
    """The recovered labels; None if there are none."""
    true: list[int]
    """The labels of the batch."""


def leak(
    run: Run,
    views: Sequence[View],
    matching: Matching,
    batch: int = 1,
    groups: dict[int, str] | None = None,
    steps: int = 1,
    initial: State | None = None,
    reference: Tensor | None = None,
    hidden: bool = False,
) -> tuple[list[Row], list[Leaked]]:
    """Reconstruct a small batch of every client from the update it would send.

    Views that use sums see the mean of a whole cohort's updates, each on a batch of this size, and search for the
    samples of all clients; the rows refer to the attacked client's samples.

    Args:
        run: the run.
        views: the adversaries; ``other_client`` sees no update and has no rows.
        matching: options of gradient matching.
        batch: number of samples in the batch.
        groups: the clients' groups, for the report.
        steps: number of local steps, all on the batch.
        initial: the common initial weights, which the outsider compares an up message with; None leaves the outsider
            out.
        reference: the adversary's own rows, whose mean is a baseline.
        hidden: whether secure aggregation hides single messages.

    Returns:
        One row per client, view, assumption and variant with ``psnr`` (dB) and ``ssim`` to the batch, for the best
        order of reconstructions, and ``label_acc``, the share of recovered labels; for each client the baselines that
        need no message, ``grey`` and ``mean``; and the images.
    """
    module, rows = run.module, list[Row]()
    images: list[Leaked] = []
    pixels, cohort = Pixels.of(module.federation), [*module.cohort(module.completed_rounds)]
    asked: dict[int, _Small] = {}

    def ask(client: int) -> _Small:
        if client not in asked:
            asked[client] = _small(run, client, batch, steps)
        return asked[client]

    for client in run.each(run.clients):
        small = ask(client)
        received, kept, originals = small.received, small.kept, pixels.of_rows(small.rows)
        where = {"client": client, "group": (groups or {}).get(client, "")}
        struck = False
        for view in views:
            known = {} if hidden and not view.sums else _known(view, received, initial)
            every = [small, *(ask(other) for other in cohort if other != client)] if view.sums else [small]
            sent = seen(view, [one.message for one in every], module.weighting)
            shown = every if view.whole else [small]
            true = torch.cat([one.labels for one in shown])
            gradient = gradient_of(module, known, sent, steps)
            if not gradient or not any(bool(g.any()) for g in gradient.values()):
                continue
            struck = True
            for assumption, state in _at_the_start(view, Run(module, Wire(), {client: kept}), client, known).items():
                start = seeding.stream(module.seed, "attack.matching", client=client)
                for variant, found, labels in _reconstruct(
                    module, state, gradient, len(true), batch == 1, pixels, matching, steps, start
                ):
                    everything = pixels.of_rows(torch.cat([one.rows for one in shown]))
                    ordered = _ordered(found, everything if len(found) == len(true) else originals)[: len(originals)]
                    how = {"view": view.name, "assumption": assumption, "variant": variant}
                    scores = {**compare(ordered, originals), "label_acc": _label_share(labels, true)}
                    rows.append({**how, **where, **scores})
                    told = [] if labels is None else labels.tolist()
                    images.append(
                        Leaked(
                            client,
                            view.name,
                            assumption,
                            variant,
                            ordered.cpu(),
                            originals.cpu(),
                            told,
                            sorted(true.tolist()),
                        )
                    )
        if struck:
            for name, image in baselines(pixels, reference).items():
                scores = {**compare(image.expand_as(originals), originals), "label_acc": float("nan")}
                rows.append({"view": BASELINE, "assumption": "", "variant": name, **where, **scores})
    return rows, images


class _Small(NamedTuple):
    """A client's update on a small batch, and the batch."""

    rows: Tensor
    labels: Tensor
    received: State
    message: Message
    kept: State


def _small(run: Run, client: int, batch: int, steps: int) -> _Small:
    module, federation = run.module, run.module.federation
    own = federation.train[client]
    rng = seeding.stream(module.seed, "attack.leakage", client=client)
    rows = own[seeding.permutation(rng, len(own))[:batch].to(own.device)]
    labels = federation.targets[rows]
    if federation.label_maps is not None:
        labels = federation.label_maps[client][labels]
    received, sent, kept = small_update(module, client, rows, run.protect, steps)
    return _Small(rows, labels, received, Message(client, sent, len(rows)), kept)


def seen(view: View, messages: Sequence[Message], weighting: Weighting) -> State:
    """Return what a view sees of the first update: itself, the mean, or the mean without the others."""
    if not view.sums or not messages[0].tensors:
        return messages[0].tensors
    weights = message_weights(messages, weighting)
    mean = weighted_mean(messages, weights)
    return mean if view.whole else remaining(mean, weights[1:], [m.tensors for m in messages[1:]], weights[0])


def baselines(pixels: Pixels, reference: Tensor | None) -> dict[str, Tensor]:
    """Return images that need no message: grey, and the mean of the adversary's own."""
    found = {"grey": torch.full((1, *pixels.federation.inputs.shape[1:]), 0.5, device=pixels.federation.device)}
    if reference is not None and len(reference):
        found["mean"] = pixels.of_rows(reference).mean(0, keepdim=True)
    return found


def compare(images: Tensor, originals: Tensor) -> dict[str, float]:
    """Return mean PSNR, at most 150 dB, and mean SSIM."""
    originals = originals.to(images)
    near = psnr(images, originals).clamp(max=EXACT)
    return {"psnr": float(near.mean()), "ssim": float(ssim(images, originals).mean())}


def _known(view: View, received: State, initial: State | None) -> State:
    """Return the model before the client's steps as known to an adversary; empty if it sees no update."""
    if view.name == "other_client":
        return {}
    if view.name == "outsider":
        return {name: initial[name].to(value) for name, value in received.items() if initial and name in initial}
    return received


def _at_the_start(view: View, step: Run, client: int, known: State) -> dict[str, State]:
    """Return the models before the update, completed by the adversary's assumptions."""
    step.wire.note(client, known)
    step.wire.means, step.wire.left = deque([known]), {client: deque([known])}
    found = {name: states[-1] for name, states in view.observe(step, client).items()}
    return {name: state for name, state in found.items() if name != "personal"}


def _reconstruct(
    module: FederatedModule,
    state: State,
    gradient: State,
    batch: int,
    single: bool,
    pixels: Pixels,
    matching: Matching,
    steps: int,
    rng: np.random.Generator,
) -> list[tuple[str, Tensor, Tensor | None]]:
    """Return images and labels by attack; single-sample attacks run if every client has a ``single`` sample."""
    labels, local = labels_of(module, gradient, batch), module.local
    trained = tuple(name for name in module.trainable_names if name in state)
    found: list[tuple[str, Tensor, Tensor | None]] = []
    if single:
        found += [(name, image, labels) for name, image in exact(module, gradient, pixels).items()]
    match = matching.search(
        lambda own, x, y: module.batch_loss(own, x, y, training=False)[0],
        state,
        {name: value.to(module.compute_dtype) for name, value in gradient.items()},
        labels,
        (batch, *pixels.federation.inputs.shape[1:]),
        rng,
        partial(pixels.to_net, dtype=module.compute_dtype),
        LocalSteps(local.lr, [torch.arange(batch)] * steps, momentum=local.momentum, trained=trained),
        pixels.federation.num_classes,
    )
    return [*found, ("matching", match.images, match.labels)]


def _ordered(images: Tensor, originals: Tensor) -> Tensor:
    """Reorder the images to match the originals best."""
    originals = originals.to(images)
    cost = torch.cdist(images.flatten(1).double(), originals.flatten(1).double()).cpu().numpy()
    rows, columns = linear_sum_assignment(np.nan_to_num(cost, nan=np.inf, posinf=1e30))
    return images[torch.as_tensor(rows[np.argsort(columns)], device=images.device)]


def _label_share(labels: Tensor | None, true: Tensor) -> float:
    """Return the share of recovered labels, compared as multisets."""
    if labels is None:
        return float("nan")
    classes = int(torch.cat((labels, true)).max()) + 1
    both = torch.minimum(torch.bincount(labels, minlength=classes), torch.bincount(true, minlength=classes))
    return float(both.sum()) / len(true)


def _fits(matrix: Tensor, shape: torch.Size) -> bool:
    """Whether a layer's matrix multiplies whole samples."""
    return matrix.dim() == 2 and matrix.shape[1] == shape.numel()


def _end(pixels: Pixels, value: float, like: Tensor) -> Tensor:
    """Return the net's input of an image of one brightness, flattened."""
    image = torch.full((1, *pixels.federation.inputs.shape[1:]), value, device=like.device)
    return pixels.to_net(image, like.dtype).flatten()


def _layer(module: FederatedModule, place: int) -> str:
    """Return the name of the first (0) or last (-1) layer with its own weights."""
    holds: Callable[[nn.Module], bool] = lambda layer: bool(list(layer.parameters(recurse=False)))  # noqa: E731
    names: list[str] = [name for name, layer in module.net.named_modules() if holds(layer)]
    return names[place]
