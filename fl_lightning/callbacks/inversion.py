"""Model inversion on the clients of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from fl_lightning.callbacks.attacks import ALL_VIEWS, AttackCallback, ViewName
from fl_lightning.errors import FederationError
from fl_lightning.privacy.data import attack_data
from fl_lightning.privacy.inversion import Inversion, Reconstructed, invert
from fl_lightning.privacy.judge import EPOCHS, Judge
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.wiretap import Run


class ModelInversionCallback(AttackCallback):
    """Reconstructs what the classes that a client holds look like, from models that adversaries have of it.

    Adam on the cross entropy of the class, total variation and squared norm, over pixels in [0, 1]. Reported for each
    client, view and assumption: ``psnr`` (dB) and ``ssim`` to the mean of up to 100 of the client's own training images
    of the class, and ``attack_acc``, the share of reconstructions in which a classifier that was trained apart sees the
    class; its own accuracy is noted. Strongest is the one of highest PSNR. Higher is worse for the client. The
    baselines ``grey``, ``mean`` and ``class mean`` (of the adversary's own samples) need no model: an attack shows what
    a model tells only where it is better than they are.

    With a TensorBoard logger the reconstructions are an image ``inversion/<view>``: one row for each class, the mean of
    the class first. The log folder gets them as ``inversion.pt``.

    Args:
        views: the adversaries.
        steps: steps of Adam.
        starts: reconstructions of each class.
        rate: learning rate of Adam.
        variation: weight of the total variation.
        norm: weight of the squared norm.
        most_classes: how many of a client's classes are reconstructed at most.
        judge_epochs: passes over the data in which the judging classifier is trained.
        judge: a file that keeps the judge for other runs on the same data; written if it is not there.
        clients: how many clients are attacked, those heard last (after a test, picked at random); None means all.
        every: attack after every so many rounds too, not only at the end.
        memory: how many messages of a client the server's view uses.
        group: what of the federation's ``meta`` divides the clients in the report.
        folder: where the report is written; None means the Trainer's log folder.
    """

    attack = "inversion"
    metric_prefix = "inversion"
    by = "psnr"

    def __init__(
        self,
        views: Sequence[ViewName] = ALL_VIEWS,
        steps: int = 500,
        starts: int = 10,
        rate: float = 0.1,
        variation: float = 1.0,
        norm: float = 1e-4,
        most_classes: int = 10,
        judge_epochs: int = EPOCHS,
        judge: str | None = None,
        clients: int | None = 10,
        every: int | None = None,
        memory: int = 3,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        super().__init__(views, clients, every, memory, group, folder)
        numbers = {"steps": steps, "starts": starts, "most_classes": most_classes, "judge_epochs": judge_epochs}
        for name, value in numbers.items():
            if value < 1:
                raise FederationError(f"{name} must be 1 or more, not {value}.")
        self.inversion = Inversion(steps, starts, rate, variation, norm)
        self.most_classes, self.judge_epochs, self.judge_path = most_classes, judge_epochs, judge
        #: The reconstructions of the last attack.
        self.images: list[Reconstructed] = []
        self._judge: Judge | None = None

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Train the judge, if need be, and reconstruct."""
        module = run.module
        if self._judge is None:
            self._judge = Judge.trained(module.federation, module.seed, self.judge_epochs, self.judge_path)
        reference = attack_data(module.federation, [], module.seed).reference
        rows, self.images = invert(
            run, self.views, self.inversion, self._judge, reference, self._groups, self.most_classes
        )
        self._show(trainer, module.completed_rounds)
        return rows

    def notes(self) -> dict[str, Any]:
        """The judge's own accuracy."""
        assert self._judge is not None
        return {"accuracy of the judging classifier": round(self._judge.accuracy, 4)}

    def run_metrics(self) -> dict[str, float]:
        """The last report's figures, and the judge's accuracy."""
        judged = {} if self._judge is None else {"inversion_judge_acc": 100 * self._judge.accuracy}
        return super().run_metrics() | judged

    def _show(self, trainer: Trainer, rounds: int) -> None:
        for view in dict.fromkeys(one.view for one in self.images):
            first = next(one for one in self.images if one.view == view)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger) and first.means.dim() == 4:
                    logger.experiment.add_image(f"inversion/{view}", grid(first), rounds)
        folder = self.folder or trainer.log_dir
        if folder is not None and trainer.is_global_zero:
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save([one._asdict() for one in self.images], Path(folder) / "inversion.pt")


def grid(found: Reconstructed) -> Tensor:
    """One row for each class: its mean, then the reconstructions; shape (channels, height, width)."""
    from torchvision.utils import make_grid

    columns = torch.cat((found.means[:, None], found.images), 1)
    image: Tensor = make_grid(columns.flatten(0, 1), nrow=columns.shape[1], padding=1, pad_value=1.0)
    return image
