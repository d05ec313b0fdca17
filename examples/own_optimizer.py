"""A LightningModule with AdamW, a scheduler and a validation step of its own, made federated.

python examples/own_optimizer.py
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics.classification import MulticlassF1Score


class Classifier(LightningModule):
    """An ordinary LightningModule that knows nothing of federations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.f1 = MulticlassF1Score(10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.body(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """A metric of one's own: of every client, with its samples alone."""
        self.f1(self(batch[0]), batch[1])
        self.log("f1", self.f1)

    def configure_optimizers(self) -> Any:
        """AdamW whose learning rate falls with every pass over the data."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.005)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)}


def main(rounds: int = 10) -> dict[str, float]:
    """Make it federated, fit it, return what is known of the clients."""
    # These are the lines that make it federated.
    from fl_lightning.datamodules import Digits, Unimodal
    from fl_lightning.federate import federate

    data = Digits(partition=Unimodal(clients=20, classes_per_client=2), fraction=0.5, seed=0)
    method = federate(Classifier(), epochs=2, batch_size=10, engine="stacked", seed=0)
    trainer = Trainer(max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(method, data)

    found = {name: float(trainer.callback_metrics[f"val/{name}"]) for name in ("acc", "f1", "f1_std", "f1_worst10")}
    print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
