"""Partition schemes: pure functions of (labels, settings, seed), one small object each."""

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.concept import ConceptShift
from fl_lightning.datamodules.partitions.dirichlet import Dirichlet
from fl_lightning.datamodules.partitions.dominant import DominantClass
from fl_lightning.datamodules.partitions.iid import IID
from fl_lightning.datamodules.partitions.major_minor import MajorMinor
from fl_lightning.datamodules.partitions.shards import Multimodal, Unimodal
from fl_lightning.datamodules.partitions.skew import LabelSkew
from fl_lightning.datamodules.partitions.users import ByUser

__all__ = [
    "IID",
    "ByUser",
    "ConceptShift",
    "Dirichlet",
    "DominantClass",
    "LabelSkew",
    "MajorMinor",
    "Multimodal",
    "Partition",
    "PartitionScheme",
    "Pool",
    "Unimodal",
]
