"""torchmetrics metrics of federated runs, each with a functional core."""

from fl_lightning.metrics.clients import ClientAccuracy, client_summary, worst_tenth

__all__ = ["ClientAccuracy", "client_summary", "worst_tenth"]
