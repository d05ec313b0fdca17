"""Predictions for every client's test samples, in a table."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.arguments import NamedArguments
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule

#: Supported file extensions.
ENDINGS = (".csv", ".parquet", ".npz")
#: One client's rows: a column, or a matrix of several columns, by name.
Part = dict[str, Tensor]
Columns = dict[str, list[Any]]


class PredictionWriter(NamedArguments, Callback):
    """Writes predictions of ``Trainer.predict``: one row per test sample of every client.

    The columns are ``client``, ``sample`` (the row in the data), ``label`` (``target`` for tasks without classes),
    ``predicted`` and the probability of every class or label, ``p0``, ``p1`` and so on. Targets of several numbers have
    one column each, ``target0``, ``target1``. Masks are written as arrays of these names, one row per sample.
    ``fl-lightning predict`` always uses this callback.

    Args:
        file: a .csv, .npz or .parquet file (the latter requires pyarrow). Default: ``predictions.csv`` in the Trainer's
            log folder, ``predictions.npz`` for masks.
    """

    def __init__(self, file: str | None = None) -> None:
        if file is not None and Path(file).suffix not in ENDINGS:
            raise FederationError(f"Predictions are written to a file that ends in {', '.join(ENDINGS)}, not {file}.")
        if file is not None and file.endswith(".parquet"):
            _parquet()
        self.file = file
        self.path: Path | None = None
        self._parts: list[Part] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with an empty table."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"PredictionWriter needs a federated method, not {type(pl_module).__name__}.")
        self._parts = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add rows of some clients."""
        module: Any = pl_module
        test, task = module.federation.index("test"), module.task
        for client, output, targets in module.outputs(batch.tolist(), "test"):
            predicted, probabilities = task.predict(output), task.probabilities(output)
            part = {
                "client": torch.full((len(targets),), client),
                "sample": test[client],
                "label" if task.of_classes else "target": targets,
                "predicted": predicted,
                **({} if probabilities is None else {"p": probabilities}),
            }
            self._parts.append({name: values.cpu() for name, values in part.items()})

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table and print its path."""
        folder = trainer.log_dir or trainer.default_root_dir  # broadcast, so call it on every rank
        if not trainer.is_global_zero or not self._parts:
            return
        self._parts.sort(key=lambda part: int(part["client"][0]))
        found = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        flat = all(values.dim() < 3 for values in found.values())
        self.path = Path(self.file or Path(folder) / f"predictions.{'csv' if flat else 'npz'}")
        if not flat and self.path.suffix != ".npz":
            raise FederationError(
                f"{self.path.name} cannot hold predictions of shape {tuple(found['predicted'].shape[1:])}: give a file "
                "that ends in .npz."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _write(found, self.path)
        print(f"Predictions of {len(self._parts)} clients: {self.path}")


def _columns(found: Part) -> Columns:
    """Return columns by name; columns of a matrix are numbered."""
    table: Columns = {}
    for name, values in found.items():
        numbered = {f"{name}{k}": column for k, column in enumerate(values.T)} if values.dim() > 1 else {name: values}
        table |= {own: column.tolist() for own, column in numbered.items()}
    return table


def _write(found: Part, path: Path) -> None:
    if path.suffix == ".npz":
        arrays: Any = {name: values.numpy() for name, values in found.items()}
        np.savez(path, **arrays)
        return
    table = _columns(found)
    if path.suffix == ".parquet":
        arrow, parquet = _parquet()
        parquet.write_table(arrow.table(table), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def _parquet() -> tuple[Any, Any]:
    """Import pyarrow, or raise an error with installation instructions."""
    try:
        pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise FederationError("A .parquet file needs pyarrow: pip install pyarrow, or write a .csv file.") from None
    return pyarrow, parquet
