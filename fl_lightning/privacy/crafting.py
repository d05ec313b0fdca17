"""A crafting server in a federated run: its messages, and samples read from the updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.engine import settled
from fl_lightning.errors import FederationError
from fl_lightning.exchange import train_clients
from fl_lightning.metrics import psnr, ssim
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.gradients import LocalSteps, Loss
from fl_lightning.privacy.imprint import Imprint, crafted, dense_layers, gaussian_thresholds, read, sorts
from fl_lightning.privacy.leakage import EXACT, baselines, seen, small_update
from fl_lightning.privacy.pixels import Pixels
from fl_lightning.privacy.report import BASELINE, Row
from fl_lightning.privacy.views import View
from fl_lightning.privacy.wiretap import Protection, Run
from fl_lightning.wire import Message, State

Place = Literal["first", "front"]
#: PSNR in dB from which a sample counts as read: differences are invisible.
READ = 40.0
#: Number of the server's own samples to test crafted weights on.
TRIED = 8
#: Relative change of the layer in front in all local steps: more shifts its bins, less is lost to rounding.
MOVED = 0.1
#: Name of the layer in front.
FRONT = "imprint"


@dataclass(frozen=True)
class Trap:
    """A malicious server's crafted entries.

    Args:
        entries: the crafted entries by name.
        layer: the layer that sorts samples.
        front: the module in front of the net, if any.
    """

    entries: State
    layer: str
    front: Imprint | None = None

    @classmethod
    def made(
        cls, module: FederatedModule, pixels: Pixels, reference: Tensor, place: Place, bins: int, steps: int = 1
    ) -> Trap:
        """Craft entries for a method, with the server's own samples.

        Args:
            module: the method.
            pixels: the scale of its inputs.
            reference: the server's own rows.
            place: replace the net's ``first`` layers, or add a layer in ``front`` of the net.
            bins: number of bins in front of a net; a first layer has one per output.
            steps: number of local steps to withstand, for a layer in front.
        """
        if len(reference) < 2:
            raise FederationError("A server that crafts messages needs samples of its own: give the partition fewer.")
        dtype, size = module.compute_dtype, pixels.federation.inputs.shape[1:].numel()
        x = pixels.to_net(pixels.of_rows(reference), dtype)
        y = pixels.federation.targets[reference[:TRIED].to(pixels.federation.device)]
        if place == "front":
            front = Imprint(size, gaussian_thresholds(x, bins)).to(x.device)
            front.mix.mul_(_strength(module, front, x[:TRIED], y, steps))
            return cls({f"{FRONT}.{n}": p.detach() for n, p in front.named_parameters()}, FRONT, front)
        layers, state = dense_layers(module.net, size), module.server_state()
        kind = f"The first layers of {type(module.net).__name__}"
        if layers is not None and all(f"{name}.weight" in module.shared_names for name in layers):
            outputs = len(state[f"{layers[0]}.bias"])
            entries = crafted(state, layers, gaussian_thresholds(x, outputs))
            if sorts(_plain(module), {**state, **entries}, layers[0], x[:TRIED], y):
                return cls(entries, layers[0])
        raise FederationError(
            f"{kind} cannot sort samples: that takes a dense layer with a bias, a ReLU and a dense layer, all of them "
            "sent by the server. Set place='front' to put a layer in front of the net "
            '(on the command line --options \'{"place": "front"}\').'
        )

    def sent(self, received: State) -> State:
        """Return a down message with the crafted entries."""
        missing = [name for name in self.entries if name not in received]
        if missing:
            raise FederationError(f"Clients do not receive {missing[0]} under that name: set place='front'.")
        return {**received, **{name: value.to(received[name]) for name, value in self.entries.items()}}

    def layers(self, state: State) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the sorting layer."""
        return state[f"{self.layer}.weight"], state[f"{self.layer}.bias"]


class Reading(NamedTuple):
    """One client's samples as read by a server."""

    client: int
    view: str
    images: Tensor
    """The nearest reconstruction of each of the client's samples, shape (n, ...)."""
    originals: Tensor
    """The client's samples."""
    labels: list[int]


class _Asked(NamedTuple):
    """A client's update: the change of the sorting layer, and the samples."""

    rows: Tensor
    message: Message


def imprint_clients(
    run: Run,
    views: Sequence[View],
    trap: Trap,
    batch: int | None,
    steps: int = 1,
    answered: Mapping[int, tuple[State, State]] | None = None,
    groups: Mapping[int, str] | None = None,
    reference: Tensor | None = None,
    most: int | None = None,
) -> tuple[list[Row], list[Reading]]:
    """Read samples from the updates to a crafted message.

    Args:
        run: the run.
        views: the adversaries, of ``server``, ``sums`` and ``colluding``.
        trap: the crafted entries.
        batch: number of samples of a client; None means a round of training on all its samples.
        steps: number of local steps on the batch.
        answered: exchanges of a round with the crafted message, by client; None requests updates and discards the
            clients' new state.
        groups: the clients' groups, for the report.
        reference: the server's own rows, whose mean is a baseline.
        most: maximum number of clients in ``answered`` to read; None means all.

    Returns:
        One row per client and view with ``read``, the number of the client's samples reconstructed at 40 dB or more,
        their ``share``, and the mean ``psnr`` and ``ssim``; the baselines ``grey`` and ``mean``; and the images.
    """
    module, pixels = run.module, Pixels.of(run.module.federation)
    rows, readings = list[Row](), list[Reading]()
    asked: dict[int, _Asked] = {}
    cohort = [*answered] if answered is not None else [*module.cohort(module.completed_rounds)]

    def ask(client: int) -> _Asked:
        if client not in asked:
            asked[client] = _asked(run, trap, pixels, client, batch, steps, answered)
        return asked[client]

    for client in run.each(run.clients if answered is None else sorted(answered)[:most]):
        own = ask(client)
        originals = pixels.of_rows(own.rows)
        where = {"client": client, "group": (groups or {}).get(client, "")}
        for view in views:
            every = [own, *(ask(other) for other in cohort if other != client)] if view.sums else [own]
            change = seen(view, [one.message for one in every], module.weighting)
            images = _nearest(read(*trap.layers(change)), originals, pixels)
            scores = _scores(images, originals)
            rows.append({"view": view.name, "assumption": "seen", "variant": trap.layer, **where, **scores})
            labels = pixels.federation.targets[own.rows].tolist()
            readings.append(Reading(client, view.name, images.cpu(), originals.cpu(), labels))
        for name, image in baselines(pixels, reference).items():
            scores = _scores(image.expand_as(originals), originals)
            rows.append({"view": BASELINE, "assumption": "", "variant": name, **where, **scores})
    return rows, readings


def _scores(images: Tensor, originals: Tensor) -> dict[str, float]:
    near = psnr(images, originals.to(images)).clamp(max=EXACT)
    alike = float(ssim(images, originals.to(images)).mean())
    number = int((near >= READ).sum())
    return {"read": float(number), "share": number / len(near), "psnr": float(near.mean()), "ssim": alike}


def _nearest(found: Tensor, originals: Tensor, pixels: Pixels) -> Tensor:
    """Return the nearest reconstruction of each original, or a grey image if there are none."""
    shape = originals.shape[1:]
    images = pixels.from_net(found.view(-1, *shape)).clamp(0, 1)
    images = images[images.flatten(1).isfinite().all(1)]
    if not len(images):
        return torch.full_like(originals, 0.5)
    distance = torch.cdist(originals.flatten(1).double(), images.flatten(1).double())
    return images[distance.argmin(1)].to(originals)


def _asked(
    run: Run,
    trap: Trap,
    pixels: Pixels,
    client: int,
    batch: int | None,
    steps: int,
    answered: Mapping[int, tuple[State, State]] | None,
) -> _Asked:
    """Return the change of the sorting layer from a client's update."""
    module = run.module
    rows = module.federation.train[client]
    if batch is not None and answered is None:
        rng = seeding.stream(module.seed, "attack.imprint", client=client)
        rows = rows[seeding.permutation(rng, len(rows))[:batch].to(rows.device)]
    if answered is not None:
        received, up = answered[client]
    elif trap.front is not None:
        received = {**module.server_state(), **trap.entries}
        up = _behind(run, trap, pixels, client, rows, batch, steps)
    else:
        received = trap.sent(module.message_down(client))
        up = _answer(module, client, received, rows if batch is not None else None, run.protect, steps)
    change = {name: received[name].to(up[name]) - up[name] for name in trap.entries if name.startswith(trap.layer)}
    return _Asked(rows, Message(client, change, len(rows)))


def _answer(
    module: FederatedModule, client: int, received: State, rows: Tensor | None, protect: Protection | None, steps: int
) -> State:
    """Return a client's update after a few steps on some of its samples, or after a whole round."""
    if rows is not None:
        return small_update(module, client, rows, protect, steps, received)[1]
    me = module.simulation.me(client, module.setting())
    (one,) = train_clients(module, settled(module.engine), {client: received}, [me])
    message = Message(client, one.up, len(me.data))
    if protect is not None:
        protect(received, message)
    return message.tensors


def _behind(run: Run, trap: Trap, pixels: Pixels, client: int, rows: Tensor, batch: int | None, steps: int) -> State:
    """Return the update of a client with a layer in front of its net, by plain SGD on the method's loss."""
    module, local, front = run.module, run.module.local, trap.front
    assert front is not None
    if local.not_plain:
        raise FederationError(f"Behind a layer in front clients take steps of plain SGD: leave {local.not_plain} out.")
    labels = module.federation.targets[rows]
    if module.federation.label_maps is not None:
        labels = module.federation.label_maps[client][labels]
    whole = torch.arange(len(rows), device=rows.device)
    if batch is not None:
        batches = [whole] * steps
    else:
        rng = seeding.stream(module.seed, "attack.imprint.batches", client=client)
        orders = (seeding.permutation(rng, len(rows)).to(rows.device) for _ in range(local.epochs))
        batches = [part for order in orders for part in torch.split(order, local.batch_size)]
    state = {**module.server_state(), **trap.entries}
    trained = (*trap.entries, *(name for name in module.trainable_names if name in state))
    taken = LocalSteps(local.lr, batches, local.weight_decay, local.momentum, trained)
    plain = _plain(module)

    def loss(own: State, x: Tensor, y: Tensor) -> Tensor:
        inner = {name.removeprefix(f"{FRONT}."): own[name] for name in trap.entries}
        return plain(own, torch.func.functional_call(front, inner, (x,)), y)

    x = pixels.to_net(pixels.of_rows(rows), module.compute_dtype)
    change = taken.change(loss, state, trained, x, labels)
    message = Message(client, {name: (state[name] - change[name]).detach() for name in trained}, len(rows))
    if run.protect is not None:
        run.protect(state, message)
    return message.tensors


def _strength(module: FederatedModule, front: Imprint, x: Tensor, y: Tensor, steps: int) -> float:
    """Return the strength of a layer in front at which a local round changes it by about ``MOVED``, relatively."""
    state = {name: value.detach() for name, value in module.server_state().items()}
    (found,) = torch.autograd.grad(_plain(module)(state, front(x), y), [front.weight])
    most = float((found.abs().amax(0) / front.weight.detach().abs().amax(0)).max()) * module.local.lr * steps
    return MOVED / most if most > 0 else 1.0


def _plain(module: FederatedModule) -> Loss:
    return lambda state, x, y: module.batch_loss(state, x, y, training=False)[0]
