"""One file per federated method."""

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.local import Local

__all__ = ["FedAvg", "FedProx", "Local"]
