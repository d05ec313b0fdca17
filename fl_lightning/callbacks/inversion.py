"""Model inversion on the clients of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer

from fl_lightning.callbacks.attacks import ALL_VIEWS, AttackCallback
from fl_lightning.errors import FederationError
from fl_lightning.privacy.data import attack_data, deal_shadows
from fl_lightning.privacy.figures import images_figure
from fl_lightning.privacy.inversion import Inversion, Reconstructed, invert
from fl_lightning.privacy.judge import EPOCHS, Judge
from fl_lightning.privacy.report import Report, Row
from fl_lightning.privacy.shadows import train_shadows
from fl_lightning.privacy.wiretap import Run, Wire
from fl_lightning.ranges import Count, NonNegative

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Candidate weights of the total variation, and number of clients to select one on.
TRIED, TUNED = (0.001, 0.01, 0.1, 1.0, 3.0), 2


class ModelInversionCallback(AttackCallback):
    """Reconstructs images of a client's classes from the models that adversaries have of it.

    Minimises the cross-entropy of the class, total variation and squared norm by Adam, over pixels in [0, 1]. Reported
    for each client, view and assumption: ``psnr`` (dB) and ``ssim`` to the mean of up to 100 of the client's training
    images of the class, and ``attack_acc``, the share of reconstructions that an independently trained classifier (the
    judge) assigns to the class; higher is worse for the client. The strongest attack has the highest PSNR. The
    baselines ``grey``, ``mean`` and ``class mean`` (of the adversary's own samples) need no model: a model reveals
    information only if the attack is better.

    The figure ``inversion/<view>``, in TensorBoard and the log folder, shows the mean of every class above a
    reconstruction, with PSNR and SSIM. All reconstructions are saved as ``inversion.pt`` in the log folder.

    Args:
        views: the adversaries.
        steps: number of steps of Adam.
        starts: number of reconstructions of each class.
        rate: learning rate of Adam.
        variation: weight of the total variation; None selects one of ``TRIED`` on the adversary's own federation,
            trained for the same number of rounds.
        norm: weight of the squared norm.
        most_classes: maximum number of reconstructed classes of a client.
        judge_epochs: number of training epochs of the judge.
        judge: file of the judge, for other runs on the same data; created if missing.
        clients: number of attacked clients, the most recent ones (after a test, random ones); None means all.
        every: also attack every ``every`` rounds; None attacks at the end only.
        memory: number of a client's messages that the server's view uses.
        group: name in the federation's ``meta`` by which the report groups clients.
        folder: folder of the report; None means the Trainer's log folder.
    """

    attack = "inversion"
    metric_prefix = "inversion"
    by = "psnr"

    def __init__(
        self,
        views: Sequence[str] = ALL_VIEWS,
        steps: Count = 500,
        starts: Count = 10,
        rate: NonNegative = 0.1,
        variation: NonNegative | None = 1.0,
        norm: NonNegative = 1e-4,
        most_classes: Count = 10,
        judge_epochs: Count = EPOCHS,
        judge: str | None = None,
        clients: Count | None = 10,
        every: Count | None = None,
        memory: Count = 3,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        super().__init__(views, clients, every, memory, group, folder)
        self.inversion = Inversion(steps, starts, rate, 1.0 if variation is None else variation, norm)
        #: Whether ``variation`` has to be selected.
        self.untuned = variation is None
        self.most_classes, self.judge_epochs, self.judge_path = most_classes, judge_epochs, judge
        #: The reconstructions of the last attack.
        self.images: list[Reconstructed] = []
        self._judge: Judge | None = None

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Train the judge if needed, and reconstruct."""
        module = run.module
        if self._judge is None:
            self._judge = Judge.trained(module.federation, module.seed, self.judge_epochs, self.judge_path)
        if self.untuned:
            self.inversion, self.untuned = self._tuned(trainer, run), False
        reference = attack_data(module.federation, [], module.seed).reference
        rows, self.images = invert(
            run, self.views, self.inversion, self._judge, reference, self._groups, self.most_classes
        )
        self._show(trainer, module.completed_rounds)
        return rows

    def notes(self) -> dict[str, Any]:
        """Return the judge's own accuracy and the prior."""
        assert self._judge is not None
        return {
            "accuracy of the judging classifier": round(self._judge.accuracy, 4),
            "weight of the total variation": self.inversion.variation,
        }

    def run_metrics(self) -> dict[str, float]:
        """Return the last report's metrics and the judge's accuracy."""
        judged = {} if self._judge is None else {"inversion_judge_acc": 100 * self._judge.accuracy}
        return super().run_metrics() | judged

    def _tuned(self, trainer: Trainer, run: Run) -> Inversion:
        """Select the weight of the total variation that is best on clients whose samples are known."""
        module, federation = run.module, run.module.federation
        if self._initial is None or not self._began:
            raise FederationError(
                "The initial weights of the run are unknown, as the module was trained before: pass a new module and "
                "ckpt_path, or a number as variation."
            )
        clients = federation.num_clients
        data = attack_data(federation, [], module.seed, shadow_clients=clients)
        size = int(federation.train.sizes.median())
        dealt = deal_shadows(data.pool, 1, clients, size, module.seed)
        share = getattr(module.datamodule, "fraction", 1.0)
        shadow, *_ = train_shadows(
            self._initial, federation, dealt, module.completed_rounds, trainer, self.memory, share
        )
        some = Wire(memory=self.memory)
        for client in shadow.run.clients[:TUNED]:
            for received, sent in shadow.run.wire.exchanged(client):
                some.hand(client, received)
                some.note(client, sent)
        views = [view for view in self.views if view.name != "insider"][:1] or self.views[:1]
        own = Run(shadow.run.module, some, shadow.run.private)
        found: dict[float, float] = {}
        for weight in TRIED:
            tried = replace(self.inversion, variation=weight, starts=1)
            assert self._judge is not None
            rows, _ = invert(own, views, tried, self._judge, data.reference, most_classes=self.most_classes)
            best = Report("inversion", "", 0, rows, self.by).strongest()
            found[weight] = -torch.inf if best is None else best[self.by]
        return replace(self.inversion, variation=max(found, key=lambda weight: found[weight]))

    def _show(self, trainer: Trainer, rounds: int) -> None:
        for view in dict.fromkeys(one.view for one in self.images):
            first = next(one for one in self.images if one.view == view)
            if first.means.dim() == 4:
                self.picture(trainer, f"inversion/{view}", partial(_figure, first), rounds)
        folder = self.folder or trainer.log_dir
        if folder is not None and trainer.is_global_zero:
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save([one._asdict() for one in self.images], Path(folder) / "inversion.pt")


def _figure(found: Reconstructed) -> Figure:
    """Draw a column per class: its mean above the reconstruction from the first start."""
    titles = [f"class {label}" for label in found.classes]
    titles[0] = f"client {found.client}\n{titles[0]}"
    return images_figure(found.means.float(), found.images[:, 0].float(), titles)
