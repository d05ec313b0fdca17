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

from fl_lightning.arguments import NamedArguments
from fl_lightning.callbacks.journal import Journal
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count
from fl_lightning.wire import Message


@runtime_checkable
class HasClusters(Protocol):
    """The parts of a method that the callback uses."""

    clusters: int

    def assignment(self) -> list[int]:
        """The cluster of every client."""
        ...


class ClustersCallback(NamedArguments, Callback):
    """Logs the clusters after every so many rounds, and writes every client's cluster by round.

    Logged under ``clusters/``: ``size_<q>``, the number of clients of each; ``used``, the number of clusters that have
    any; ``moved``, the share of clients whose cluster changed since it was last logged; and for everything that the
    data knows of its clients (their mode, their dominant class) ``nmi_<name>``, the normalised mutual information
    between that and the clusters, 1 where they are the same and near 0 where they have nothing in common. In the log
    folder ``clusters.csv`` grows by one row per logged round, with one column per client; a checkpoint keeps where it
    ends, so keep the folder of a run that is to be resumed.

    Args:
        every: log after every so many rounds.
        folder: where the table is written; None means the Trainer's log folder.
    """

    def __init__(self, every: Count = 1, folder: str | None = None) -> None:
        self.every, self.folder = every, folder
        #: Every client's cluster by round, from 0.
        self.history: dict[int, list[int]] = {}
        self._journal = Journal()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods without clusters, and forget earlier runs."""
        if not isinstance(pl_module, HasClusters):
            given = type(pl_module).__name__
            raise FederationError(f"ClustersCallback needs a method with clusters, such as IFCA, not {given}.")
        if stage == "fit" and not trainer.current_epoch:  # a run that is resumed gets its own back
            self.history = {}
            self._journal.forget()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open or resume the table."""
        module: Any = pl_module
        folder = self.folder or trainer.log_dir  # asked for on every rank
        written = folder is not None and not trainer.fast_dev_run and trainer.is_global_zero  # type: ignore[attr-defined]
        path = Path(folder) / "clusters.csv" if written else None  # type: ignore[arg-type]
        self._journal.open(path, _row("round", *range(module.federation.num_clients)))

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log the clusters as the round left them."""
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
        """Say where the table is."""
        if self.history and self._journal.path is not None:
            rank_zero_info(f"Clusters by round: {self._journal.path}")

    def state_dict(self) -> dict[str, Any]:
        """Where the table ends, for a checkpoint."""
        return {"journal": self._journal.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring back the history."""
        self._journal.load_state_dict(state_dict["journal"])
        rows = (list(map(int, row)) for row in csv.reader(self._journal.text().splitlines()[1:]))
        self.history = {round: clusters for round, *clusters in rows}


def _row(*values: Any) -> str:
    return ",".join(map(str, values)) + "\r\n"


def _agreement(values: Sequence[Any], clusters: list[int]) -> float:
    """Normalised mutual information between what is known of the clients and their clusters."""
    return float(normalized_mutual_info_score([str(value) for value in values], clusters))
