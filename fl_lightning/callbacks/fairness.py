"""Fairness metrics by round, and a table of sub-populations."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from fl_lightning.callbacks.base import Several
from fl_lightning.callbacks.pages import in_unit
from fl_lightning.errors import FederationError
from fl_lightning.federation import Split
from fl_lightning.loggers import step_of, tensorboards
from fl_lightning.metrics import ACCURACY, Measure, fairness_summary, group_means
from fl_lightning.metrics.fairness import (
    corrected_variance,
    corrected_worst_decile,
    fairness_intervals,
    gap_interval,
    scored,
)
from fl_lightning.module import FederatedModule
from fl_lightning.sheet import markdown

#: With more groups than this, only their gap is logged; the table lists all.
CURVES = 10
#: Columns of the table and their names in ``fairness_summary``.
COLUMNS = {
    "worst tenth": "worst10",
    "variance": "variance",
    "Jain index": "jain",
    "entropy": "entropy",
    "gain over Local": "local_gap",
    "worse than Local": "local_worse",
}
#: Scores shown in percent if they are shares; the variance is in percent squared already.
SCORES = {"worst10", "local_gap"}
Row = dict[str, str]


class FairnessCallback(Several):
    """Logs fairness metrics over clients, after every round and in the test.

    Logged under ``val/`` (after a round, if validation samples are held out) and ``test/``: ``variance`` (percent
    squared), ``variance_corrected`` and ``worst10_corrected`` (corrected for sampling noise of small test sets),
    ``jain``, ``entropy``, and, if clients form groups, ``gap`` and the groups' mean accuracies, ``acc_majority`` and
    ``acc_minority`` (``acc_<group>_<value>`` for more than two groups). With a TensorBoard logger,
    ``percent/val/acc_clients`` is the histogram over clients. ``local`` adds ``local_gap``, the mean gain over local
    training, and ``local_worse``, the share of clients that lose by federation. Clients that were not evaluated, as
    with ``limit_val_batches``, are left out.

    For tasks with another headline metric, this metric replaces accuracy, such as ``rmse_majority``. Gap and gain are
    positive if the majority, or the federation, is better, even if lower values are better; the variance of a metric
    that is not a share is in its units squared, and not corrected.

    At the end of a fit, a validation or a test, the table of sub-populations is written to the log folder as
    ``fairness_<split>.csv`` and ``fairness_<split>.md``, in percent.

    Modules that are not federated are supported if ``validation_step`` or ``test_step`` returns a dict with ``preds``
    (classes or scores), ``target`` and ``group`` (integers, one per sample). If the DataModule has a federation, the
    integers are clients; otherwise every integer is a group, and the gap is between the groups with the most and the
    fewest samples.

    Args:
        group: name in the federation's ``meta`` that groups the clients; if missing, they are one group.
        local: score of every client trained locally (accuracies as fractions), or the checkpoint of a finished run of
            Local on the same data and task.
        folder: folder of the table; None means the Trainer's log folder.
    """

    def __init__(self, group: str = "mode", local: list[float] | str | None = None, folder: str | None = None) -> None:
        self.group, self.local, self.folder = group, local, folder
        self._groups: Tensor | None = None
        self._names: list[str] = []
        self._local: dict[str, Tensor] = {}
        self._measure = ACCURACY
        self._tally = GroupTally()
        self._scores: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Group the clients, and read the scores of Local."""
        federation = getattr(trainer.datamodule, "federation", None)  # type: ignore[attr-defined]
        self._measure = pl_module.task.measure if isinstance(pl_module, FederatedModule) else ACCURACY
        if federation is None:
            self._groups, self._names = None, []
            return
        groups, self._names = federation.groups(self.group)
        self._groups = groups if self._names else None
        self._local = _local_accuracies(self.local, federation.num_clients)
        if "val" in self._local and federation.val is None:  # both splits have the same samples
            self._local.setdefault("test", self._local["val"])

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count correct predictions of a module that is not federated."""
        if not isinstance(pl_module, FederatedModule) and not trainer.sanity_checking:
            self._tally.add(outputs, type(pl_module).__name__)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation metrics."""
        if not trainer.sanity_checking:
            self._log(trainer, pl_module, _validated(pl_module))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the test metrics."""
        self._log(trainer, pl_module, "test")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table of the last validation."""
        self._write(trainer, pl_module, _validated(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table of a validation that is not part of a fit."""
        if trainer.state.fn == "validate":
            self._write(trainer, pl_module, _validated(pl_module))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table of the test."""
        self._write(trainer, pl_module, "test")

    def _log(self, trainer: Trainer, module: Any, split: Split) -> None:
        # Runs before the module's own hook, so use collected results instead of stored scores.
        accuracies = self._accuracies(trainer, module, split)
        logs = fairness_summary(accuracies, self._groups, self._local.get(split), self._measure)
        name_of = self._measure.name
        if isinstance(module, FederatedModule):
            del logs["worst10"]  # the module logs it
            sizes = module.federation.index(split).sizes
            if len(sizes) == len(accuracies) and self._measure == ACCURACY:
                samples = sizes.to(accuracies.device)
                logs["variance_corrected"] = corrected_variance(accuracies, samples)
                logs["worst10_corrected"] = corrected_worst_decile(accuracies, samples)
        if self._groups is not None and 1 < len(self._names) <= CURVES:
            means = group_means(accuracies, self._groups)
            logs |= {f"{name_of}_{name}": mean for name, mean in zip(self._names, means, strict=True)}
        for name, value in logs.items():
            module.log(f"{split}/{name}", value, on_step=False, on_epoch=True, batch_size=1)
        name, factor = in_unit(f"{split}/{name_of}_clients", self._measure)
        for logger in tensorboards(trainer):
            if len(known := scored(accuracies)):
                logger.experiment.add_histogram(name, factor * known, step_of(trainer))

    def _accuracies(self, trainer: Trainer, module: Any, split: Split) -> Tensor:
        """Return every client's score in the current evaluation."""
        if isinstance(module, FederatedModule):
            scores: Tensor = module.evaluator.headline(module.task)
            return scores
        federation = getattr(trainer.datamodule, "federation", None)  # type: ignore[attr-defined]
        if federation is None:
            self._groups, self._names = self._tally.groups()
        self._scores[split] = self._tally.accuracies(None if federation is None else federation.num_clients)
        self._tally = GroupTally()
        return self._scores[split]

    def table(self, accuracies: Tensor, local: Tensor | None = None) -> list[Row]:
        """Return the table: all clients, every group, and the gap between majority and minority.

        Args:
            accuracies: accuracy of every client, shape (clients,), NaN if not evaluated.
            local: accuracy of every client trained locally, if known.

        Returns:
            Rows with the same columns, numbers as text, accuracies in percent.
        """
        everyone, measure = torch.ones(len(accuracies), dtype=torch.bool), self._measure
        rows = [_row("all", accuracies, everyone, local, measure)]
        if self._groups is not None and len(self._names) > 1:
            rows += [_row(n, accuracies, self._groups == g, local, measure) for g, n in enumerate(self._names)]
            gap = measure.scale * fairness_summary(accuracies, self._groups, measure=measure)["gap"]
            low, high = (measure.scale * end for end in gap_interval(accuracies, self._groups, measure=measure))
            ends = f"{_printed(low, measure)} to {_printed(high, measure)}"
            told = {"population": "gap", measure.title: _printed(gap, measure), f"{measure.title} (95%)": ends}
            rows.append({**dict.fromkeys(rows[0], ""), **told})
        return rows

    def _write(self, trainer: Trainer, module: Any, split: Split) -> None:
        folder = self.folder or trainer.log_dir  # broadcast, so call it on every rank
        scores = module.evaluator.scores if isinstance(module, FederatedModule) else self._scores
        accuracies = scores.get(split)
        if accuracies is None or folder is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        rows, path = self.table(accuracies, self._local.get(split)), Path(folder) / f"fairness_{split}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        path.with_suffix(".md").write_text(markdown(list(rows[0]), (row.values() for row in rows)), encoding="utf-8")
        rank_zero_info(f"Sub-populations: {path.with_suffix('.md')}")


def _validated(module: LightningModule) -> Split:
    """Return the split used in validation."""
    return module.federation.validated if isinstance(module, FederatedModule) else "val"


class GroupTally:
    """Correct predictions of a module that is not federated, by client or group."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, outputs: Any, name: str) -> None:
        """Count the samples of a batch.

        Args:
            outputs: return value of the module's step.
            name: the module's name, for error messages.
        """
        if not isinstance(outputs, Mapping) or not {"preds", "target", "group"} <= outputs.keys():
            raise FederationError(
                f"FairnessCallback needs a federated method, not {name}, or a validation_step and test_step that "
                "return a dict with preds, target and group."
            )
        preds, target, group = (outputs[key].detach().cpu() for key in ("preds", "target", "group"))
        right = (preds.argmax(1) if preds.dim() > target.dim() else preds) == target
        self._parts.append((group.long(), right))

    def _counts(self) -> tuple[Tensor, Tensor]:
        """Return numbers of samples and of correct predictions by group."""
        if not self._parts:
            return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        groups, right = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        total = torch.bincount(groups)
        return total, torch.bincount(groups, weights=right.double(), minlength=len(total))

    def accuracies(self, clients: int | None = None) -> Tensor:
        """Return the accuracy of seen groups; with ``clients``, of all clients, NaN for unseen ones."""
        total, right = self._counts()
        if clients is None:
            return right[total > 0] / total[total > 0]
        padded = torch.full((clients,), float("nan"), dtype=torch.float64)
        padded[: len(total)] = right / total
        return padded

    def groups(self) -> tuple[Tensor, list[str]]:
        """Return every number as its own group, the one with the most samples first, the one with the fewest last."""
        total, _ = self._counts()
        seen = torch.nonzero(total).flatten()
        order = total[seen].sort(descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return rank, [f"group_{int(number)}" for number in seen[order]]


def _local_accuracies(local: list[float] | str | None, clients: int) -> dict[str, Tensor]:
    """Return the scores of Local by split."""
    if local is None:
        return {}
    if isinstance(local, str):
        scores = _scores(local)
    else:
        scores = dict.fromkeys(("val", "test"), torch.tensor(local, dtype=torch.float64))
    for accuracies in scores.values():
        if len(accuracies) != clients:
            raise FederationError(f"There are {len(accuracies)} Local accuracies for {clients} clients.")
    return dict(scores)


def _scores(path: str) -> Mapping[str, Tensor]:
    """Read the clients' accuracies from a checkpoint."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)["fl_lightning"]
    except FileNotFoundError as error:
        raise FederationError(f"There is no checkpoint {path} to take Local accuracies from.") from error
    except Exception as error:
        raise FederationError(f"{path} is not a checkpoint of fl_lightning to take Local accuracies from.") from error
    if saved["method"] != "Local":
        raise FederationError(f"The checkpoint {path} is of {saved['method']}, not of Local.")
    if not saved["scores"]:
        raise FederationError(f"The checkpoint {path} was written before its clients were evaluated.")
    scores: Mapping[str, Tensor] = saved["scores"]
    return scores


def _row(population: str, accuracies: Tensor, members: Tensor, local: Tensor | None, measure: Measure) -> Row:
    """Return one sub-population's row of the table."""
    own = accuracies[members]
    summary = fairness_summary(own, local=None if local is None else local[members], measure=measure)
    ends = fairness_intervals(own, measure=measure)
    mean = _printed(measure.scale * scored(own).mean(), measure)
    row = {"population": population, "clients": str(len(scored(own))), measure.title: mean}
    low, high = (measure.scale * end for end in ends.get("mean", (math.nan, math.nan)))
    row[f"{measure.title} (95%)"] = f"{_printed(low, measure)} to {_printed(high, measure)}"
    for column, name in COLUMNS.items():
        if name in summary:
            unit = 100 if name == "local_worse" else measure.scale if name in SCORES else 1
            numbers = [float(value) * unit for value in (summary[name], *ends.get(name, ()))]
            texts = [f"{n:.4f}" if name in ("jain", "entropy") else _printed(n, measure, name) for n in numbers]
            row[column] = texts[0]
            if name in ends:
                row[f"{column} (95%)"] = f"{texts[1]} to {texts[2]}"
    return row


def _printed(value: float | Tensor, measure: Measure, name: str = "") -> str:
    """Format percentages with two decimals, other numbers with five digits."""
    return f"{float(value):.2f}" if measure.share or name == "local_worse" else f"{float(value):.5g}"
