"""Which cluster each client belongs to, by round."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from sklearn.metrics import normalized_mutual_info_score

from fl_lightning.errors import FederationError
from fl_lightning.wire import Message


@runtime_checkable
class HasClusters(Protocol):
    """What the callback asks of a method."""

    clusters: int

    def assignment(self) -> list[int]:
        """The cluster of every client."""
        ...


class ClustersCallback(Callback):
    """Logs the clusters after every so many rounds, and writes every client's cluster by round.

    Logged under ``clusters/``: ``size_<q>``, the number of clients of each; ``used``, the number of clusters that have
    any; ``moved``, the share of clients whose cluster changed since it was last logged; and for everything that the
    data knows of its clients (their mode, their dominant class) ``nmi_<name>``, the normalised mutual information
    between that and the clusters, 1 where they are the same and near 0 where they have nothing in common. At the end of
    a fit ``clusters.csv`` in the log folder has one row per logged round and one column per client.

    Args:
        every: log after every so many rounds.
        folder: where the table is written; None means the Trainer's log folder.
    """

    def __init__(self, every: int = 1, folder: str | None = None) -> None:
        if every < 1:
            raise FederationError(f"every must be 1 or more, not {every}.")
        self.every, self.folder = every, folder
        #: Every client's cluster by round, from 0.
        self.history: dict[int, list[int]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods without clusters, and forget earlier runs."""
        if not isinstance(pl_module, HasClusters):
            given = type(pl_module).__name__
            raise FederationError(f"ClustersCallback needs a method with clusters, such as IFCA, not {given}.")
        if stage == "fit" and not trainer.current_epoch:  # a run that is resumed gets its own back
            self.history = {}

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log the clusters as the round left them."""
        module: Any = pl_module
        round = trainer.current_epoch
        if (round + 1) % self.every:
            return
        now, before = module.assignment(), self.history.get(max(self.history, default=-1))
        self.history[round] = now
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
        """Write the table."""
        folder = self.folder or trainer.log_dir  # asked for on every rank
        if not self.history or folder is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        path = Path(folder) / "clusters.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["round", *range(len(next(iter(self.history.values()))))])
            writer.writerows([round, *clusters] for round, clusters in sorted(self.history.items()))
        rank_zero_info(f"Clusters by round: {path}")

    def state_dict(self) -> dict[str, Any]:
        """The history, for a checkpoint."""
        return {"history": {round: list(clusters) for round, clusters in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring back the history."""
        self.history = {int(round): list(clusters) for round, clusters in state_dict["history"].items()}


def _agreement(values: Sequence[Any], clusters: list[int]) -> float:
    """Normalised mutual information between what is known of the clients and their clusters."""
    return float(normalized_mutual_info_score([str(value) for value in values], clusters))
