"""Clients' clusters by round."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from sklearn.metrics import normalized_mutual_info_score

from fl_lightning.arguments import NamedArguments
from fl_lightning.callbacks.journal import Journal
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count
from fl_lightning.wire import Message


@runtime_checkable
class HasClusters(Protocol):
    """Interface of methods with clusters."""

    clusters: int

    def assignment(self) -> list[int]:
        """Return the cluster of every client."""
        ...


class ClustersCallback(NamedArguments, Callback):
    """Logs cluster metrics every few rounds and writes every client's cluster by round.

    Logged under ``clusters/``: ``size_<q>``, the number of clients of cluster q; ``used``, the number of non-empty
    clusters; ``moved``, the share of clients whose cluster changed since the last log; and for each property of the
    clients in ``meta`` (mode, dominant class) ``nmi_<name>``, its normalised mutual information with the clusters, from
    0 (independent) to 1 (equal). ``clusters.csv`` in the log folder has one row per logged round and one column per
    client; a checkpoint stores only its length, so keep the folder of a run to be resumed.

    Args:
        every: rounds between logs.
        folder: folder of the table; None means the Trainer's log folder.
    """

    def __init__(self, every: Count = 1, folder: str | None = None) -> None:
        self.every, self.folder = every, folder
        #: Every client's cluster by round, from 0.
        self.history: dict[int, list[int]] = {}
        self._journal = Journal()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods without clusters, and reset the history of earlier runs."""
        if not isinstance(pl_module, HasClusters):
            given = type(pl_module).__name__
            raise FederationError(f"ClustersCallback needs a method with clusters, such as IFCA, not {given}.")
        if stage == "fit" and not trainer.current_epoch:  # a resumed run restores its own
            self.history = {}
            self._journal.forget()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open or resume the table."""
        module: Any = pl_module
        folder = self.folder or trainer.log_dir  # broadcast, so call it on every rank
        written = folder is not None and not trainer.fast_dev_run and trainer.is_global_zero  # type: ignore[attr-defined]
        path = Path(folder) / "clusters.csv" if written else None  # type: ignore[arg-type]
        self._journal.open(path, _row("round", *range(module.federation.num_clients)))

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log the clusters after the round."""
        module: Any = pl_module
        round = trainer.current_epoch
        if (round + 1) % self.every:
            return
        now, before = module.assignment(), self.history.get(next(reversed(self.history), -1))
        self.history[round] = now
        self._journal.add(_row(round, *now))
        sizes = Counter(now)
        logs: dict[str, float] = {f"size_{q}": float(sizes[q]) for q in range(module.clusters)}
        logs["used"] = float(len(sizes))
        if before is not None:
            logs["moved"] = sum(a != b for a, b in zip(before, now, strict=True)) / len(now)
        for name, values in module.federation.meta.items():
            logs[f"nmi_{name}"] = _agreement(values, now)
        for name, value in logs.items():
            module.log(f"clusters/{name}", value, on_step=False, on_epoch=True, batch_size=1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the path of the table."""
        if self.history and self._journal.path is not None:
            rank_zero_info(f"Clusters by round: {self._journal.path}")

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the table and the history."""
        return {"journal": self._journal.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history."""
        self._journal.load_state_dict(state_dict["journal"])
        rows = (list(map(int, row)) for row in csv.reader(self._journal.text().splitlines()[1:]))
        self.history = {round: clusters for round, *clusters in rows}


def _row(*values: Any) -> str:
    return ",".join(map(str, values)) + "\r\n"


def _agreement(values: Sequence[Any], clusters: list[int]) -> float:
    """Return the normalised mutual information between a property of the clients and their clusters."""
    return float(normalized_mutual_info_score([str(value) for value in values], clusters))
