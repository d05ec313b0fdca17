"""What a model says of every client's test samples, in a table."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule

#: Endings of the files that can be written.
ENDINGS = (".csv", ".parquet")
Columns = dict[str, list[Any]]


class PredictionWriter(Callback):
    """Writes what ``Trainer.predict`` finds: a row for every test sample of every client.

    The columns are ``client``, ``sample`` (the row in the data), ``label``, ``predicted`` and the probability of every
    class, ``p0``, ``p1`` and so on. ``fl-lightning predict`` has it always on.

    Args:
        file: a file that ends in .csv, or in .parquet where pyarrow is installed; ``predictions.csv`` in the Trainer's
            log folder unless given.
    """

    def __init__(self, file: str | None = None) -> None:
        if file is not None and Path(file).suffix not in ENDINGS:
            raise FederationError(f"Predictions are written to a file that ends in {' or '.join(ENDINGS)}, not {file}.")
        if file is not None and file.endswith(".parquet"):
            _parquet()
        self.file = file
        self.path: Path | None = None
        self._parts: list[Columns] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an empty table."""
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
        """Add some clients' rows."""
        module: Any = pl_module
        test = module.federation.index("test")
        for client, scores, labels in module.outputs(batch.tolist(), "test"):
            found = torch.softmax(scores.double(), dim=1)
            table = {
                "client": [client] * len(labels),
                "sample": test[client].tolist(),
                "label": labels.tolist(),
                "predicted": found.argmax(1).tolist(),
            }
            self._parts.append({**table, **{f"p{k}": column.tolist() for k, column in enumerate(found.T)}})

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table and say where."""
        folder = trainer.log_dir or trainer.default_root_dir  # asked for on every rank
        if not trainer.is_global_zero or not self._parts:
            return
        self.path = Path(self.file or Path(folder) / "predictions.csv")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._parts.sort(key=lambda part: part["client"][0])
        table = {name: [value for part in self._parts for value in part[name]] for name in self._parts[0]}
        _write(table, self.path)
        print(f"Predictions of {len(self._parts)} clients: {self.path}")


def _write(table: Columns, path: Path) -> None:
    if path.suffix == ".parquet":
        arrow, parquet = _parquet()
        parquet.write_table(arrow.table(table), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def _parquet() -> tuple[Any, Any]:
    """The library that writes Parquet, or a sentence that says what to install."""
    try:
        pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise FederationError("A .parquet file needs pyarrow: pip install pyarrow, or write a .csv file.") from None
    return pyarrow, parquet
