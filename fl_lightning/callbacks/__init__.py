"""Callbacks for federated runs."""

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.callbacks.dashboard import Dashboard
from fl_lightning.callbacks.factors import FactorsCallback
from fl_lightning.callbacks.fairness import FairnessCallback
from fl_lightning.callbacks.record import RunRecord
from fl_lightning.progress import (
    FederatedRichProgressBar,
    FederatedTQDMProgressBar,
    RoundProgress,
    federated_progress_bar,
)

__all__ = [
    "Dashboard",
    "FactorsCallback",
    "FairnessCallback",
    "FederatedCallback",
    "FederatedRichProgressBar",
    "FederatedTQDMProgressBar",
    "RoundProgress",
    "RunRecord",
    "federated_progress_bar",
]
