"""DataModules and partition schemes."""

from fl_lightning.datamodules.base import FederatedDataModule, Samples
from fl_lightning.datamodules.digits import Digits
from fl_lightning.datamodules.elsewhere import Elsewhere
from fl_lightning.datamodules.frames import FromArrays, FromDataset, FromFrame, Table
from fl_lightning.datamodules.images import CIFAR10, MNIST, FashionMNIST
from fl_lightning.datamodules.manifest import Manifest
from fl_lightning.datamodules.partitions import (
    IID,
    ByUser,
    ConceptShift,
    Dirichlet,
    DominantClass,
    LabelSkew,
    MajorMinor,
    Multimodal,
    Partition,
    PartitionScheme,
    Pool,
    Unimodal,
)
from fl_lightning.datamodules.pooled import Pooled
from fl_lightning.datamodules.sent140 import Sent140
from fl_lightning.datamodules.tensors import TensorFederation

__all__ = [
    "CIFAR10",
    "IID",
    "MNIST",
    "ByUser",
    "ConceptShift",
    "Digits",
    "Dirichlet",
    "DominantClass",
    "Elsewhere",
    "FashionMNIST",
    "FederatedDataModule",
    "FromArrays",
    "FromDataset",
    "FromFrame",
    "LabelSkew",
    "MajorMinor",
    "Manifest",
    "Multimodal",
    "Partition",
    "PartitionScheme",
    "Pool",
    "Pooled",
    "Samples",
    "Sent140",
    "Table",
    "TensorFederation",
    "Unimodal",
]
