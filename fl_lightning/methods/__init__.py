"""One file per federated method."""

from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbps import FedBPS
from fl_lightning.methods.fedcluster import FedCluster
from fl_lightning.methods.feddaf import FedDAF
from fl_lightning.methods.fedgn import FedGN
from fl_lightning.methods.fedgroup import FedGroup
from fl_lightning.methods.fedma import FedMA
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fesem import FeSEM
from fl_lightning.methods.ifca import IFCA
from fl_lightning.methods.lg_fedavg import LGFedAvg
from fl_lightning.methods.local import Local
from fl_lightning.methods.pfedme import PFedMe
from fl_lightning.methods.qffl import QFFL
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.methods.waffle import WAFFLe
from fl_lightning.methods.waffle_avg import WAFFLEAvg
from fl_lightning.methods.waffle_l1 import WAFFLeL1
from fl_lightning.methods.weight_erosion import WeightErosion

__all__ = [
    "APFL",
    "IFCA",
    "QFFL",
    "SCAFFOLD",
    "FeSEM",
    "FedAvg",
    "FedBPS",
    "FedCluster",
    "FedDAF",
    "FedGN",
    "FedGroup",
    "FedMA",
    "FedPer",
    "FedProx",
    "LGFedAvg",
    "Local",
    "PFedMe",
    "WAFFLEAvg",
    "WAFFLe",
    "WAFFLeL1",
    "WeightErosion",
]
