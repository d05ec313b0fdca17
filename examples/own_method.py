"""Your own federated method in one file, with its name on the command line.

fl-lightning fit --config quickstart --use examples/own_method.py --model Trimmed --model.share 0.2
"""

from typing import Annotated

import torch

from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.ranges import Range
from fl_lightning.wire import Message, State


class Trimmed(FederatedModule):
    """FedAvg that leaves out, entry by entry, the smallest and the largest values (a trimmed mean).

    Args:
        net: the network.
        share: share of the clients that is left out at either end.
        kwargs: see FederatedModule.
    """

    def __init__(self, net: FedNet, share: Annotated[float, Range(0, 0.5, below=True)] = 0.1, **kwargs) -> None:
        super().__init__(net, **kwargs)
        self.share = share

    def aggregate(self, messages: list[Message]) -> State:
        """The mean of what is left between the two ends."""
        cut = int(self.share * len(messages))
        stacked = {name: torch.stack([m.tensors[name] for m in messages]) for name in self.shared_names}
        kept = {name: value.sort(dim=0).values[cut : len(messages) - cut] for name, value in stacked.items()}
        return {name: value.double().mean(0).to(value.dtype) for name, value in kept.items()}
