"""Your own LightningModule, federated: its training_step and optimizer are unchanged.

python examples/own_module.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn


class Classifier(LightningModule):
    """An ordinary LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.body(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy with label smoothing."""
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, used by every client."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


def main(rounds: int = 10) -> float:
    """Federate the module, fit it, return the mean accuracy over clients."""
    # Only these lines are specific to the federation.
    from fl_lightning.datamodules import Digits, Unimodal
    from fl_lightning.federate import federate

    data = Digits(partition=Unimodal(clients=20, classes_per_client=2), fraction=0.5)
    method = federate(Classifier(), epochs=5, batch_size=10)
    trainer = Trainer(max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(method, data)

    accuracy = float(trainer.callback_metrics["val/acc"])
    print(f"mean accuracy over clients: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
