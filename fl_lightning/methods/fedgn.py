"""Fed-GN: FedAvg with GroupNorm instead of BatchNorm."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.nets import FedNet, group_norm


class FedGN(FedAvg):
    """FedAvg on a copy of the net in which every BatchNorm is a GroupNorm (:func:`~fl_lightning.nets.group_norm`).

    Running statistics of clients with different data average badly; GroupNorm has none, and a sample's output does not
    depend on its batch. LayerNorm stays: it is a GroupNorm with one group.

    Args:
        net: the network; one without normalisation layers stays as it is, with a warning.
        groups: a layer has at most so many groups, and at least two channels in each.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    def __init__(self, net: FedNet, groups: int = 32, **kwargs: Any) -> None:
        turned = group_norm(FedNet.from_spec(net) if isinstance(net, dict) else net, groups)
        if not any(isinstance(module, nn.GroupNorm | nn.LayerNorm) for module in turned.modules()):
            rank_zero_warn(
                f"{type(turned).__name__} has no normalisation layer, so FedGN is FedAvg: take a net with BatchNorm, "
                "such as LeNetBN instead of LeNet5."
            )
        super().__init__(turned, **kwargs)
