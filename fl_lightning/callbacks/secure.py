"""Secure aggregation: the server learns sums of messages only."""

from __future__ import annotations

import math
from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.privacy import secure
from fl_lightning.ranges import AtLeast, Range
from fl_lightning.wire import Message, State


class SecureAggregationCallback(FederatedCallback):
    """Shows the server only the weighted mean of a stage's messages.

    Clients encode their weighted values as integers and add masks that cancel in the sum
    (:mod:`fl_lightning.privacy.secure`); every message is then replaced by the decoded mean. For methods whose server
    needs only the mean and whose weights do not depend on the data. Means differ from those without this callback by
    less than 2^-32; integers (``num_batches_tracked``) become rounded means.

    Attack callbacks cannot read messages: the views ``outsider`` and ``server`` see nothing of a client, only the view
    ``sums`` remains. In the Trainer's list it must follow all callbacks that change messages, such as
    :class:`~fl_lightning.callbacks.DifferentialPrivacyCallback`.

    In a deployed run, sites agree on keys, mask their messages, and send no message without a mask
    (:mod:`fl_lightning.remote.secure_site`); both sides need the callback with the same options. The mean is bitwise
    equal to the simulation's.

    Args:
        threshold: more than this share of a round's sites must stay to its end, 0.5 or more and below 1. A majority
            ensures that disjoint sets of sites cannot reveal both kinds of a client's shares.
        least: minimum number of clients in a sum.
    """

    hides_messages = True
    #: The defence runs at the clients.
    guards = True

    def __init__(
        self, threshold: Annotated[float, Range(0.5, 1, below=True)] = 2 / 3, least: Annotated[int, AtLeast(2)] = 2
    ) -> None:
        self.threshold, self.least = threshold, least

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods and runs whose server needs single messages."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(
                f"SecureAggregationCallback needs a federated method, not {type(pl_module).__name__}."
            )
        self.install(pl_module)
        callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
        for later in callbacks[callbacks.index(self) + 1 :]:
            if isinstance(later, FederatedCallback) and later.changes_messages:
                raise FederationError(
                    f"{type(later).__name__} changes messages: put it before SecureAggregationCallback in the list."
                )
        if not pl_module.exchange.simulated:
            self._check_deployed(pl_module, callbacks)

    def _check_deployed(self, module: FederatedModule, callbacks: list[object]) -> None:
        """Refuse callbacks that change single messages at the server."""
        if getattr(module.exchange, "secure", None) is not self:
            raise FederationError(
                "RemoteClients does not know of SecureAggregationCallback: pass it the Trainer's callbacks."
            )
        for one in callbacks:
            if isinstance(one, FederatedCallback) and one.changes_messages and not getattr(one, "guards", False):
                raise FederationError(
                    f"{type(one).__name__} changes single messages at the server, which secure aggregation hides from "
                    "it: let the clients do it (where='local'), or leave one of the two out."
                )

    def settings(self) -> dict[str, Any]:
        """Return the options, which clients have to approve."""
        return {"threshold": round(self.threshold, 6), "least": self.least}

    def install(self, method: FederatedModule) -> None:
        """Refuse a method whose server needs single messages."""
        if not (method.aggregates_by_mean and method.aggregates_sums):
            raise FederationError(
                f"The server of {type(method).__name__} needs more than the mean of its clients' messages: secure "
                "aggregation hides it."
            )
        if method.aggregation is not None:
            raise FederationError("A robust rule needs single messages, which secure aggregation hides: leave one out.")

    def protect(self, method: FederatedModule, received: State, message: Message) -> None:
        """Do not change the message; the site adds the masks after all other callbacks."""

    def needed(self, clients: int) -> int:
        """Return how many clients of a round have to stay to its end.

        Example:
            >>> [SecureAggregationCallback().needed(clients) for clients in (2, 3, 4, 5, 10)]
            [2, 3, 3, 4, 7]
        """
        return max(math.floor(self.threshold * clients + 1e-9) + 1, self.least)

    def weight(self, method: FederatedModule, samples: int) -> float:
        """Return the weight of a client by its number of samples."""
        return 1.0 if method.weighting == "uniform" else float(samples)

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Replace all messages by the protocol's mean; in deployed runs they already are."""
        assert isinstance(pl_module, FederatedModule)
        if not pl_module.exchange.simulated:
            return
        secure.check_cohort(len(messages), self.least)
        mean = secure_mean(messages, [self.weight(pl_module, message.samples) for message in messages])
        for message in messages:
            message.tensors = dict(mean)


def secure_mean(messages: list[Message], weights: list[float]) -> State:
    """Compute the weighted mean of messages from masked ones.

    Args:
        messages: at least two, all with the same names.
        weights: one per message, known to its client; only their sum is revealed.
    """
    rows = [secure.row(m.tensors, weight, len(messages)) for m, weight in zip(messages, weights, strict=True)]
    return secure.mean(secure.summed(secure.masked(rows)), messages[0].tensors)
