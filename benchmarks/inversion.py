"""Model inversion of FedAvg and WAFFLe with equal effort: each prior is chosen on a federation of the adversary's own.

    python benchmarks/inversion.py --rounds 10 --seeds 2

Fashion-MNIST, ten clients; beside the strongest attack of the outsider stand the baselines that need no model, and the
weak prior (a total variation of 0.001) of the tables of published results.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import seed_everything

from fl_lightning.callbacks import ModelInversionCallback
from fl_lightning.datamodules import IID, FashionMNIST
from fl_lightning.methods import FedAvg, WAFFLe
from fl_lightning.nets import MLP
from fl_lightning.quiet import quiet_trainer
from fl_lightning.sheet import markdown_head, markdown_row

METHODS: dict[str, Any] = {
    "FedAvg": lambda: FedAvg(MLP(), lr=0.04, epochs=5, batch_size=10, engine="stacked"),
    "WAFFLe": lambda: WAFFLe(MLP(), lr=0.04, epochs=5, batch_size=10, engine="stacked"),
}
SCORES = ("psnr", "ssim", "attack_acc")


def attacked(name: str, seed: int, arguments: argparse.Namespace, folder: str) -> dict[str, dict[str, float]]:
    seed_everything(seed, verbose=False)
    common = {"steps": arguments.steps, "starts": 2, "clients": 2, "judge": f"{folder}/judge.pt", "judge_epochs": 2}
    tuned = ModelInversionCallback(["outsider"], variation=None, folder=f"{folder}/tuned", **common)
    weak = ModelInversionCallback(["outsider"], variation=1e-3, folder=f"{folder}/weak", **common)
    method = METHODS[name]()
    method.seed = seed
    quiet_trainer(
        max_epochs=arguments.rounds,
        limit_val_batches=0,
        callbacks=[tuned, weak],
    ).fit(method, FashionMNIST(partition=IID(10, train_samples=arguments.samples), limit=arguments.limit))
    found: dict[str, dict[str, float]] = {}
    for label, callback in (("tuned", tuned), ("weak", weak)):
        best = callback.report.strongest(view="outsider")
        found[label] = {score: best[score] for score in SCORES}
    found["tuned"]["variation"] = tuned.inversion.variation
    for baseline in ("grey", "mean", "class mean"):
        rows = [row for row in tuned.report.baselines if row["variant"] == baseline]
        found[baseline] = {score: sum(row[score] for row in rows) / len(rows) for score in SCORES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--limit", type=int, default=12000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    print(markdown_head(["method", "seed", "attack", *SCORES, "variation"], left=3))
    with TemporaryDirectory() as folder:
        for name in METHODS:
            for seed in range(arguments.seeds):
                for attack, scores in attacked(name, seed, arguments, folder).items():
                    rows.append({"method": name, "seed": seed, "attack": attack, **scores})
                    told = [f"{scores[score]:.3f}" for score in SCORES]
                    print(markdown_row([name, seed, attack, *told, scores.get("variation", "")]), flush=True)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
