"""Progress bars count rounds and clients, and otherwise behave as Lightning's own."""

from __future__ import annotations

import inspect
import io
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import ProcessingSpeedColumn, RichProgressBarTheme
from rich.progress import Progress
from torch import Tensor, nn

from fl_lightning.callbacks import (
    FederatedCallback,
    FederatedRichProgressBar,
    FederatedTQDMProgressBar,
    federated_progress_bar,
)
from fl_lightning.wire import Message

COHORTS = [[4, 1, 7], [2, 3], [0, 5, 6, 8]]


class Rounds(LightningModule):
    """One batch per epoch; the round hooks are called by hand in the training step."""

    def __init__(self, federated: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(1, 1)
        self.federated = federated
        self.seen: list[tuple[str, Any, Any]] = []
        self.metrics: list[str] = []
        self.displays: list[Any] = []

    def hook(self, name: str, *args: Any) -> None:
        for callback in self.trainer.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(self.trainer, self, *args)

    def look(self) -> None:
        """Note what the train bar shows."""
        bar = self.trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar):
            shown = bar.train_progress_bar
            self.seen.append((shown.desc.removesuffix(": "), shown.n, shown.total))
            self.displays.append(shown)
        elif isinstance(bar, RichProgressBar) and bar.progress is not None:
            task = bar.train_progress_bar
            self.seen.append((task.description.rstrip(), task.completed, task.total))
            self.displays.append(bar.progress)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.federated:
            return
        cohort = COHORTS[self.current_epoch]
        self.hook("on_round_start", self.current_epoch, cohort)
        for client in cohort:
            self.look()
            self.hook("on_client_end", client, Message(client, {}, 1))
        self.look()
        self.log("loss", 0.125 + self.current_epoch, prog_bar=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Note the metrics beside the bar: those of the round are there before validation begins."""
        bar = self.trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar):
            self.metrics.append(getattr(bar.train_progress_bar, "postfix", ""))
        elif isinstance(bar, RichProgressBar) and bar._metric_component is not None:
            self.metrics.append(" ".join(bar._metric_component._generate_metrics_texts()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(bar: ProgressBar, federated: bool = True, epochs: int = 3) -> Rounds:
    module = Rounds(federated)
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=[bar],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loader = torch.utils.data.DataLoader(torch.zeros(1, 1))
    trainer.fit(module, loader, torch.utils.data.DataLoader(torch.zeros(1, 1)))
    return module


def distinct(displays: list[Any]) -> int:
    return len({id(display) for display in displays})


def terminal() -> dict[str, Any]:
    return {"file": io.StringIO(), "force_terminal": True, "width": 120}


def plain(text: str) -> str:
    """Text without terminal control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def expected(description: str) -> list[tuple[str, int, int]]:
    return [(description.format(r + 1), n, len(c)) for r, c in enumerate(COHORTS) for n in range(len(c) + 1)]


def test_tqdm_counts_clients_of_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    module = fit(FederatedTQDMProgressBar())
    assert module.seen == expected("Round {}")
    assert module.metrics == ["loss=0.125", "loss=1.120", "loss=2.120"]
    assert distinct(module.displays) == 1
    written = capsys.readouterr().out
    for text in ("Round 1: ", " 0/3 ", " 3/3 ", "Round 2: ", " 2/2 ", "Round 3: ", " 4/4 ", "loss=2.120", "Validation"):
        assert text in written
    assert "Epoch" not in written
    assert not re.search(r"Round[^\r\n]* 1/1 ", written)


def test_tqdm_draws_every_so_many_clients(capsys: pytest.CaptureFixture[str]) -> None:
    module = fit(FederatedTQDMProgressBar(refresh_rate=2))
    assert [n for _, n, total in module.seen if total == 3] == [0, 0, 2, 3]
    assert [n for _, n, total in module.seen if total == 4] == [0, 0, 2, 2, 4]


def test_tqdm_can_leave_each_rounds_bar(capsys: pytest.CaptureFixture[str]) -> None:
    module = fit(FederatedTQDMProgressBar(leave=True))
    assert module.seen == expected("Round {}")
    assert distinct(module.displays) == 3
    lines = capsys.readouterr().out.split("\n")
    assert [any(f"Round {r + 1}: 100%" in line for line in lines) for r in range(3)] == [True] * 3


def test_rich_counts_clients_of_each_round() -> None:
    console = terminal()
    module = fit(FederatedRichProgressBar(console_kwargs=console))
    assert module.seen == expected("Round {}/3")
    assert module.metrics == ["loss: 0.125", "loss: 1.125", "loss: 2.125"]
    assert distinct(module.displays) == 1
    written = plain(console["file"].getvalue())
    assert "Round 3/3" in written
    assert "4/4" in written
    assert "loss: 2.125" in written
    assert "Epoch" not in written


def test_rich_speed_is_that_of_the_whole_round() -> None:
    bar = FederatedRichProgressBar(console_kwargs=terminal())
    (speed,) = (c for c in bar.configure_columns(Trainer(logger=False)) if isinstance(c, ProcessingSpeedColumn))
    now = [0.0]
    progress = Progress(speed, get_time=lambda: now[0], auto_refresh=False)
    task = progress.add_task("", total=10)
    assert speed.render(progress.tasks[0]).plain == "0.00it/s"
    now[0] = 4.0  # eight clients trained together end within a moment
    for done in range(1, 9):
        now[0] += 1e-6
        progress.update(task, completed=done)
    assert speed.render(progress.tasks[0]).plain == "2.00it/s"
    now[0] = 5.0
    progress.update(task, completed=10)
    now[0] = 100.0
    assert speed.render(progress.tasks[0]).plain == "2.00it/s"


def test_rich_can_leave_each_rounds_bar() -> None:
    console = terminal()
    module = fit(FederatedRichProgressBar(leave=True, console_kwargs=console))
    assert module.seen == expected("Round {}/3")
    assert distinct(module.displays) == 3
    written = plain(console["file"].getvalue())
    assert all(re.search(rf"Round {r + 1}/3 .* {len(c)}/{len(c)} ", written) for r, c in enumerate(COHORTS))


def test_rich_keeps_the_themes_description() -> None:
    bar = FederatedRichProgressBar(theme=RichProgressBarTheme(description="bold"), console_kwargs=terminal())
    assert {description for description, _, _ in fit(bar).seen} == {f"[bold]Round {r + 1}/3" for r in range(3)}


def test_rich_without_a_known_number_of_rounds() -> None:
    bar = FederatedRichProgressBar(console_kwargs=terminal())
    bar._trainer = Trainer(max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert bar._describe(5).rstrip() == "Round 6"


@pytest.mark.parametrize("bar", [FederatedTQDMProgressBar(refresh_rate=0), FederatedRichProgressBar(refresh_rate=0)])
def test_a_bar_that_is_off_writes_nothing(bar: ProgressBar, capsys: pytest.CaptureFixture[str]) -> None:
    fit(bar)
    assert capsys.readouterr().out == ""


def test_rich_is_as_quiet_as_lightnings_where_there_is_no_terminal() -> None:
    lines = []
    for kind in (RichProgressBar, FederatedRichProgressBar):
        console = {"file": io.StringIO(), "force_terminal": False, "width": 120}
        fit(kind(console_kwargs=console))
        lines.append(console["file"].getvalue().count("\n"))
    assert lines[0] == lines[1] <= 2


@pytest.mark.parametrize("kind", [FederatedTQDMProgressBar, FederatedRichProgressBar])
def test_other_modules_still_get_a_bar(kind: type[ProgressBar], capsys: pytest.CaptureFixture[str]) -> None:
    bar = kind()
    fit(bar, federated=False)
    if isinstance(bar, TQDMProgressBar):
        assert bar.train_progress_bar.n == 1
    else:
        assert bar.train_progress_bar.completed == 1  # type: ignore[attr-defined]


def test_tqdm_settings_are_taken_over() -> None:
    ours = federated_progress_bar(TQDMProgressBar(refresh_rate=7, process_position=2, leave=True))
    assert type(ours) is FederatedTQDMProgressBar
    assert (ours.refresh_rate, ours.process_position, ours._leave, ours.is_enabled) == (7, 2, True, True)


def test_rich_settings_are_taken_over() -> None:
    theme, console = RichProgressBarTheme(progress_bar="red"), {"width": 50}
    ours = federated_progress_bar(RichProgressBar(refresh_rate=7, leave=True, theme=theme, console_kwargs=console))
    assert type(ours) is FederatedRichProgressBar
    assert (ours.refresh_rate, ours._leave, ours.theme, ours._console_kwargs) == (7, True, theme, console)


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_disabled_bar_stays_disabled(kind: type[ProgressBar]) -> None:
    bar = kind()
    bar.disable()
    assert federated_progress_bar(bar).is_disabled


@pytest.mark.parametrize(
    "bar",
    [
        FederatedTQDMProgressBar(),
        FederatedRichProgressBar(),
        ProgressBar(),
        type("Mine", (TQDMProgressBar,), {})(),
        type("Mine", (RichProgressBar,), {})(),
    ],
    ids=lambda bar: f"{type(bar).__name__}-{type(bar).__base__.__name__}",
)
def test_bars_of_others_are_left_alone(bar: ProgressBar) -> None:
    assert federated_progress_bar(bar) is None


@pytest.mark.parametrize("stock", [TQDMProgressBar, RichProgressBar])
def test_a_module_can_swap_the_trainers_bar(stock: type[ProgressBar], capsys: pytest.CaptureFixture[str]) -> None:
    class Swaps(Rounds):
        def configure_callbacks(self) -> list[Callback]:
            ours = federated_progress_bar(self.trainer.progress_bar_callback)
            return [] if ours is None else [ours]

    trainer = Trainer(max_epochs=1, callbacks=[stock()], accelerator="cpu", logger=False, enable_checkpointing=False)
    for _ in range(2):  # the second time it is there already
        trainer.fit(Swaps(), *[torch.utils.data.DataLoader(torch.zeros(1, 1))] * 2)
        bars = [callback for callback in trainer.callbacks if isinstance(callback, ProgressBar)]
        assert [type(bar).__name__ for bar in bars] == [f"Federated{stock.__name__}"]


def test_hooks_have_the_signatures_of_the_base() -> None:
    for kind in (FederatedTQDMProgressBar, FederatedRichProgressBar):
        for hook in ("on_round_start", "on_client_end"):
            assert inspect.signature(getattr(kind, hook)) == inspect.signature(getattr(FederatedCallback, hook))
