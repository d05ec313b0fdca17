"""Choose a setting of WAFFLe or its L1 variant on data held out of the clients' training sets; no test set is used.

    python benchmarks/choose.py --data MNIST --partition multimodal --option vi_lr_mult 30 100 300 1000 3000
    python benchmarks/choose.py --method WAFFLeL1 --option score_lr_mult 1 10 100

Prints, for every value, the mean validation accuracy over clients after the last round and its mean over the last five.
"""

from __future__ import annotations

import argparse
import ast
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from fl_lightning import methods
from fl_lightning.datamodules import CIFAR10, MNIST, FashionMNIST, FederatedDataModule, Multimodal, Unimodal
from fl_lightning.nets import MLP, CNNCifar, CNNFashion
from fl_lightning.quiet import quiet_trainer

#: Data, preset of the modes, net, factors and learning rate of the papers.
SETTINGS: dict[str, tuple[Any, Any, Any, dict[str, int], float]] = {
    "MNIST": (MNIST, "mnist", MLP, {"fc1": 120}, 0.04),
    "FashionMNIST": (FashionMNIST, "fashion_mnist", CNNFashion, {"conv1": 25, "conv2": 25}, 0.02),
    "CIFAR10": (CIFAR10, "cifar10", CNNCifar, {"conv1": 10, "conv2": 10, "fc1": 80, "fc2": 40}, 0.02),
}


class Curve(Callback):
    def __init__(self) -> None:
        self.accuracies: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.accuracies.append(float(trainer.callback_metrics["val/acc"]))


def held_out(data: str, partition: str, root: str | None, seed: int) -> FederatedDataModule:
    kind, modes, *_ = SETTINGS[data]
    scheme = Unimodal(clients=100) if partition == "unimodal" else Multimodal(modes)
    module: FederatedDataModule = kind(root=root, partition=scheme, fraction=0.1, val_fraction=0.1, seed=seed)
    return module


def run(args: argparse.Namespace, options: dict[str, Any]) -> list[float]:
    *_, net, factors, lr = SETTINGS[args.data]
    seed_everything(args.seed, verbose=False)
    curve = Curve()
    trainer = quiet_trainer(
        max_epochs=args.rounds,
        callbacks=[curve],
    )
    method = getattr(methods, args.method)(net(), factors, lr=lr, epochs=5, batch_size=10, **options)
    trainer.fit(method, held_out(args.data, args.partition, args.root, args.seed))
    return curve.accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["WAFFLe", "WAFFLeL1"], default="WAFFLe")
    parser.add_argument("--data", choices=SETTINGS, default="MNIST")
    parser.add_argument("--partition", choices=["unimodal", "multimodal"], default="multimodal")
    parser.add_argument("--root", help="folder that holds the data")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", nargs="+", default=["vi_lr_mult", "100"], help="an option and the values to try")
    args = parser.parse_args()
    torch.set_num_threads(1)
    name, *values = args.option
    print(f"{name:>20}  {'last':>6}  {'last 5':>6}")
    for value in values:
        try:
            options = {name: ast.literal_eval(value)}
        except (ValueError, SyntaxError):
            options = {name: value}
        accuracies = run(args, options)
        last = accuracies[-5:]
        print(f"{value:>20}  {100 * accuracies[-1]:6.2f}  {100 * sum(last) / len(last):6.2f}", flush=True)


if __name__ == "__main__":
    main()
