"""Statistics of the clients' factor selections."""

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
    """Interface of methods with factorised layers."""

    snapshots: SnapshotStore

    def active_factors(self, client: int) -> dict[str, Tensor]:
        """Return the active factors of a trained client by layer, shape (F,), boolean."""
        ...

    def selection_terms(self, client: int) -> dict[str, float]:
        """Return the selection's terms of a trained client's objective by name."""
        ...


def pairwise_distance(choices: Tensor) -> Tensor:
    """Return the mean Hamming distance between different clients' choices.

    Computed by factor: the m of K clients that use a factor differ from the K - m others.

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
    """Logs the selections of trained clients every few rounds.

    Logged for each factorised layer under ``factors/<layer>/``: ``active``, the mean number of factors per client;
    ``distance``, the mean number of factors in which two clients differ (near 0: no personalisation); ``used``, the
    share of factors used by any client; and the mean over clients of the selection's terms in the objective (``kl_b``
    and ``kl_v`` for WAFFLe, ``l1`` for its ablation). With a TensorBoard logger, ``reuse`` is the histogram, over
    factors, of the share of clients that use a factor, and ``active_clients`` that of the number of factors over
    clients. For simulations only: selections are private, and a deployed server does not know them.

    Args:
        every: rounds between logs.
    """

    #: Uses the clients' private data, so it is refused in deployed runs.
    simulations_only: ClassVar[bool] = True

    def __init__(self, every: Count = 1) -> None:
        self.every = every
        #: Last logged share of clients that use each factor, by layer, shape (F,).
        self.reuse: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods without factors."""
        if not isinstance(pl_module, SelectsFactors):
            given = type(pl_module).__name__
            raise FederationError(
                f"FactorsCallback needs a method with factorised layers, such as WAFFLe, not {given}."
            )

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log the selections after the round."""
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
