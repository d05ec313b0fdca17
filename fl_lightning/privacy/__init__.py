"""Attacks on the messages of federated methods under stated threat models; they do not change a run."""

from fl_lightning.privacy.data import AttackData, attack_data
from fl_lightning.privacy.membership import infer_membership
from fl_lightning.privacy.report import Report
from fl_lightning.privacy.shadows import train_shadows
from fl_lightning.privacy.views import VIEWS, View, make_views
from fl_lightning.privacy.wiretap import Run, Wire, Wiretap, intercept

__all__ = [
    "VIEWS",
    "AttackData",
    "Report",
    "Run",
    "View",
    "Wire",
    "Wiretap",
    "attack_data",
    "infer_membership",
    "intercept",
    "make_views",
    "train_shadows",
]
