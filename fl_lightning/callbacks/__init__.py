"""Callbacks for federated runs."""

from fl_lightning.callbacks.agents import AgentWeightsCallback
from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.callbacks.factors import FactorsCallback
from fl_lightning.callbacks.fairness import FairnessCallback
from fl_lightning.progress import (
    FederatedRichProgressBar,
    FederatedTQDMProgressBar,
    federated_progress_bar,
)

__all__ = [
    "AgentWeightsCallback",
    "FactorsCallback",
    "FairnessCallback",
    "FederatedCallback",
    "FederatedRichProgressBar",
    "FederatedTQDMProgressBar",
    "federated_progress_bar",
]
