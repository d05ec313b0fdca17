"""FedAvg (McMahan et al., 2017): average the clients' trained models."""

from __future__ import annotations

from fl_lightning.module import FederatedModule


class FedAvg(FederatedModule):
    """Clients train the server's model on their own data; the server averages the results, weighted by samples.

    This is the default behaviour of :class:`~fl_lightning.module.FederatedModule`.
    """
