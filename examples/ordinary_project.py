"""The library's DataModule in an ordinary Lightning project: same samples, partition and seed, no federation.

python examples/ordinary_project.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from fl_lightning.datamodules import Digits, Pooled, Unimodal


class Plain(LightningModule):
    """An ordinary module for ordinary batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy."""
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), batch_size=len(y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(epochs: int = 5) -> dict[str, float]:
    """Train a central baseline on all samples, and client 3 alone."""
    data = Digits(partition=Unimodal(clients=20, classes_per_client=2))
    scores = {}
    for name, clients in (("everyone", None), ("client 3", [3])):
        pooled = Pooled(data, batch_size=32, clients=clients)
        module = Plain()
        trainer = Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False)
        trainer.fit(module, datamodule=pooled)
        scores[name] = trainer.test(module, datamodule=pooled, verbose=False)[0]["accuracy"]
    print(scores)
    return scores


if __name__ == "__main__":
    main()
