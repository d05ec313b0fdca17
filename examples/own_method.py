"""Your own federated method in one file, available on the command line by its name.

fl-lightning fit --config quickstart --use examples/own_method.py --model Trimmed --model.share 0.2
"""

from typing import Annotated

import torch

from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.ranges import Range
from fl_lightning.wire import Message, State


class Trimmed(FederatedModule):
    """FedAvg with a trimmed mean: for each entry, the smallest and largest values are left out.

    Args:
        net: the network.
        share: fraction of the clients left out at either end.
        kwargs: see FederatedModule.
    """

    def __init__(self, net: FedNet, share: Annotated[float, Range(0, 0.5, below=True)] = 0.1, **kwargs) -> None:
        super().__init__(net, **kwargs)
        self.share = share

    def aggregate(self, messages: list[Message]) -> State:
        """The mean of the remaining values."""
        cut = int(self.share * len(messages))
        stacked = {name: torch.stack([m.tensors[name] for m in messages]) for name in self.shared_names}
        kept = {name: value.sort(dim=0).values[cut : len(messages) - cut] for name, value in stacked.items()}
        return {name: value.double().mean(0).to(value.dtype) for name, value in kept.items()}
