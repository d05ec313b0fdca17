"""A LightningModule with AdamW, a scheduler and its own validation step, federated.

python examples/own_optimizer.py
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics.classification import MulticlassF1Score


class Classifier(LightningModule):
    """An ordinary LightningModule."""

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
        """Log F1; in a federation it is computed per client."""
        self.f1(self(batch[0]), batch[1])
        self.log("f1", self.f1)

    def configure_optimizers(self) -> Any:
        """AdamW with a learning rate that decays every epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.005)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)}


def main(rounds: int = 12) -> dict[str, dict[str, float]]:
    """Federate the module with two methods, fit both, return the metrics over clients."""
    # Only these lines are specific to the federation.
    from fl_lightning.datamodules import Digits, Unimodal
    from fl_lightning.federate import federate
    from fl_lightning.methods import FedAvg, FedPer

    def fitted(kind: Any) -> Trainer:
        torch.manual_seed(0)
        data = Digits(partition=Unimodal(clients=20, classes_per_client=2), fraction=0.5, seed=0)
        method = federate(Classifier(), kind, epochs=2, batch_size=10, engine="stacked", seed=0)
        trainer = Trainer(max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False,
                          enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        trainer.fit(method, data)
        return trainer

    names, found = ("acc", "acc_worst10", "f1", "f1_worst10"), {}
    print("method  " + " ".join(f"{name:>12}" for name in names))
    for kind in (FedAvg, FedPer):
        logged = fitted(kind).callback_metrics
        found[kind.__name__] = {name: float(logged[f"val/{name}"]) for name in names}
        print(f"{kind.__name__:<8}" + " ".join(f"{value:12.3f}" for value in found[kind.__name__].values()))
    return found


if __name__ == "__main__":
    main()
