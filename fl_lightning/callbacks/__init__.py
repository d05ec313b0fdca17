"""Callbacks for federated runs."""

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.callbacks.defence import DifferentialPrivacyCallback
from fl_lightning.callbacks.factors import FactorsCallback
from fl_lightning.callbacks.fairness import FairnessCallback
from fl_lightning.callbacks.inversion import ModelInversionCallback
from fl_lightning.callbacks.leakage import GradientLeakageCallback
from fl_lightning.callbacks.ledger import LedgerCallback
from fl_lightning.callbacks.membership import MembershipInferenceCallback
from fl_lightning.progress import (
    FederatedRichProgressBar,
    FederatedTQDMProgressBar,
    federated_progress_bar,
)

__all__ = [
    "DifferentialPrivacyCallback",
    "FactorsCallback",
    "FairnessCallback",
    "FederatedCallback",
    "FederatedRichProgressBar",
    "FederatedTQDMProgressBar",
    "GradientLeakageCallback",
    "LedgerCallback",
    "MembershipInferenceCallback",
    "ModelInversionCallback",
    "federated_progress_bar",
]
