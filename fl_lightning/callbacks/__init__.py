"""Callbacks for federated runs."""

from fl_lightning.callbacks.agents import AgentWeightsCallback
from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.callbacks.bias import ParameterBiasCallback
from fl_lightning.callbacks.checkpoint import FederatedCheckpoint
from fl_lightning.callbacks.classifier import ClassifierAttackCallback
from fl_lightning.callbacks.clusters import ClustersCallback
from fl_lightning.callbacks.dashboard import Dashboard
from fl_lightning.callbacks.defence import DifferentialPrivacyCallback
from fl_lightning.callbacks.factors import FactorsCallback
from fl_lightning.callbacks.fairness import FairnessCallback
from fl_lightning.callbacks.imprint import ImprintCallback
from fl_lightning.callbacks.inferred import InferredDistributionCallback
from fl_lightning.callbacks.inversion import ModelInversionCallback
from fl_lightning.callbacks.leakage import GradientLeakageCallback
from fl_lightning.callbacks.ledger import LedgerCallback
from fl_lightning.callbacks.membership import MembershipInferenceCallback
from fl_lightning.callbacks.participation import ClientMembershipCallback
from fl_lightning.callbacks.poisoning import BackdoorCallback, LabelFlipCallback, UpdatePoisoningCallback
from fl_lightning.callbacks.predictions import PredictionWriter
from fl_lightning.callbacks.private_sgd import PrivateSGDCallback
from fl_lightning.callbacks.properties import PropertyInferenceCallback
from fl_lightning.callbacks.record import RunRecord
from fl_lightning.callbacks.secure import SecureAggregationCallback
from fl_lightning.progress import (
    FederatedRichProgressBar,
    FederatedTQDMProgressBar,
    RoundProgress,
    federated_progress_bar,
)
from fl_lightning.signals import SignalsCallback

__all__ = [
    "AgentWeightsCallback",
    "BackdoorCallback",
    "ClassifierAttackCallback",
    "ClientMembershipCallback",
    "ClustersCallback",
    "Dashboard",
    "DifferentialPrivacyCallback",
    "FactorsCallback",
    "FairnessCallback",
    "FederatedCallback",
    "FederatedCheckpoint",
    "FederatedRichProgressBar",
    "FederatedTQDMProgressBar",
    "GradientLeakageCallback",
    "ImprintCallback",
    "InferredDistributionCallback",
    "LabelFlipCallback",
    "LedgerCallback",
    "MembershipInferenceCallback",
    "ModelInversionCallback",
    "ParameterBiasCallback",
    "PredictionWriter",
    "PrivateSGDCallback",
    "PropertyInferenceCallback",
    "RoundProgress",
    "RunRecord",
    "SecureAggregationCallback",
    "SignalsCallback",
    "UpdatePoisoningCallback",
    "federated_progress_bar",
]
