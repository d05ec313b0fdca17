"""AUROC by site: benign or malignant, at five clinics that see tumours of different sizes.

python examples/breast_cancer.py
"""

import numpy as np
import torch
from lightning.pytorch import Trainer
from sklearn.datasets import load_breast_cancer

from fl_lightning.datamodules import FromFrame
from fl_lightning.methods import FedAvg, Local
from fl_lightning.nets import MLP
from fl_lightning.tasks import Classification

#: Input features, without size, which would make the task too easy.
SEEN = ["mean texture", "mean smoothness", "mean symmetry", "mean fractal dimension", "smoothness error"]


def main(rounds: int = 20) -> dict[str, torch.Tensor]:
    """Train every clinic alone and one model for all; return the AUROC of every clinic."""
    data = load_breast_cancer()
    table = dict(zip(data.feature_names, data.data.T, strict=True))
    # Two of three patients go to the clinic for their tumour size, the others anywhere: every clinic sees both kinds.
    size = np.searchsorted(np.quantile(table["mean area"], np.arange(1, 5) / 5), table["mean area"])
    anywhere = np.random.default_rng(0).integers(0, 5, len(size))
    table["clinic"] = np.where(np.arange(len(size)) % 3 == 0, anywhere, size)
    table["kind"] = data.target_names[data.target]
    scores = {}
    for kind in (Local, FedAvg):
        patients = FromFrame(table, client="clinic", target="kind", features=SEEN, test_fraction=0.4, seed=0)
        torch.manual_seed(0)
        net = MLP(in_features=len(SEEN), hidden=(16,), num_classes=2, bias=True)
        method = kind(net, task=Classification("auroc"), optimizer="Adam", lr=0.005, engine="stacked", seed=0)
        trainer = Trainer(max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False,
                          enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        trainer.fit(method, patients)
        trainer.test(method, patients, verbose=False)
        scores[kind.__name__] = method.evaluator.scores["test"]
    print("clinic  patients  " + "  ".join(f"{name:>6}" for name in scores))
    for clinic, patients_tested in enumerate(patients.federation.test.sizes.tolist()):
        print(f"{clinic:<6}  {patients_tested:8}  " + "  ".join(f"{v[clinic]:6.3f}" for v in scores.values()))
    print("mean              " + "  ".join(f"{v.mean():6.3f}" for v in scores.values()))
    return scores


if __name__ == "__main__":
    main()
