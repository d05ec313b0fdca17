"""Client SGD steps per second through ``Trainer.fit``, against a bare PyTorch loop in the same process.

    python benchmarks/speed.py [--data FOLDER] [--threads N] [--repeats N] [--only NAME] [--engine NAME] [--json FILE]

Both do the same work in turns, so that what else the machine does hits both: ten of a hundred clients, five local
epochs, batches of ten. The federated side counts whole rounds after the first, with messages, the aggregate and the CSV
logger, without validation, which the bare loop has not; what a validation of all hundred clients costs is reported as
its share of a round. Only ratios mean anything.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from fl_lightning.datamodules import MNIST, FashionMNIST, FederatedDataModule, Unimodal
from fl_lightning.methods import FedAvg
from fl_lightning.nets import MLP, CNNFashion


class Workload(NamedTuple):
    data: type[FederatedDataModule]
    net: type[nn.Module]
    lr: float
    epochs: int


WORKLOADS = {
    "mnist-mlp": Workload(MNIST, MLP, 0.04, 5),
    "fmnist-cnn": Workload(FashionMNIST, CNNFashion, 0.02, 5),
}
BATCH = 10


def bare(workload: Workload, data: FederatedDataModule, round: int) -> float:
    """Steps per second of a plain loop over one cohort, on the same in-memory data."""
    federation = data.federation
    x, y = inputs(data), federation.targets
    net = workload.net()
    start, steps, began = copy.deepcopy(net.state_dict()), 0, time.perf_counter()
    for client in data.cohort(round):
        net.load_state_dict(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=workload.lr)
        index = federation.train[client]
        for _ in range(workload.epochs):
            for part in index[torch.randperm(len(index))].split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x[part]), y[part]).backward()
                optimizer.step()
                steps += 1
    return steps / (time.perf_counter() - began)


def inputs(data: FederatedDataModule) -> torch.Tensor:
    """All inputs, normalised once: the bare loop pays nothing for it."""
    if not hasattr(data, "_bench_inputs"):
        federation = data.federation
        data._bench_inputs = federation.features(federation.inputs, torch.float32)  # type: ignore[attr-defined]
    ready: torch.Tensor = data._bench_inputs  # type: ignore[attr-defined]
    return ready


class Clock(Callback):
    """Steps per second over the rounds after the first, and the share of validation in them."""

    def __init__(self) -> None:
        self.validating = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.began, self.before, self.validating = time.perf_counter(), steps_of(pl_module), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.validating -= time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.validating += time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        elapsed = time.perf_counter() - self.began
        self.speed = (steps_of(pl_module) - self.before) / (elapsed - self.validating)
        self.share = self.validating / elapsed


def steps_of(module: FedAvg) -> int:
    return sum(module.snapshots[client].steps for client in module.snapshots)


def federated(workload: Workload, data: FederatedDataModule, rounds: int, engine: str) -> tuple[float, float, str]:
    """Steps per second through ``Trainer.fit``, the share of validation, and the engine that did it."""
    clock = Clock()
    method = FedAvg(workload.net(), lr=workload.lr, epochs=workload.epochs, batch_size=BATCH, engine=engine)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            max_epochs=rounds + 1,
            accelerator="cpu",
            logger=CSVLogger(folder),
            callbacks=[clock],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        ).fit(method, datamodule=data)
    return clock.speed, clock.share, getattr(method.engine, "choice", None) or method.engine.name


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    workload = WORKLOADS[name]
    root = {} if args.data is None else {"root": args.data}
    data = workload.data(partition=Unimodal(clients=100, classes_per_client=2), fraction=0.1, **root)
    inputs(data)
    plain, ours, shares, engines = [], [], [], set()
    for repeat in range(args.repeats):
        plain.append(bare(workload, data, repeat))
        speed, share, engine = federated(workload, data, args.rounds, args.engine)
        ours.append(speed)
        shares.append(share)
        engines.add(engine)
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
        "steps_per_second": round(statistics.median(ours)),
        "bare_steps_per_second": round(statistics.median(plain)),
        "validation_share_of_a_round": round(statistics.median(shares), 3),
        "engine": sorted(engines),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the data sets; default: FL_LIGHTNING_DATA or ./data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="rounds timed in each repeat")
    parser.add_argument("--only", choices=WORKLOADS)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    result: dict[str, Any] = {"workloads": {}}
    for name in [args.only] if args.only else WORKLOADS:
        result["workloads"][name] = measure(name, args)
        print(name, result["workloads"][name], flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    print(json.dumps({"workloads": {k: {"ratio": v["ratio"]} for k, v in result["workloads"].items()}}))


if __name__ == "__main__":
    main()
