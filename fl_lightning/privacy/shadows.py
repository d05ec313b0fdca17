"""Shadows: runs of the adversary's own, of the same method on data of its own, that teach it what members look like."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.datamodules.loaders import ClientChunks, Tick
from fl_lightning.federation import Federation
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.data import as_clients
from fl_lightning.privacy.wiretap import Run, Wire, Wiretap, finished


class _Data(LightningDataModule):
    """A federation as it is, all of whose clients train in every round."""

    def __init__(self, federation: Federation) -> None:
        super().__init__()
        self.federation = federation

    def cohort(self, round: int) -> list[int]:
        return list(range(self.federation.num_clients))

    def train_dataloader(self) -> Tick:
        return Tick()

    def val_dataloader(self) -> ClientChunks:
        return ClientChunks(range(self.federation.num_clients), 100)


def train_shadows(
    method: FederatedModule,
    federation: Federation,
    rows: Sequence[Tensor],
    rounds: int,
    like: Trainer,
    together: bool = True,
    memory: int = 3,
) -> list[tuple[Run, int]]:
    """Train shadows as the method trains clients, by the same number of rounds.

    Args:
        method: the method as its run began (or as the adversary begins); copied.
        federation: the data; only ``rows`` of it are used.
        rows: what each shadow trains on.
        rounds: number of rounds.
        like: a Trainer of the target's run, for its precision and device.
        together: the shadows are the clients of one federation; else each is the only client of its own.
        memory: how many messages are kept of each.

    Returns:
        The run of each shadow, and the shadow's number as a client in it.
    """
    groups = [list(range(len(rows)))] if together else [[i] for i in range(len(rows))]
    found: list[tuple[Run, int]] = []
    for group in groups:
        module = copy.deepcopy(method)
        module.seed = int(seeding.stream(method.seed, "shadow", client=group[0]).integers(2**31))
        wire = Wire(memory=memory)
        with torch.inference_mode(False), torch.enable_grad(), _quiet():
            trainer = Trainer(
                max_epochs=rounds,
                accelerator="cpu" if method.device.type == "cpu" else "gpu",
                devices=1,
                precision=like.precision,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                callbacks=[Wiretap(wire)],
            )
            trainer.fit(module, datamodule=_Data(as_clients(federation, [rows[i] for i in group])))
        run = finished(module, wire)
        found += [(run, client) for client in range(len(group))]
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """No word of the shadows' Trainers: the user started one run."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
