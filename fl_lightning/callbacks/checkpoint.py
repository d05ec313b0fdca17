"""``FederatedCheckpoint``: checkpoints of the best and the last round, and on signals."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning.arguments import NamedArguments
from fl_lightning.module import FederatedModule
from fl_lightning.ranks import RankError
from fl_lightning.signals import STOPS, alone

#: Exceptions that leave a consistent state.
WHOLE = (*STOPS, RankError)


#: Metric of the best round if data is held out for validation.
MONITOR = "val/acc"


class FederatedCheckpoint(NamedArguments, ModelCheckpoint):
    """A ModelCheckpoint whose ``last.ckpt`` is always the last round, even if an earlier one is the best.

    In Lightning's ModelCheckpoint, ``last.ckpt`` is the last saved checkpoint: the best round if a metric is monitored.
    If a signal or a lost process ends the run, ``last.ckpt`` contains the stages completed so far. A run without
    validation has only ``last.ckpt``.

    Args:
        monitor: the metric of the best round; None takes the task's headline metric, such as ``val/acc``, if data is
            held out for validation, and keeps only the last round otherwise.
        mode: ``max`` or ``min``, for a given metric.
        filename: file name of the best round.
        kwargs: further arguments of ModelCheckpoint.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        filename: str | None = "best",
        **kwargs: Any,
    ) -> None:
        super().__init__(monitor=monitor or MONITOR, mode=mode, filename=filename, **{"save_last": True, **kwargs})
        self._chosen = monitor is not None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Select the task's headline metric, or keep only the last round if nothing is held out."""
        if not self._chosen and isinstance(pl_module, FederatedModule):
            measure = pl_module.task.measure
            self.monitor, self.mode = f"val/{measure.name}", "max" if measure.higher_is_better else "min"
            self.kth_value = torch.tensor(-measure.sign * torch.inf)
        federation = getattr(getattr(trainer, "datamodule", None), "federation", None)
        if not self._chosen and federation is not None and federation.val is None:
            self.monitor, self.save_top_k = None, 0
        super().setup(trainer, pl_module, stage)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the round unless it was saved after validation."""
        super().on_train_epoch_end(trainer, pl_module)
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the completed stages when a signal or a lost process ends the run; other ranks may be gone."""
        super().on_exception(trainer, pl_module, exception)
        if not isinstance(exception, WHOLE) or trainer.fast_dev_run or trainer.state.fn != "fit":  # type: ignore[attr-defined]
            return
        with alone(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: Any) -> None:
        if self.monitor is None or _validates(trainer):
            super()._save_topk_checkpoint(trainer, monitor_candidates)


def _validates(trainer: Trainer) -> bool:
    batches = trainer.num_val_batches
    return trainer.enable_validation and bool(sum(batches) if isinstance(batches, list) else batches)
