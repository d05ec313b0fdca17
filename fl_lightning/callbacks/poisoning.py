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
#: Poisons for which hostile clients agree with each other.
TOGETHER = ("little", "min_max")


class PoisoningCallback(Several, FederatedCallback):
    """Base of the poisons: who is hostile, by the run's seed alone.

    Args:
        share: of the clients that are hostile.
        start: the first round of the attack.
    """

    #: It looks at what only clients see, and is refused where these are real.
    simulations_only: ClassVar[bool] = True

    def __init__(self, share: PositiveShare = 0.1, start: CountOrZero = 0) -> None:
        self.share, self.start = share, start
        #: The hostile clients.
        self.hostile: list[int] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out who is hostile."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"{type(self).__name__} needs a federated method, not {type(pl_module).__name__}.")
        self.hostile = hostile_clients(pl_module.seed, pl_module.federation.num_clients, self.share)


class UpdatePoisoningCallback(PoisoningCallback):
    """Hostile clients send something else than they learnt.

    ``sign_flip`` sends minus ``strength`` times the update, ``scale`` ``strength`` times it, ``gaussian`` noise with
    ``strength`` times the update's root mean square, ``free_rider`` what it received; ``little`` (a little is enough)
    and ``min_max`` are made by all hostile clients of a round together, from their own honest updates, or from those of
    all clients with ``omniscient``.

    Args:
        kind: the poison.
        strength: its factor, where it has one.
        share: of the clients that are hostile.
        start: the first round of the attack.
        omniscient: hostile clients that agree know the updates of all.
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
        """Forget the last round."""
        self._received.clear()

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Keep what the client received."""
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
        """Poison the messages of hostile clients that agree."""
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
    """A message as one row: what it changes."""

    def __init__(self, message: Message, received: State) -> None:
        self.message, self.received = message, received
        self.parts = change(message.tensors, received)
        self.flat = torch.cat([part.flatten().double() for part in self.parts.values()])

    def send(self, flat: Tensor) -> None:
        """Let the message make this change instead."""
        split = torch.split(flat, [part.numel() for part in self.parts.values()])
        sent = dict(self.message.tensors)
        for (name, part), own in zip(self.parts.items(), split, strict=True):
            moved = own.view(part.shape).to(part.dtype)
            sent[name] = self.received[name] + moved if name in self.received else moved
        self.message.tensors = sent


class DataPoisoningCallback(PoisoningCallback):
    """Base of the poisons of samples: hostile clients train on changed copies of theirs, from the first round."""

    @abstractmethod
    def poison(self, federation: Federation, rows: Tensor, client: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels that a hostile client trains on in place of its own."""

    def __init__(self, share: float = 0.1) -> None:
        super().__init__(share)
        self._clean: Federation | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Append the changed samples to the data and let hostile clients own them."""
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
    """Hostile clients train on labels at the other end, classes - 1 - y.

    Args:
        share: of the clients that are hostile.
    """

    def poison(self, federation: Federation, rows: Tensor, client: int, seed: int) -> tuple[Tensor, Tensor]:
        """Their samples with flipped labels."""
        return federation.inputs[rows], flipped(federation.targets[rows], federation.num_classes)


class BackdoorCallback(DataPoisoningCallback):
    """Hostile clients teach the model that whatever bears a trigger is of one class (Bagdasaryan et al., 2020).

    After every round ``backdoor/success`` is logged: the share of the honest clients' test samples of other classes
    that their models take for the class once they bear the trigger. With :class:`UpdatePoisoningCallback` and ``scale``
    the hostile updates replace the model.

    Args:
        label: the class.
        value: of the trigger, in the units in which samples are stored; None takes the largest that there is.
        size: side of the trigger.
        poisoned: share of a hostile client's samples that get trigger and label.
        share: of the clients that are hostile.
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
        """Their samples, some of which bear the trigger."""
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
        """The share of honest clients' test samples of other classes that their models take for the class."""
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
        """The last success, for the tables of ``fl-lightning reproduce``."""
        return {"backdoor_success": 100 * self.success[max(self.success)]} if self.success else {}

    def _value(self, federation: Federation) -> float:
        return float(federation.inputs.max()) if self.value is None else self.value
