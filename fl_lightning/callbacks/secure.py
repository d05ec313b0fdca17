"""Secure aggregation in a simulated run: the server gets sums and nothing of single clients."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.privacy import secure
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
    """

    hides_messages = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods and runs whose server needs single messages."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(
                f"SecureAggregationCallback needs a federated method, not {type(pl_module).__name__}."
            )
        kind = type(pl_module).__name__
        if not (pl_module.aggregates_by_mean and pl_module.aggregates_sums):
            raise FederationError(
                f"The server of {kind} needs more than the mean of its clients' messages: secure aggregation hides it."
            )
        if pl_module.aggregation is not None:
            raise FederationError("A robust rule needs single messages, which secure aggregation hides: leave one out.")
        callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
        for later in callbacks[callbacks.index(self) + 1 :]:
            if isinstance(later, FederatedCallback) and later.changes_messages:
                raise FederationError(
                    f"{type(later).__name__} changes messages: put it before SecureAggregationCallback in the list."
                )

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Replace all messages by their mean, as the protocol gives it."""
        assert isinstance(pl_module, FederatedModule)
        uniform = pl_module.weighting == "uniform"
        mean = secure_mean(messages, [1.0 if uniform else float(message.samples) for message in messages])
        for message in messages:
            message.tensors = dict(mean)


def secure_mean(messages: list[Message], weights: list[float]) -> State:
    """The weighted mean of messages, computed from masked ones.

    Args:
        messages: at least two, all with the same names.
        weights: one for each, which its client knows; only their sum becomes known.
    """
    first = messages[0].tensors
    if not first:
        return {}
    rows = [
        secure.encoded(torch.cat([w * _flat(m.tensors), torch.tensor([w], dtype=torch.float64)]), len(messages))
        for m, w in zip(messages, weights, strict=True)
    ]
    total = secure.decoded(secure.summed(secure.masked(rows)))
    parts = torch.split(total[:-1] / total[-1], [value.numel() for value in first.values()])
    mean: State = {}
    for (name, value), part in zip(first.items(), parts, strict=True):
        found = part.view(value.shape) if value.is_floating_point() else part.view(value.shape).round()
        mean[name] = found.to(value.device, value.dtype)
    return mean


def _flat(tensors: State) -> Tensor:
    return torch.cat([value.flatten().double().cpu() for value in tensors.values()])
