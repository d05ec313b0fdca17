"""Fed-GN: FedAvg with GroupNorm instead of BatchNorm."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.nets import FedNet, group_norm


class FedGN(FedAvg):
    """FedAvg on a copy of the net in which every BatchNorm is a GroupNorm (:func:`~fl_lightning.nets.group_norm`).

    Averaging running statistics of clients with different data works poorly; GroupNorm has none, and a sample's output
    does not depend on its batch. LayerNorm is kept: it is a GroupNorm with one group.

    Args:
        net: the network; one without normalisation layers is not changed, with a warning.
        groups: maximum number of groups in a layer; each has at least two channels.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, groups: int = 32, **kwargs: Any) -> None:
        turned = group_norm(FedNet.from_spec(net) if isinstance(net, dict) else net, groups)
        if not any(isinstance(module, nn.GroupNorm | nn.LayerNorm) for module in turned.modules()):
            rank_zero_warn(
                f"{type(turned).__name__} has no normalisation layer, so FedGN is FedAvg: use a net with BatchNorm, "
                "such as LeNetBN instead of LeNet5."
            )
        super().__init__(turned, **kwargs)
