"""Gradient leakage from the updates of a run's clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer

from fl_lightning.callbacks.attacks import AttackCallback
from fl_lightning.metrics import psnr
from fl_lightning.privacy.data import attack_data
from fl_lightning.privacy.figures import images_figure
from fl_lightning.privacy.gradients import Matching
from fl_lightning.privacy.leakage import EXACT, Leaked, leak
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.wiretap import Run
from fl_lightning.ranges import Count, NonNegative

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class GradientLeakageCallback(AttackCallback):
    """Reconstructs a small batch from the update that a client would send after a few steps on it.

    Updates of whole rounds on hundreds of samples do not reveal single samples; this is the worst case of a client with
    very little data. The attack requests the update that the client would send in the next round if it had only
    ``batch`` samples, and discards the client's new state.

    Reported for each client, view, assumption and variant (``analytic`` and ``rank_one`` if the first layer is dense or
    factorised and the batch is one sample, ``matching``): ``psnr`` (dB) and ``ssim`` to the batch and ``label_acc``,
    the share of recovered labels; and the baselines ``grey`` and ``mean``, which need no message. The view
    ``other_client`` sees no update and has no results. The outsider can compare an up message only with the common
    initial weights, so it succeeds in the first round only.

    The figure ``leakage/<view>``, in TensorBoard and the log folder, shows the best reconstructions below their
    originals.

    Args:
        views: the adversaries.
        batch: number of samples in the batch.
        steps: number of steps of Adam.
        starts: number of restarts, of which the best match is kept.
        rate: learning rate of Adam.
        variation: weight of the total variation.
        signed: whether Adam uses the signs of the gradient.
        local_steps: number of the client's steps, all on the batch.
        clients: number of attacked clients, the most recent ones (after a test, random ones); None means all.
        every: also attack every ``every`` rounds; None attacks at the end only.
        group: name in the federation's ``meta`` by which the report groups clients.
        folder: folder of the report; None means the Trainer's log folder.
    """

    attack = "leakage"
    metric_prefix = "leakage"
    by = "psnr"

    def __init__(
        self,
        views: Sequence[str] = ("outsider", "server", "insider"),
        batch: Count = 1,
        steps: Count = 500,
        starts: Count = 1,
        rate: NonNegative = 0.1,
        variation: NonNegative = 0.1,
        signed: bool = True,
        local_steps: Count = 1,
        clients: Count | None = 3,
        every: Count | None = None,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        super().__init__(views, clients, every, 1, group, folder)
        self.batch, self.local_steps = batch, local_steps
        self.matching = Matching(steps, starts, rate, variation, signed)
        #: The reconstructions of the last attack.
        self.images: list[Leaked] = []

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Request updates and reconstruct."""
        module = run.module
        reference = attack_data(module.federation, [], module.seed).reference
        initial = self._initial.server_state() if self._initial is not None and self._began else None
        rows, self.images = leak(
            run,
            self.views,
            self.matching,
            self.batch,
            self._groups,
            self.local_steps,
            initial,
            reference,
            self._hidden,
        )
        self._show(trainer, module.completed_rounds)
        return rows

    def _show(self, trainer: Trainer, rounds: int) -> None:
        """Log the best reconstructions of every view."""
        for view in dict.fromkeys(one.view for one in self.images):
            best: dict[int, Leaked] = {}
            for one in (one for one in self.images if one.view == view and one.images.dim() == 4):
                kept = best.get(one.client)
                if kept is None or _quality(one) > _quality(kept):
                    best[one.client] = one
            if best:
                shown = [*best.values()]
                self.picture(trainer, f"leakage/{view}", partial(_figure, shown), rounds)

    def notes(self) -> dict[str, Any]:
        """Return the size of the batch and the number of steps."""
        return {"samples of the batch": self.batch, "local steps": self.local_steps}


def _quality(one: Leaked) -> float:
    return float(psnr(one.images, one.originals.to(one.images)).clamp(max=EXACT).mean())


def _figure(found: Sequence[Leaked]) -> Figure:
    """Draw the best reconstruction of every client next to its batch, with the recovered labels."""
    titles = []
    for one in found:
        told = ",".join(map(str, one.labels)) or "?"
        titles += [f"client {one.client}, {one.variant}\nlabels {','.join(map(str, one.true))}, found {told}"]
        titles += [""] * (len(one.originals) - 1)
    originals, images = (torch.cat([getattr(one, name).float() for one in found]) for name in ("originals", "images"))
    return images_figure(originals, images, titles)
