"""A malicious server that crafts what it sends, and reads samples out of the answers."""

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

#: Samples of a client in a picture.
SHOWN = 8


class ImprintCallback(AttackCallback):
    """Sends clients a layer that sorts the samples of a batch into bins, and reads those that are alone in one.

    The server is malicious (Fowl et al., 2022). ``first`` crafts the weights of the net's first two layers, which must
    be dense with a bias and a ReLU; ``front`` puts a layer of ``bins`` units in front of any net, for which clients
    must run what they are sent; they then take plain SGD steps on the method's loss. Behind secure aggregation (view
    ``sums``) the mean of all answers is read: a sample then has to be alone among all clients'.

    By default the run is not disturbed: each attacked client is asked once more, with ``batch`` of its samples and
    ``local_steps`` steps, and the answer is thrown away. With ``disturb`` the server sends the crafted message in round
    ``attacked_round`` of the run itself, to everybody, reads the answers of a whole round of local training, and takes
    its own model again where answers carry the crafted entries: this changes the run. One step gives away
    every sample that is alone in its bin. Several move the bins between the samples, and rows no longer count alike, so
    that less comes out the more steps there are; that is measured here, not claimed.

    Reported for each client and view: ``read``, its samples that came out at 40 dB or more, their ``share``, and mean
    ``psnr`` and ``ssim`` over all of its samples, each compared with what was read nearest to it; and the baselines
    ``grey`` and ``mean``. Originals above what was read are the picture ``imprint/<view>``.

    Args:
        views: the adversaries, of ``server``, ``sums`` and ``colluding``.
        place: which layer sorts.
        bins: units of a layer in front.
        batch: samples of the extra request; None means all that the client has, trained on as in a round.
        local_steps: steps of the extra request, all of them on the batch.
        disturb: send the crafted message in the run itself.
        attacked_round: the round in which that is done, from 0.
        clients: number of attacked clients, the most recent ones (after a test, random ones); None means all.
        every: attack after every so many rounds too, not only at the end.
        group: what of the federation's ``meta`` divides the clients in the report.
        folder: where the report is written; None means the Trainer's log folder.
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
            raise FederationError("In a run clients train the net that they have: set place='first' to disturb it.")
        if disturb and every is not None:
            raise FederationError("A run is disturbed in one round, attacked_round: leave every out.")
        self.place, self.bins, self.batch, self.local_steps = place, bins, batch, local_steps
        self.disturb, self.attacked_round = disturb, attacked_round
        #: What was read in the last attack.
        self.readings: list[Reading] = []
        self._trap: Trap | None = None
        self._sent: dict[int, State] = {}
        self._answers: dict[int, tuple[State, State]] = {}

    @property
    def changes_messages(self) -> bool:  # type: ignore[override]
        """Whether the run is disturbed."""
        return self.disturb

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start listening; refuse a net that cannot be crafted before the run begins."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._trap, self._sent, self._answers = None, {}, {}
            if federated(pl_module).shared_names:
                self._made(federated(pl_module))

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Craft what the client receives, in the round that is attacked."""
        if self.disturb and trainer.current_epoch == self.attacked_round:
            module = federated(pl_module)
            self._sent[client] = dict(message)
            message.update(self._made(module).sent(message))
        super().on_client_start(trainer, pl_module, client, message)

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Keep the answer."""
        super().on_message_up(trainer, pl_module, client, message)
        if client in self._sent and self._trap is not None:
            layer = self._trap.layer
            received = {n: v for n, v in self._trap.sent(self._sent[client]).items() if n.startswith(layer)}
            sent = {n: v.detach().clone() for n, v in message.tensors.items() if n in received}
            self._answers[client] = received, sent

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Take the server's own model again where answers carry what was crafted."""
        super().on_before_aggregate(trainer, pl_module, messages)
        for message in messages:
            before = self._sent.pop(message.client, None)
            if before is not None and self._trap is not None:
                message.tensors = {**message.tensors, **{name: before[name] for name in self._trap.entries}}

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Send what was crafted, unless that was done, and read."""
        module = run.module
        if not module.shared_names:  # nobody receives a model
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
        """The crafted message, and whether the run was disturbed."""
        whole = self.disturb or self.batch is None
        steps = "a whole round of local training" if whole else f"{self.batch} samples, {self.local_steps} local steps"
        layer = "in front of the net" if self.place == "front" else "instead of the net's first layers"
        how = (
            f"in round {self.attacked_round} of the run, which it disturbed" if self.disturb else "in an extra request"
        )
        return {"crafted": f"{layer}, {how}", "answers": steps}

    def state_dict(self) -> dict[str, Any]:
        """Answers to what was crafted, for a run that is resumed."""
        return {**super().state_dict(), "answers": {client: list(both) for client, both in self._answers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
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
    """A client's samples above what was read of them."""
    titles = [f"label {label}" for label in one.labels[:SHOWN]]
    titles[0] = f"client {one.client}\n{titles[0]}"
    return images_figure(one.originals[:SHOWN].float(), one.images[:SHOWN].float(), titles)
