"""Callbacks for federated runs."""

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.progress import (
    FederatedRichProgressBar,
    FederatedTQDMProgressBar,
    federated_progress_bar,
)

__all__ = ["FederatedCallback", "FederatedRichProgressBar", "FederatedTQDMProgressBar", "federated_progress_bar"]
