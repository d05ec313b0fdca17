"""Secure aggregation: the server gets sums and nothing of single clients."""

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
    """Lets the server see the weighted mean of a stage's messages, and no message.

    Clients write their weighted values as whole numbers and put masks on them that cancel in the sum
    (:mod:`fl_lightning.privacy.secure`); the method then finds the decoded mean instead of every message, so that
    it cannot use more. For methods whose server needs nothing else and whose weights do not depend on the data. Means
    differ from those without it by less than 2^-32; whole numbers (``num_batches_tracked``) become rounded means.

    Attack callbacks of the run hear no message: the views ``outsider`` and ``server`` see nothing of a client, and the
    view ``sums`` is what is left. It stands behind all callbacks that change messages, such as
    :class:`~fl_lightning.callbacks.DifferentialPrivacyCallback`, in the Trainer's list.

    In a deployed run sites put on the masks themselves, agree on keys by themselves, and send no message without
    (:mod:`fl_lightning.remote.secure_site`); both sides need the callback with the same options. The mean is then the
    simulation's, bit for bit.

    Args:
        threshold: share of a round's sites of which more have to stay to its end, 0.5 or more and below 1. As these are
            more than half, no client can have both kinds of its shares told by different sites.
        least: how many clients a sum must have at least.
    """

    hides_messages = True
    #: It works at the clients.
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
        """Refuse what would have to change single messages at a server that has none."""
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
        """The options, which clients have to approve."""
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
        """Leave the message as it is; the site puts the masks on when all other callbacks have changed it."""

    def needed(self, clients: int) -> int:
        """How many of so many clients have to stay to the end of a round.

        Example:
            >>> [SecureAggregationCallback().needed(clients) for clients in (2, 3, 4, 5, 10)]
            [2, 3, 3, 4, 7]
        """
        return max(math.floor(self.threshold * clients + 1e-9) + 1, self.least)

    def weight(self, method: FederatedModule, samples: int) -> float:
        """Weight of a client with so many samples."""
        return 1.0 if method.weighting == "uniform" else float(samples)

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Replace all messages by their mean, as the protocol gives it; those of real sites are it already."""
        assert isinstance(pl_module, FederatedModule)
        if not pl_module.exchange.simulated:
            return
        secure.check_cohort(len(messages), self.least)
        mean = secure_mean(messages, [self.weight(pl_module, message.samples) for message in messages])
        for message in messages:
            message.tensors = dict(mean)


def secure_mean(messages: list[Message], weights: list[float]) -> State:
    """The weighted mean of messages, computed from masked ones.

    Args:
        messages: at least two, all with the same names.
        weights: one for each, which its client knows; only their sum becomes known.
    """
    rows = [secure.row(m.tensors, weight, len(messages)) for m, weight in zip(messages, weights, strict=True)]
    return secure.mean(secure.summed(secure.masked(rows)), messages[0].tensors)
