"""LG-FedAvg (Liang et al., 2020): local representations, a global head."""

from __future__ import annotations

from typing import Any

from fl_lightning.methods.lib.layers import entries_of
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet


class LGFedAvg(FederatedModule):
    """The counterpart of FedPer: FedAvg on the named layers; all others never leave the client.

    All clients start from the common initial extractor, without pre-training. A client that never trained is evaluated
    with that extractor and the current head.

    Args:
        net: the network.
        shared: names of the shared layers; None means the last fully connected one. Sharing all layers is FedAvg.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, shared: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.shared = entries_of(self.net, shared)

    # client

    def is_private(self, name: str) -> bool:
        """Whether an entry belongs to no shared layer."""
        return name not in self.shared
