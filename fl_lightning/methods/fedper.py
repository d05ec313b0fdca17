"""FedPer (Arivazhagan et al., 2019): a shared base and a private head."""

from __future__ import annotations

from typing import Any

from fl_lightning.methods.lib.layers import entries_of
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet


class FedPer(FederatedModule):
    """FedAvg on the base layers; the personal layers are trained with the base and never leave the client.

    A client that never trained is evaluated with the current base and the common initial head. BatchNorm layers are
    shared unless named.

    Args:
        net: the network.
        personal: names of the personal layers; None means the last fully connected one, an empty list is FedAvg.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, personal: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.own_layers = entries_of(self.net, personal)

    # client

    def is_private(self, name: str) -> bool:
        """Whether an entry belongs to a personal layer."""
        return name in self.own_layers
