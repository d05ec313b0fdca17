"""Local: clients train separately."""

from __future__ import annotations

from typing import Any

from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.ranges import CountOrZero


class Local(FederatedModule):
    """No communication: each client trains its own model in every round, from a common initial one.

    Args:
        net: the network.
        clients: the clients that train; None means all.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, clients: list[CountOrZero] | None = None, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        if clients is not None and not clients:
            raise FederationError(f"clients must name at least one client, not {clients}.")
        self.clients = clients

    # client

    def is_private(self, name: str) -> bool:
        """Return True: all entries stay with the client."""
        return True

    # server

    def cohort(self, round: int) -> list[int]:
        """Return all clients, or the given ones, regardless of the DataModule's ``fraction``."""
        everyone = range(len(self.roster))
        chosen = sorted(set(everyone if self.clients is None else self.clients))
        if chosen[-1] not in everyone:
            raise FederationError(f"clients must be some of 0 to {everyone[-1]}, not {chosen[-1]}.")
        return chosen
