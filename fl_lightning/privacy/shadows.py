"""Shadows: runs of the adversary's own, of the same method on data of its own, that teach it what members look like."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.datamodules.loaders import ClientChunks, Tick
from fl_lightning.federation import Federation
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.data import as_clients
from fl_lightning.privacy.wiretap import Run, Wire, Wiretap, finished
from fl_lightning.quiet import quiet_trainer, silence


class Shadow(NamedTuple):
    """A client of a shadow federation."""

    run: Run
    client: int
    group: int
    """Number of the federation."""
    inside: Tensor
    """The rows that it trained on."""
    touched: Tensor
    """The rows that any client of its federation trained on."""


class _Data(LightningDataModule):
    """A federation as it is, of whose clients a share trains in every round."""

    def __init__(self, federation: Federation, fraction: float, seed: int) -> None:
        super().__init__()
        self.federation, self.fraction, self.seed = federation, fraction, seed

    def cohort(self, round: int) -> list[int]:
        clients = self.federation.num_clients
        order = seeding.permutation(seeding.stream(self.seed, "sampling", round), clients).tolist()
        return sorted(order[: max(1, int(self.fraction * clients + 0.5))])

    def train_dataloader(self) -> Tick:
        return Tick()

    def val_dataloader(self) -> ClientChunks:
        return ClientChunks(range(self.federation.num_clients), 100)


def train_shadows(
    method: FederatedModule,
    federation: Federation,
    rows: Sequence[Sequence[Tensor]],
    rounds: int,
    like: Trainer,
    memory: int = 3,
    fraction: float = 1.0,
    sums: bool = False,
) -> list[Shadow]:
    """Train shadow federations as the target is trained; returns their clients that sent anything or keep anything.

    Args:
        method: the method as its run began (or as the adversary begins); copied.
        federation: the data; only ``rows`` of it are used.
        rows: for each federation, what each of its clients trains on.
        rounds: number of rounds.
        like: a Trainer of the target's run, for its precision and device.
        memory: how many messages are kept of each.
        fraction: share of the clients that trains in a round.
        sums: whether means of rounds are kept, for views that live on them.
    """
    found: list[Shadow] = []
    for group, parts in enumerate(rows):
        module = copy.deepcopy(method)
        module.seed = int(seeding.stream(method.seed, "shadow", client=group).integers(2**31))
        wire = Wire(memory=memory)
        with torch.inference_mode(False), torch.enable_grad(), silence():
            trainer = quiet_trainer(
                max_epochs=rounds,
                accelerator="cpu" if method.device.type == "cpu" else "gpu",
                devices=1,
                precision=like.precision,
                limit_val_batches=0,
                callbacks=[Wiretap(wire, sums)],
            )
            trainer.fit(module, datamodule=_Data(as_clients(federation, parts), fraction, module.seed))
        run, touched = finished(module, wire), torch.cat(list(parts))
        found += [Shadow(run, client, group, parts[client], touched) for client in sorted(wire.sent)]
    return found
