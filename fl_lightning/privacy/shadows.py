"""Shadows: the adversary's own runs of the same method on its own data, to learn membership from."""

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
    """The client's training rows."""
    touched: Tensor
    """The training rows of its whole federation."""


class _Data(LightningDataModule):
    """DataModule of a federation, of whose clients a fraction trains in every round."""

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
    """Train shadow federations like the target; return their clients that sent messages or keep state.

    Args:
        method: the initial method of the run or the adversary; copied.
        federation: the data, of which only ``rows`` are used.
        rows: training rows of each client of each federation.
        rounds: number of rounds.
        like: the Trainer of the target's run, for its precision and device.
        memory: number of messages kept of each client.
        fraction: fraction of clients that train in a round.
        sums: whether to keep means of rounds, for views that use them.
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
