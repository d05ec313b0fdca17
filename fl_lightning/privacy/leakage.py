"""Gradient leakage: a client's samples out of its update, when it took one step on a small batch.

Where the first layer is linear with a bias and the batch is one sample, the sample is the ratio of two gradients
(``analytic``, Phong et al., 2017). Otherwise images are searched whose gradient points the way of the update
(``matching``, Geiping et al., 2020, with the labels read off the last layer's gradient as Zhao et al., 2020, do).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.engine import Plan, SequentialEngine
from fl_lightning.errors import FederationError
from fl_lightning.exchange import train_clients
from fl_lightning.metrics import psnr, ssim, total_variation
from fl_lightning.module import FederatedModule
from fl_lightning.parties import LocalData, Memory
from fl_lightning.privacy.data import as_clients
from fl_lightning.privacy.pixels import Pixels
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.views import View
from fl_lightning.privacy.wiretap import Protection, Run, Wire
from fl_lightning.wire import Message, State


def small_update(
    module: FederatedModule, client: int, rows: Tensor, protect: Protection | None = None
) -> tuple[State, State, State]:
    """What a client would receive, send and keep in a round of one step on a few of its samples; nothing is kept.

    If the client receives several models, only the one it trains is returned.

    Args:
        module: the method under its Trainer.
        client: the client.
        rows: its samples, the batch.
        protect: what the client does to the message before it leaves.
    """
    federation, received = module.federation, module.message_down(client)
    data = as_clients(federation, [rows] * federation.num_clients)
    if federation.label_maps is not None:
        data = replace(data, label_maps=federation.label_maps)
    me = replace(module.simulation.me(client, module.setting()), data=LocalData(data, client), memory=Memory())
    method = module.plan(me)
    phases = [replace(phase, epochs=1) for phase in method.phases()]
    step = Plan(method, phases, replace(method.local, batch_size=len(rows), epochs=1))
    (one,) = train_clients(module, SequentialEngine(), {client: received}, [me], plan=step)
    message = Message(client, one.up, len(rows))
    if protect is not None:
        protect(received, message)
    if received and not module.revealed(received):  # several models, of which the client's answer names its own
        begun = module.enter(received, me)
        received = {name: begun[name] for name in module.shared_names}
    return received, message.tensors, one.keep or {}


def gradient_of(module: FederatedModule, received: State, sent: State) -> State:
    """The gradient that a single SGD step on the received entries betrays, for the shared trainable ones."""
    before, after, local = module.revealed(received), module.revealed(sent), module.local
    if local.not_plain or local.schedule is not None:
        raise FederationError(
            "The attack reads gradients off steps of plain SGD at one learning rate: leave "
            f"{local.not_plain or 'lr_schedule'} out."
        )
    if not local.lr:
        return {}
    names = [name for name in module.trainable_names if name in before and name in after]
    return {n: (before[n] - after[n]) / local.lr - local.weight_decay * before[n] for n in names}


def labels_of(module: FederatedModule, gradient: State, batch: int) -> Tensor | None:
    """The classes of a batch, read off the last layer's gradient; None if that layer stays with the client.

    The gradient of class c's row is the mean of (p_c - 1[y = c]) times positive features, so the rows of present
    classes are the negative ones. Every present class is taken once, the others by how negative their rows are.
    """
    head = _layer(module, -1)
    if f"{head}.bias" in gradient:
        rows = gradient[f"{head}.bias"]
    elif f"{head}.weight" in gradient:
        rows = gradient[f"{head}.weight"].sum(1)
    else:
        return None
    rows, impact = rows.clone(), -rows.clamp(max=0).sum() / batch
    found: list[int] = [int(c) for c in rows.argsort() if rows[c] < 0][:batch]
    for c in found:
        rows[c] += impact
    while len(found) < batch:
        c = int(rows.argmin())
        found.append(c)
        rows[c] += impact
    return torch.tensor(sorted(found), device=rows.device)


def analytic(module: FederatedModule, gradient: State) -> Tensor | None:
    """The net's input out of a gradient of one sample; None if the first layer is not linear with a shared bias."""
    first = _layer(module, 0)
    weight, bias = gradient.get(f"{first}.weight"), gradient.get(f"{first}.bias")
    if weight is None or bias is None or weight.dim() != 2:
        return None
    row = int(bias.abs().argmax())
    if not bool(bias[row].abs() > 0):
        return None
    return weight[row] / bias[row]


@dataclass(frozen=True)
class Matching:
    """How images are searched: Adam on one minus the cosine of the gradients, and total variation.

    Args:
        steps: steps of Adam.
        starts: searches, of which the best match is kept.
        rate: learning rate of Adam.
        variation: weight of the total variation.
    """

    steps: int = 300
    starts: int = 1
    rate: float = 0.1
    variation: float = 1e-3

    def search(
        self,
        module: FederatedModule,
        state: State,
        gradient: State,
        labels: Tensor,
        pixels: Pixels,
        rng: np.random.Generator,
    ) -> Tensor:
        """Images with pixels in [0, 1] whose gradient at ``state`` is most like the given one, shape (batch, ...)."""
        best, least = None, float("inf")
        for _ in range(self.starts):
            shape = (len(labels), *pixels.federation.inputs.shape[1:])
            images, match = self._descend(module, state, gradient, labels, pixels, seeding.uniform(rng, shape))
            if best is None or match < least:
                best, least = images, match
        assert best is not None
        return best

    def _descend(
        self, module: FederatedModule, state: State, gradient: State, labels: Tensor, pixels: Pixels, start: Tensor
    ) -> tuple[Tensor, float]:
        images = start.to(labels.device, module.compute_dtype).requires_grad_()
        optimizer = torch.optim.Adam([images], self.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        wanted = torch.cat([g.flatten() for g in gradient.values()]).to(images)
        leaves = {name: state[name].detach().clone().requires_grad_() for name in gradient}
        distance = torch.tensor(float("inf"))
        for _ in range(self.steps):
            x = pixels.to_net(images, module.compute_dtype)
            loss, _ = module.batch_loss({**state, **leaves}, x, labels, training=False)
            own = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
            distance = 1 - F.cosine_similarity(torch.cat([g.flatten() for g in own]), wanted, dim=0)
            (images.grad,) = torch.autograd.grad(distance + self.variation * total_variation(images).mean(), images)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                images.clamp_(0, 1)
        return images.detach(), float(distance.detach())


def leak(
    run: Run, views: Sequence[View], matching: Matching, batch: int = 1, groups: dict[int, str] | None = None
) -> list[Row]:
    """Reconstruct a small batch of every client from the update it would send.

    Args:
        run: the run.
        views: the adversaries; whoever does not see the update cannot attack it, so ``other_client`` yields no rows.
        matching: how images are searched.
        batch: samples of the batch.
        groups: the clients' groups, for the report.

    Returns:
        One row per client, view, assumption and variant with ``psnr`` (dB) and ``ssim`` to the batch, the
        reconstructions put in the order that fits best, and ``label_acc``, the share of labels recovered.
    """
    module, rows = run.module, []
    federation, pixels = module.federation, Pixels.of(module.federation)
    for client in run.each(run.clients):
        rng = seeding.stream(module.seed, "attack.leakage", client=client)
        own = federation.train[client]
        chosen = own[seeding.permutation(rng, len(own))[:batch].to(own.device)]
        true = federation.targets[chosen]
        if federation.label_maps is not None:
            true = federation.label_maps[client][true]
        received, sent, kept = small_update(module, client, chosen, run.protect)
        gradient = gradient_of(module, received, sent)
        if not gradient or not any(bool(g.any()) for g in gradient.values()):
            continue
        labels = labels_of(module, gradient, len(chosen))
        guessed = true.new_zeros(len(true)) if labels is None else labels
        step = Run(module, Wire(), {client: kept})
        step.wire.note(client, received)
        for view in views:
            if view.name == "other_client":
                continue
            for assumption, states in _at_the_start(view, step, client).items():
                start = seeding.stream(module.seed, "attack.matching", client=client)
                for variant, images in _reconstruct(module, states, gradient, guessed, pixels, matching, start):
                    scores = {**_compare(images, pixels.of_rows(chosen)), "label_acc": _label_share(labels, true)}
                    how = {"view": view.name, "assumption": assumption, "variant": variant}
                    rows.append({**how, "client": client, "group": (groups or {}).get(client, ""), **scores})
    return rows


def _at_the_start(view: View, step: Run, client: int) -> dict[str, State]:
    """The models that an adversary takes the gradient to be of: what was received, completed by its assumptions."""
    found = {name: states[-1] for name, states in view.observe(step, client).items()}
    return {name: state for name, state in found.items() if name != "personal"}


def _reconstruct(
    module: FederatedModule,
    state: State,
    gradient: State,
    labels: Tensor,
    pixels: Pixels,
    matching: Matching,
    rng: np.random.Generator,
) -> list[tuple[str, Tensor]]:
    found = [("matching", matching.search(module, state, gradient, labels, pixels, rng))]
    exact = analytic(module, gradient) if len(labels) == 1 else None
    if exact is not None and exact.numel() == pixels.federation.inputs[0].numel():
        found.append(("analytic", pixels.from_net(exact.view(1, *pixels.federation.inputs.shape[1:]))))
    return found


def _compare(images: Tensor, originals: Tensor) -> dict[str, float]:
    """PSNR and SSIM under the order of the reconstructions that fits best."""
    originals = originals.to(images)
    cost = torch.cdist(images.flatten(1).double(), originals.flatten(1).double()).cpu().numpy()
    rows, columns = linear_sum_assignment(cost)
    ordered = images[torch.as_tensor(rows[np.argsort(columns)], device=images.device)]
    near = psnr(ordered, originals).clamp(max=150.0)  # beyond this it is equal but for rounding
    return {"psnr": float(near.mean()), "ssim": float(ssim(ordered, originals).mean())}


def _label_share(labels: Tensor | None, true: Tensor) -> float:
    """Share of the labels recovered, as multisets."""
    if labels is None:
        return float("nan")
    classes = int(torch.cat((labels, true)).max()) + 1
    both = torch.minimum(torch.bincount(labels, minlength=classes), torch.bincount(true, minlength=classes))
    return float(both.sum()) / len(true)


def _layer(module: FederatedModule, place: int) -> str:
    """Name of the first (0) or last (-1) layer with weights of its own."""
    holds: Callable[[nn.Module], bool] = lambda layer: bool(list(layer.parameters(recurse=False)))  # noqa: E731
    names: list[str] = [name for name, layer in module.net.named_modules() if holds(layer)]
    return names[place]
