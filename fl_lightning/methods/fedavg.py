"""FedAvg (McMahan et al., 2017): average what the clients trained."""

from __future__ import annotations

from fl_lightning.module import FederatedModule


class FedAvg(FederatedModule):
    """Clients train the server's model on their own data; the server averages the results, weighted by samples.

    It is what :class:`~fl_lightning.module.FederatedModule` does where a method says nothing else.
    """
