"""Progress bars that count the clients of a round.

To the Trainer a round is an epoch with one batch, so its own bars jump from 0/1 to 1/1. These show ``Round 3`` and
count trained clients; validation, test and prediction look as usual.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import ProcessingSpeedColumn
from rich.console import Console
from rich.progress import Task
from rich.text import Text

from fl_lightning.measure import ACCURACY
from fl_lightning.view import View
from fl_lightning.wire import Message


class FederatedTQDMProgressBar(TQDMProgressBar):
    """Lightning's TQDM bar, with rounds as epochs and clients as batches.

    Args:
        refresh_rate: number of clients between updates; 0 disables the bar.
        process_position: number of lines by which the bars are moved down.
        leave: whether to keep each round's bar on the screen.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, process_position, leave)
        self._clients: int | None = None
        self._trained = 0

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Reset the number of clients until the round starts."""
        self._clients = None
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Begin the round's bar."""
        self._clients, self._trained = len(cohort), 0
        bar = self.train_progress_bar
        bar.initial = 0
        bar.set_description(f"Round {round + 1}", refresh=False)
        bar.reset(total=len(cohort))

    def on_client_end(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Count the client."""
        self._trained += 1
        if self._should_update(self._trained, self._clients or 0):
            self._draw()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the round's metrics."""
        if self._clients is None:  # not a federated module
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif self.is_enabled:
            self._draw()
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def _draw(self) -> None:
        bar = self.train_progress_bar
        if not bar.disable:
            bar.n = self._trained
            bar.refresh()


class _MeanSpeedColumn(ProcessingSpeedColumn):
    """Mean speed over the whole bar; Rich's own, between updates, is meaningless if clients finish together."""

    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished else task.elapsed
        return Text(f"{task.completed / seconds if seconds else 0.0:.2f}it/s", style=self.style)


class FederatedRichProgressBar(RichProgressBar):
    """Lightning's Rich bar, with rounds as epochs and clients as batches; takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clients: int | None = None
        self._trained = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the number of clients until the round starts."""
        self._clients = None
        if self.is_enabled and self._leave and self.train_progress_bar_id is not None:
            self._stop_progress()
            self._init_progress(trainer)

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Begin the round's bar."""
        self._clients, self._trained = len(cohort), 0
        if self.is_disabled or self.progress is None:
            return
        description = self._describe(round)
        if self.train_progress_bar_id is None:
            self.train_progress_bar_id = self._add_task(len(cohort), description)
        else:
            if self.theme.description:
                description = f"[{self.theme.description}]{description}"
            self.progress.reset(self.train_progress_bar_id, total=len(cohort), description=description, visible=True)
        self.refresh()

    def on_client_end(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Count the client."""
        self._trained += 1
        self._update(self.train_progress_bar_id, self._trained)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the round's metrics."""
        if self._clients is None:  # not a federated module
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        else:
            self._update_metrics(trainer, pl_module)
            self.refresh()

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return Lightning's columns with the mean speed."""
        mean = _MeanSpeedColumn(self.theme.processing_speed)
        columns = super().configure_columns(trainer)
        return [mean if isinstance(column, ProcessingSpeedColumn) else column for column in columns]

    def _describe(self, round: int) -> str:
        """Return ``Round 3/100``, padded to the validation bar's description so that the bars stay aligned."""
        last = f"/{self.trainer.max_epochs}" if self.trainer.max_epochs not in (None, -1) else ""
        return f"Round {round + 1}{last}".ljust(len(self.validation_description))


class RoundProgress(ProgressBar):
    """The command line's progress display: round, clients done, local steps per second, mean score, remaining time.

    ``Trainer(callbacks=[RoundProgress()])`` uses it from Python. In a notebook it is one live line, without a
    terminal a plain line every ten seconds.

    Args:
        quiet: whether to show nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__()
        self.quiet = quiet
        self._view: View | None = None
        self._clients = self._trained = self._before = 0
        self._began = 0.0
        self._speed = self._score = ""

    def disable(self) -> None:
        """Hide progress from now on."""
        self.quiet = True

    def enable(self) -> None:
        """Show progress again."""
        self.quiet = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print the module's text above the progress line."""
        if self._view is not None:
            self._view.print(" ".join(map(str, args)))
        else:
            print(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start at the first round, or at the one of a checkpoint."""
        rounds = trainer.max_epochs if trainer.max_epochs not in (None, -1) else None
        self._view = View("round", rounds, trainer.current_epoch, self.quiet)

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Reset the count of clients."""
        self._clients, self._trained, self._began = len(cohort), 0, time.monotonic()
        self._before = _steps(pl_module)
        self._update(round)

    def on_client_end(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Count the client."""
        self._trained += 1
        self._update(trainer.current_epoch)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Measure the round's speed."""
        seconds = time.monotonic() - self._began
        if seconds > 0:
            self._speed = f"{(_steps(pl_module) - self._before) / seconds:,.0f} steps/s"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the mean of the clients' headline metric."""
        module: Any = pl_module
        measure = module.task.measure if hasattr(module, "task") else ACCURACY
        known = [split for split in ("val", "test") if f"{split}/{measure.name}" in trainer.callback_metrics]
        if known and not trainer.sanity_checking:
            mean = measure.scale * float(trainer.callback_metrics[f"{known[0]}/{measure.name}"])
            self._score = f"{known[0]} {measure.title} {mean:{'.1f' if measure.share else '.4g'}}{measure.unit}"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Advance to the next round."""
        if self._view is not None:
            self._view.update(trainer.current_epoch + 1, self._counted(), self._speed, self._score)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last line on the screen."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the display when a run is interrupted, too."""
        if self._view is not None:
            self._view.close()
            self._view = None

    on_exception = teardown  # type: ignore[assignment]

    def _update(self, round: int) -> None:
        if self._view is not None:
            # Validation takes the rest of the step to the next round.
            part = 0.9 * self._trained / max(self._clients, 1)
            self._view.update(round + part, self._counted(), self._speed, self._score)

    def _counted(self) -> str:
        return f"clients {self._trained}/{self._clients}" if self._clients else ""


def _steps(module: Any) -> int:
    """Return the number of local steps that all clients have taken so far."""
    snapshots = getattr(module, "snapshots", {})
    return sum(snapshots[client].steps for client in snapshots)


def federated_progress_bar(bar: ProgressBar | None) -> ProgressBar | None:
    """Return the federated bar that replaces one of Lightning's own, with the same settings.

    Args:
        bar: the Trainer's progress bar; None if it has none.

    Returns:
        The new bar, or None if there is none to replace, or it is federated already or a class of the user's own.
    """
    ours: FederatedTQDMProgressBar | FederatedRichProgressBar
    if type(bar) is TQDMProgressBar:
        ours = FederatedTQDMProgressBar(bar.refresh_rate, bar.process_position, bar._leave)
    elif type(bar) is RichProgressBar:
        ours = FederatedRichProgressBar(bar._refresh_rate, bar._leave, bar.theme, bar._console_kwargs)
    else:
        return None
    if not bar._enabled:
        ours.disable()
    return ours


def federated_progress_bars(bar: ProgressBar | None) -> list[ProgressBar]:
    """Return the callbacks that replace a Trainer's progress bar.

    Rich, Lightning's default, shows only warnings in a notebook without ipywidgets; there it is disabled, and
    :class:`RoundProgress` is used instead. It is still returned, since Lightning removes a bar only for a subclass.
    """
    ours = federated_progress_bar(bar)
    if ours is None:
        return []
    if isinstance(ours, FederatedRichProgressBar) and ours.is_enabled and _plain_notebook():
        ours.disable()
        return [RoundProgress(), ours]
    return [ours]


def _plain_notebook() -> bool:
    """Return whether this is a notebook without widgets."""
    return Console().is_jupyter and importlib.util.find_spec("ipywidgets") is None
