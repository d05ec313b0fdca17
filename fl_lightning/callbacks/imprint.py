"""A malicious server that sends crafted weights and reads samples from the updates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningModule, Trainer

from fl_lightning.callbacks.attacks import AttackCallback, federated
from fl_lightning.errors import FederationError
from fl_lightning.privacy.crafting import Reading, Trap, imprint_clients
from fl_lightning.privacy.data import attack_data
from fl_lightning.privacy.figures import images_figure
from fl_lightning.privacy.pixels import Pixels
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.wiretap import Run
from fl_lightning.ranges import Count, CountOrZero, TwoOrMore
from fl_lightning.wire import Message, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Maximum number of a client's samples in a figure.
SHOWN = 8


class ImprintCallback(AttackCallback):
    """Sends clients a crafted layer that sorts samples into bins, and reads samples that are alone in a bin.

    The server is malicious (Fowl et al., 2022). ``first`` crafts the weights of the net's first two layers, which must
    be dense with a bias and a ReLU; ``front`` inserts a layer of ``bins`` units in front of any net, for clients that
    train any model they receive, with plain SGD steps on the method's loss. With secure aggregation (view ``sums``) the
    mean of all updates is read: a sample then has to be alone in its bin among all clients' samples.

    By default the run does not change: each attacked client trains in an extra request, with ``batch`` of its samples
    and ``local_steps`` steps, and its new state is discarded. With ``disturb`` the server sends the crafted message to
    all clients in round ``attacked_round`` of the run, reads the updates of a whole round of local training, and
    restores its own model where messages contain crafted entries: this changes the run. One step reveals every sample
    that is alone in its bin. Further steps shift the bins and the weights of samples, so that more steps reveal less.

    Reported for each client and view: ``read``, the number of its samples reconstructed at 40 dB or more, their
    ``share``, and mean ``psnr`` and ``ssim`` over all its samples, each compared with the nearest reconstruction; and
    the baselines ``grey`` and ``mean``. The figure ``imprint/<view>`` shows originals above reconstructions.

    Args:
        views: the adversaries, of ``server``, ``sums`` and ``colluding``.
        place: the crafted layers: ``first`` or ``front``.
        bins: number of units of a layer in front.
        batch: number of samples of the extra request; None means a round of training on all of the client's samples.
        local_steps: number of steps of the extra request, all on the same batch.
        disturb: send the crafted message in the run itself.
        attacked_round: the round of the crafted message, from 0.
        clients: number of attacked clients, the most recent ones (after a test, random ones); None means all.
        every: also attack every ``every`` rounds; None attacks at the end only.
        group: name in the federation's ``meta`` by which the report groups clients.
        folder: folder of the report; None means the Trainer's log folder.
    """

    attack = "imprint"
    metric_prefix = "imprint"
    by = "share"
    allowed = ("server", "sums", "colluding")
    reason = "only a server crafts what clients receive"

    def __init__(
        self,
        views: Sequence[str] = ("server",),
        place: Literal["first", "front"] = "first",
        bins: TwoOrMore = 256,
        batch: Count | None = 8,
        local_steps: Count = 1,
        disturb: bool = False,
        attacked_round: CountOrZero = 0,
        clients: Count | None = 3,
        every: Count | None = None,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        super().__init__(views, clients, every, 1, group, folder)
        if disturb and place == "front":
            raise FederationError("In a run, clients train their own net: set place='first' with disturb.")
        if disturb and every is not None:
            raise FederationError("disturb attacks in one round, attacked_round: leave every out.")
        self.place, self.bins, self.batch, self.local_steps = place, bins, batch, local_steps
        self.disturb, self.attacked_round = disturb, attacked_round
        #: Reconstructions of the last attack.
        self.readings: list[Reading] = []
        self._trap: Trap | None = None
        self._sent: dict[int, State] = {}
        self._answers: dict[int, tuple[State, State]] = {}

    @property
    def changes_messages(self) -> bool:  # type: ignore[override]
        """Whether the run is changed."""
        return self.disturb

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start recording; refuse a net that cannot be crafted before the run begins."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._trap, self._sent, self._answers = None, {}, {}
            if federated(pl_module).shared_names:
                self._made(federated(pl_module))

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Replace the client's message by the crafted one in the attacked round."""
        if self.disturb and trainer.current_epoch == self.attacked_round:
            module = federated(pl_module)
            self._sent[client] = dict(message)
            message.update(self._made(module).sent(message))
        super().on_client_start(trainer, pl_module, client, message)

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Record the update."""
        super().on_message_up(trainer, pl_module, client, message)
        if client in self._sent and self._trap is not None:
            layer = self._trap.layer
            received = {n: v for n, v in self._trap.sent(self._sent[client]).items() if n.startswith(layer)}
            sent = {n: v.detach().clone() for n, v in message.tensors.items() if n in received}
            self._answers[client] = received, sent

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Restore the server's own entries in messages with crafted ones."""
        super().on_before_aggregate(trainer, pl_module, messages)
        for message in messages:
            before = self._sent.pop(message.client, None)
            if before is not None and self._trap is not None:
                message.tensors = {**message.tensors, **{name: before[name] for name in self._trap.entries}}

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Send the crafted message unless the run did, and read the updates."""
        module = run.module
        if not module.shared_names:  # clients receive no model
            return []
        reference = attack_data(module.federation, [], module.seed).reference
        answered = self._answers if self.disturb and self._answers else None
        views = self.views
        if self._hidden:
            views = [view for view in views if view.sums]
        rows, self.readings = imprint_clients(
            run,
            views,
            self._made(module),
            self.batch,
            self.local_steps,
            answered,
            self._groups,
            reference,
            self.clients,
        )
        self._show(trainer, module.completed_rounds)
        return rows

    def notes(self) -> dict[str, Any]:
        """Return the place of the crafted layer, and whether the run was changed."""
        whole = self.disturb or self.batch is None
        steps = "a whole round of local training" if whole else f"{self.batch} samples, {self.local_steps} local steps"
        layer = "in front of the net" if self.place == "front" else "instead of the net's first layers"
        how = (
            f"in round {self.attacked_round} of the run, which it disturbed" if self.disturb else "in an extra request"
        )
        return {"crafted": f"{layer}, {how}", "answers": steps}

    def state_dict(self) -> dict[str, Any]:
        """Return recorded updates, for a resumed run."""
        return {**super().state_dict(), "answers": {client: list(both) for client, both in self._answers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        super().load_state_dict(state_dict)
        self._answers = {client: (received, sent) for client, (received, sent) in state_dict["answers"].items()}

    def _made(self, module: Any) -> Trap:
        if self._trap is None or not self.disturb:
            reference = attack_data(module.federation, [], module.seed).reference
            steps = self.local_steps
            if self.batch is None:
                each = -(-int(module.federation.train.sizes.max()) // module.local.batch_size)
                steps = each * max(1, int(module.local.epochs))
            self._trap = Trap.made(module, Pixels.of(module.federation), reference, self.place, self.bins, steps)
        return self._trap

    def _show(self, trainer: Trainer, rounds: int) -> None:
        for view in dict.fromkeys(one.view for one in self.readings):
            first = next(one for one in self.readings if one.view == view)
            if first.originals.dim() == 4:
                self.picture(trainer, f"imprint/{view}", partial(_figure, first), rounds)


def _figure(one: Reading) -> Figure:
    """Draw a client's samples above their reconstructions."""
    titles = [f"label {label}" for label in one.labels[:SHOWN]]
    titles[0] = f"client {one.client}\n{titles[0]}"
    return images_figure(one.originals[:SHOWN].float(), one.images[:SHOWN].float(), titles)
