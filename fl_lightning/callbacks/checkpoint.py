"""``FederatedCheckpoint``: the best round, the last one, and what a signal leaves."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning.ranks import RankError
from fl_lightning.signals import STOPS, alone

#: The exceptions that are raised where nothing is half done.
WHOLE = (*STOPS, RankError)


class FederatedCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose ``last.ckpt`` always is the last round, also where the best one is an earlier.

    With Lightning's own, ``last.ckpt`` is the last checkpoint that was saved: the best round, where one is monitored.
    When a signal or the loss of a process ends the run ``last.ckpt`` has the stages that were complete by then. A run
    without validation has ``last.ckpt`` alone.

    Args:
        monitor: the metric that decides which round is the best.
        mode: ``max`` or ``min``.
        filename: name of the best round's file.
        kwargs: further arguments of ModelCheckpoint.
    """

    def __init__(
        self, monitor: str | None = "val/acc", mode: str = "max", filename: str | None = "best", **kwargs: Any
    ) -> None:
        super().__init__(monitor=monitor, mode=mode, filename=filename, **{"save_last": True, **kwargs})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the round, unless it was saved after its validation."""
        super().on_train_epoch_end(trainer, pl_module)
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what is complete when a signal or a lost process ends the run; others may be gone."""
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
