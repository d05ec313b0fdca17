"""FairnessCallback on a centrally trained model: accuracy by group, gap and fairness metrics.

python examples/fair_central_model.py
"""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.callbacks import FairnessCallback

#: Samples per group; the last group is a small minority whose labels follow another rule.
SIZES = (600, 300, 60)


def samples(seed: int) -> TensorDataset:
    """Inputs, labels and group of each sample."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
    x = torch.randn(len(group), 8, generator=generator)
    score = torch.where(group == 2, x[:, 1] - x[:, 0], x[:, 0] + x[:, 1])
    return TensorDataset(x, (score > 0).long(), group)


class Central(LightningModule):
    """An ordinary model whose validation step returns predictions, labels and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy over all samples."""
        x, y, _ = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Predictions, labels and groups for the callback."""
        x, y, group = batch
        return {"preds": self.net(x), "target": y, "group": group}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder: str = "runs/fair_central_model", epochs: int = 5) -> dict[str, float]:
    """Fit, and return the logged metrics; the table of groups is in the folder."""
    torch.manual_seed(0)
    callback = FairnessCallback(folder=folder)
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback]
    )
    loaders = [DataLoader(samples(seed), batch_size=64, shuffle=seed == 0) for seed in (0, 1)]
    trainer.fit(Central(), *loaders)
    print((Path(folder) / "fairness_val.md").read_text())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    main()
