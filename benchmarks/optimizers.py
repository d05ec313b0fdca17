"""Local optimizers and a regression on stacked clients, each against a plain loop of the same with ``torch.optim``.

    python benchmarks/optimizers.py [--repeats 5] [--output benchmarks/optimizers.json]

Ten clients with sixty samples each train a perceptron 784-200-10 for two epochs of ten samples a step. Both sides take
turns, one thread, and the best time of each counts; a ratio above 1 says that the engine is faster.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.datamodules import IID, TensorFederation
from fl_lightning.engine import Job, LocalTraining, make_engine
from fl_lightning.local_optim import SGD, Adam, AdamW, LocalOptimizer, RMSprop
from fl_lightning.methods import FedAvg
from fl_lightning.nets import MLP
from fl_lightning.tasks import Classification, Regression, Task

CLIENTS, SAMPLES, EPOCHS, BATCH, LR = 10, 75, 2, 10, 0.001
CASES: dict[str, tuple[LocalOptimizer, Any, Task]] = {
    "SGD": (SGD(), torch.optim.SGD, Classification()),
    "SGD, regression": (SGD(), torch.optim.SGD, Regression()),
    "Nesterov": (SGD(0.9, nesterov=True), lambda p, lr: torch.optim.SGD(p, lr, 0.9, nesterov=True), Classification()),
    "Adam": (Adam(), torch.optim.Adam, Classification()),
    "AdamW": (AdamW(), torch.optim.AdamW, Classification()),
    "AdamW, regression": (AdamW(), torch.optim.AdamW, Regression()),
    "RMSprop": (RMSprop(), torch.optim.RMSprop, Classification()),
}


class Trained(FedAvg):
    """FedAvg with the loss of a task."""

    of: Task

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.of.loss(output, target)


def measure(rule: LocalOptimizer, make: Any, task: Task, repeats: int) -> dict[str, Any]:
    """Best seconds of the plain loop and of every engine, and the ratio of the fastest."""
    torch.manual_seed(0)
    x = torch.randn(CLIENTS * SAMPLES, 784)
    y = torch.randint(10, (len(x),)) if task.of_classes else torch.randn(len(x), 10)
    federation = TensorFederation(x, y, partition=IID(CLIENTS)).federation
    method = Trained(MLP(), seed=0)
    method.of, method.local = task, LocalTraining(LR, EPOCHS, BATCH, optimizer=rule)
    jobs = [Job(client, method.server_state()) for client in range(CLIENTS)]

    def plain() -> None:
        net = copy.deepcopy(method.net)
        for client in range(CLIENTS):
            net.load_state_dict(method.net.state_dict())
            optimizer, index = make(net.parameters(), lr=LR), federation.train[client]
            for _ in range(EPOCHS):
                for part in index[torch.randperm(len(index))].split(BATCH):
                    optimizer.zero_grad()
                    task.loss(net(federation.inputs[part]), federation.targets[part]).backward()
                    optimizer.step()

    def of_engine(name: str) -> Callable[[], Any]:
        engine = make_engine(name)
        return lambda: engine.train(method, federation, jobs, 9)  # late enough that steps are traced

    sides: dict[str, Callable[[], Any]] = {"plain": plain}
    sides |= {name: of_engine(name) for name in ("sequential", "stacked", "captured")}
    best = dict.fromkeys(sides, float("inf"))
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            began = time.process_time()
            run()
            if repeat:  # the first prepares
                best[name] = min(best[name], time.process_time() - began)
    engine = min(list(best)[1:], key=best.__getitem__)
    return {"seconds": best, "engine": engine, "ratio": best["plain"] / best[engine]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, case in CASES.items():
        results[name] = measure(*case, args.repeats)
        print(f"{name:<18} {results[name]['ratio']:.2f} {results[name]['engine']}", flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
