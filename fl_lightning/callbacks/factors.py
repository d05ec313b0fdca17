"""Which factors the clients select: how many, how differently, how often each, and at what cost."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.arguments import NamedArguments
from fl_lightning.errors import FederationError
from fl_lightning.loggers import tensorboards
from fl_lightning.ranges import Count
from fl_lightning.snapshots import SnapshotStore
from fl_lightning.wire import Message


@runtime_checkable
class SelectsFactors(Protocol):
    """The parts of a method that the callback uses."""

    snapshots: SnapshotStore

    def active_factors(self, client: int) -> dict[str, Tensor]:
        """Which factors a client that has trained uses, by layer, shape (F,), boolean."""
        ...

    def selection_terms(self, client: int) -> dict[str, float]:
        """Terms that the objective of such a client adds for its selection, by name."""
        ...


def pairwise_distance(choices: Tensor) -> Tensor:
    """Mean Hamming distance between two different clients' choices.

    Counted factor by factor: the m of K clients that use a factor differ in it from the K - m others.

    Args:
        choices: boolean, shape (clients, F).

    Returns:
        0-dim; 0 for fewer than two clients.

    Example:
        >>> pairwise_distance(torch.tensor([[True, True, False], [True, False, True], [True, True, False]]))
        tensor(1.3333, dtype=torch.float64)
    """
    clients = len(choices)
    users = choices.double().sum(0)
    return 2 * (users * (clients - users)).sum() / max(clients * (clients - 1), 1)


class FactorsCallback(NamedArguments, Callback):
    """Logs what the clients that have trained select, every so many rounds.

    For each factorised layer, under ``factors/<layer>/``: ``active``, the mean number of factors per client;
    ``distance``, the mean number of factors in which two clients differ (near 0 nothing is personalised); ``used``, the
    share of factors that anybody uses; and the mean over clients of what the selection adds to the objective (``kl_b``
    and ``kl_v`` with WAFFLe, ``l1`` with its ablation). With a TensorBoard logger ``reuse`` is the histogram, over
    factors, of the share of clients that use a factor, and ``active_clients`` that of the number of factors over
    clients. The numbers are made for the log: selections are private, and a deployed server could not know them.

    Args:
        every: log after every so many rounds.
    """

    #: It looks at what only clients see, and is refused where these are real.
    simulations_only: ClassVar[bool] = True

    def __init__(self, every: Count = 1) -> None:
        self.every = every
        #: Share of clients that use each factor, by layer, shape (F,), as last logged.
        self.reuse: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods without factors."""
        if not isinstance(pl_module, SelectsFactors):
            given = type(pl_module).__name__
            raise FederationError(
                f"FactorsCallback needs a method with factorised layers, such as WAFFLe, not {given}."
            )

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log the selections as the round left them."""
        module: Any = pl_module
        clients = list(module.snapshots)
        if (trainer.current_epoch + 1) % self.every or not clients:
            return
        active = [module.active_factors(client) for client in clients]
        for layer in active[0]:
            self._log_layer(trainer, pl_module, layer, torch.stack([one[layer] for one in active]).cpu())
        terms = [module.selection_terms(client) for client in clients]
        for name in terms[0]:
            _log(pl_module, f"factors/{name}", sum(one[name] for one in terms) / len(clients))

    def _log_layer(self, trainer: Trainer, module: LightningModule, layer: str, choices: Tensor) -> None:
        numbers, reuse = choices.double().sum(1), choices.double().mean(0)
        self.reuse[layer] = reuse
        _log(module, f"factors/{layer}/active", numbers.mean())
        _log(module, f"factors/{layer}/distance", pairwise_distance(choices))
        _log(module, f"factors/{layer}/used", (reuse > 0).double().mean())
        for logger in tensorboards(trainer):
            logger.experiment.add_histogram(f"factors/{layer}/reuse", reuse, trainer.current_epoch)
            logger.experiment.add_histogram(f"factors/{layer}/active_clients", numbers, trainer.current_epoch)


def _log(module: LightningModule, name: str, value: float | Tensor) -> None:
    module.log(name, value, on_step=False, on_epoch=True, batch_size=1)
