"""Callbacks for federated runs."""

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.callbacks.factors import FactorsCallback
from fl_lightning.callbacks.fairness import FairnessCallback
from fl_lightning.callbacks.ledger import LedgerCallback
from fl_lightning.progress import (
    FederatedRichProgressBar,
    FederatedTQDMProgressBar,
    federated_progress_bar,
)

__all__ = [
    "FactorsCallback",
    "FairnessCallback",
    "FederatedCallback",
    "FederatedRichProgressBar",
    "FederatedTQDMProgressBar",
    "LedgerCallback",
    "federated_progress_bar",
]
