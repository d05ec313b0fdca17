"""Regression: disease progression in a year, at six hospitals with patients of different ages.

python examples/hospitals.py
"""

import numpy as np
import torch
from lightning.pytorch import Trainer
from sklearn.datasets import load_diabetes

from fl_lightning.datamodules import FromFrame
from fl_lightning.methods import FedAvg, FedPer, Local
from fl_lightning.nets import MLP


def main(rounds: int = 20) -> dict[str, float]:
    """Train Local, FedAvg and FedPer; return the mean test error of each."""
    data = load_diabetes(scaled=False)
    table = dict(zip(data.feature_names, data.data.T, strict=True))
    table["hospital"] = np.searchsorted(np.quantile(table["age"], np.arange(1, 6) / 6), table["age"])
    table["progression"] = data.target / 100  # scales targets to about 1
    errors = {}
    print("method    mean error  worst site     R2")
    for kind in (Local, FedAvg, FedPer):
        patients = FromFrame(table, client="hospital", target="progression", seed=0)
        torch.manual_seed(0)
        net = MLP(in_features=10, hidden=(16,), num_classes=1, bias=True)
        options = {"task": "Regression", "optimizer": "AdamW", "lr": 0.01, "epochs": 2, "engine": "stacked", "seed": 0}
        trainer = Trainer(max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False,
                          enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        method = kind(net, **options)
        trainer.fit(method, patients)
        (found,) = trainer.test(method, patients, verbose=False)
        errors[kind.__name__] = 100 * found["test/rmse"]
        worst, explained = 100 * found["test/rmse_worst10"], found["test/r2"]
        print(f"{kind.__name__:<8} {errors[kind.__name__]:11.1f} {worst:11.1f} {explained:6.2f}")
    return errors


if __name__ == "__main__":
    main()
