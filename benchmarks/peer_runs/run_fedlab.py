"""FedAvg with FedLab: its standalone pipeline of a server handler and a serial client trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from turns import BATCH, CLIENTS, COHORT, EPOCHS, LR, Turns, loader, steps_of

from fl_lightning.nets import MLP

PACKAGE = "fedlab"


class Clients(FedDataset):
    def __init__(self, memory: bool) -> None:
        super().__init__()
        self.num, self.memory, self.steps = CLIENTS, memory, 0

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Iterable[Any]:
        self.steps += steps_of(id)
        return loader(id, self.memory)


class Pipeline(StandalonePipeline):
    def __init__(self, handler: Any, trainer: Any, turns: Turns) -> None:
        super().__init__(handler, trainer)
        self.turns = turns

    def evaluate(self) -> None:
        """FedLab's hook at the end of a round."""
        self.turns.round_over(self.trainer.dataset.steps)
        self.trainer.dataset.steps = 0


def run(turns: Turns) -> None:
    net = MLP()
    trainer = FedAvgSerialClientTrainer(net, CLIENTS)
    trainer.setup_dataset(Clients(turns.memory))
    trainer.setup_optim(EPOCHS, BATCH, LR)
    Pipeline(FedAvgServerHandler(net, turns.rounds, COHORT / CLIENTS), trainer, turns).main()
