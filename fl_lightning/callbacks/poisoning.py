"""Hostile clients in a run: poisoned samples, poisoned updates, and backdoors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.callbacks.base import FederatedCallback, Several
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex, Federation
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.defence import change
from fl_lightning.privacy.hostile import flipped, hostile_clients, little, min_max, stamped
from fl_lightning.ranges import Count, CountOrZero, PositiveShare
from fl_lightning.wire import Message, State

Poison = Literal["sign_flip", "scale", "gaussian", "free_rider", "little", "min_max"]
#: Poisons for which hostile clients collude.
TOGETHER = ("little", "min_max")


class PoisoningCallback(Several, FederatedCallback):
    """Base class of poisons; the run's seed decides which clients are hostile.

    Args:
        share: share of hostile clients.
        start: the first round of the attack.
    """

    #: Uses the clients' private data, so it is refused in deployed runs.
    simulations_only: ClassVar[bool] = True

    def __init__(self, share: PositiveShare = 0.1, start: CountOrZero = 0) -> None:
        self.share, self.start = share, start
        #: The hostile clients.
        self.hostile: list[int] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the hostile clients."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"{type(self).__name__} needs a federated method, not {type(pl_module).__name__}.")
        self.hostile = hostile_clients(pl_module.seed, pl_module.federation.num_clients, self.share)


class UpdatePoisoningCallback(PoisoningCallback):
    """Hostile clients send poisoned updates.

    ``sign_flip`` sends the update times minus ``strength``, ``scale`` the update times ``strength``, ``gaussian`` noise
    of ``strength`` times the update's root mean square, ``free_rider`` the received model; for ``little`` (a little is
    enough) and ``min_max`` all hostile clients of a round collude and use their own honest updates, or those of all
    clients with ``omniscient``.

    Args:
        kind: the poison.
        strength: factor of the poison, if it has one.
        share: share of hostile clients.
        start: the first round of the attack.
        omniscient: whether colluding clients know the updates of all clients.
    """

    changes_messages = True

    def __init__(
        self,
        kind: Poison = "sign_flip",
        strength: float = 1.0,
        share: PositiveShare = 0.1,
        start: CountOrZero = 0,
        omniscient: bool = True,
    ) -> None:
        super().__init__(share, start)
        self.kind, self.strength, self.omniscient = kind, strength, omniscient
        self._received: dict[int, State] = {}

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Reset the messages of the last round."""
        self._received.clear()

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Keep the received message."""
        self._received[client] = message

    def on_client_end(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Poison the message of one hostile client."""
        if self.kind in TOGETHER or not self._strikes(trainer, pl_module, client):
            return
        update = _Update(message, self._received[client])
        if self.kind == "gaussian":
            size = self.strength * float(update.flat.pow(2).mean().sqrt())
            update.send(size * self._normal(trainer, pl_module, client, update.flat))
        else:
            update.send(
                {"sign_flip": -self.strength, "scale": self.strength, "free_rider": 0.0}[self.kind] * update.flat
            )

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Poison the messages of colluding clients."""
        if self.kind not in TOGETHER:
            return
        updates = {m.client: _Update(m, self._received[m.client]) for m in messages}
        own = [client for client in updates if self._strikes(trainer, pl_module, client)]
        known = list(updates) if self.omniscient else own
        if not own or len(known) < 2:
            return
        rows = torch.stack([updates[client].flat for client in known])
        poison = min_max(rows) if self.kind == "min_max" else little(rows, len(own), len(updates))
        for client in own:
            updates[client].send(poison)

    def _strikes(self, trainer: Trainer, module: Any, client: int) -> bool:
        return trainer.current_epoch >= self.start and module.client_of(client) in self.hostile

    def _normal(self, trainer: Trainer, module: Any, client: int, like: Tensor) -> Tensor:
        rng = seeding.stream(module.seed, "hostile.noise", trainer.current_epoch, client)
        return seeding.normal(rng, like.shape, like.dtype).to(like.device)


class _Update:
    """The update of a message as a flat vector."""

    def __init__(self, message: Message, received: State) -> None:
        self.message, self.received = message, received
        self.parts = change(message.tensors, received)
        self.flat = torch.cat([part.flatten().double() for part in self.parts.values()])

    def send(self, flat: Tensor) -> None:
        """Replace the message's update."""
        split = torch.split(flat, [part.numel() for part in self.parts.values()])
        sent = dict(self.message.tensors)
        for (name, part), own in zip(self.parts.items(), split, strict=True):
            moved = own.view(part.shape).to(part.dtype)
            sent[name] = self.received[name] + moved if name in self.received else moved
        self.message.tensors = sent


class DataPoisoningCallback(PoisoningCallback):
    """Base class of data poisons: hostile clients train on changed copies of their samples, from the first round."""

    @abstractmethod
    def poison(self, federation: Federation, rows: Tensor, client: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels that a hostile client trains on instead of its own."""

    def __init__(self, share: float = 0.1) -> None:
        super().__init__(share)
        self._clean: Federation | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Append the changed samples to the data and assign them to hostile clients."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        assert isinstance(pl_module, FederatedModule)
        self._clean = federation = pl_module.federation
        parts, inputs, targets = list(federation.train), [federation.inputs], [federation.targets]
        size = len(federation.targets)
        for client in self.hostile:
            x, y = self.poison(federation, parts[client], client, pl_module.seed)
            parts[client] = torch.arange(size, size + len(y))
            size += len(y)
            inputs.append(x)
            targets.append(y)
        index = ClientIndex.of([part.cpu() for part in parts]).to(federation.device)
        pl_module.datamodule.federation = replace(
            federation, inputs=torch.cat(inputs), targets=torch.cat(targets), train=index
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the data."""
        if self._clean is not None:
            trainer.datamodule.federation = self._clean  # type: ignore[attr-defined]
            self._clean = None


class LabelFlipCallback(DataPoisoningCallback):
    """Hostile clients train on flipped labels, classes - 1 - y.

    Args:
        share: share of hostile clients.
    """

    def poison(self, federation: Federation, rows: Tensor, client: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the samples with flipped labels."""
        return federation.inputs[rows], flipped(federation.targets[rows], federation.num_classes)


class BackdoorCallback(DataPoisoningCallback):
    """Hostile clients teach the model to assign inputs with a trigger to one class (Bagdasaryan et al., 2020).

    ``backdoor/success`` is logged after every round: the share of the honest clients' test samples of other classes
    that their models assign to the class if the trigger is added. Combine it with :class:`UpdatePoisoningCallback` and
    ``scale`` for model replacement.

    Args:
        label: the class.
        value: value of the trigger, in the units of stored samples; None takes the largest value in the data.
        size: side length of the trigger.
        poisoned: share of a hostile client's samples with trigger and label.
        share: share of hostile clients.
    """

    def __init__(
        self,
        label: CountOrZero = 0,
        value: float | None = None,
        size: Count = 3,
        poisoned: PositiveShare = 0.5,
        share: PositiveShare = 0.1,
    ) -> None:
        super().__init__(share)
        self.label, self.value, self.size, self.poisoned = label, value, size, poisoned
        #: Success by number of rounds.
        self.success: dict[int, float] = {}

    def poison(self, federation: Federation, rows: Tensor, client: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the samples, some of them with the trigger."""
        x, y = federation.inputs[rows].clone(), federation.targets[rows].clone()
        order = seeding.permutation(seeding.stream(seed, "hostile.backdoor", client=client), len(rows))
        some = order[: max(1, round(self.poisoned * len(rows)))].to(rows.device)
        x[some] = stamped(x[some], self._value(federation), self.size)
        y[some] = self.label
        return x, y

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log the success."""
        assert isinstance(pl_module, FederatedModule)
        rate = self.measure(pl_module)
        self.success[pl_module.completed_rounds] = rate
        pl_module.log("backdoor/success", rate, on_step=False, on_epoch=True, batch_size=1)

    @torch.no_grad()
    def measure(self, module: FederatedModule) -> float:
        """Return the share of honest clients' triggered test samples of other classes assigned to the class."""
        data, federation = module.datamodule, module.federation
        honest = [client for client in range(federation.num_clients) if client not in self.hostile]
        marked = federation.inputs.clone()
        rows = federation.test.flat
        marked[rows] = stamped(marked[rows], self._value(federation), self.size)
        hit = total = 0
        data.federation = replace(federation, inputs=marked)
        try:
            for _, logits, labels in module.outputs(honest, "test"):
                others = labels != self.label
                hit += int((logits.argmax(1)[others] == self.label).sum())
                total += int(others.sum())
        finally:
            data.federation = federation
        return hit / total if total else float("nan")

    def run_metrics(self) -> dict[str, float]:
        """Return the last success, for the tables of ``fl-lightning reproduce``."""
        return {"backdoor_success": 100 * self.success[max(self.success)]} if self.success else {}

    def _value(self, federation: Federation) -> float:
        return float(federation.inputs.max()) if self.value is None else self.value
