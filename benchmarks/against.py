"""Two checkouts against each other: ``python benchmarks/against.py OLD NEW [--methods ...] [--turns N]``.

Each turn runs the same rounds of a method in a process of its own, first of one checkout, then of the other, pinned to
one core with one thread. What counts is the processor time of rounds with their evaluation, without start-up and the
first round, and its best over the turns; only the ratio is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

CODE = """
import logging, sys, time, warnings
warnings.filterwarnings("ignore"); logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import torch; torch.set_num_threads(1)
from lightning.pytorch import Callback, Trainer
from fl_lightning import methods
from fl_lightning.bench.data import images
from fl_lightning.nets import LeNetBN, MLP
name, rounds = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
options = {"WAFFLe": {"factors": {"fc1": 120}}, "WAFFLeL1": {"factors": {"fc1": 120}}, "PFedMe": {"lam": 15.0},
    "FedBPS": {"p": 0.5}, "FedMA": {}, "IFCA": {"clusters": 3}, "FeSEM": {"clusters": 3}, "FedDAF": {"add_norm": True}}
net = LeNetBN() if name == "FedGN" else MLP()
method = getattr(methods, name)(net, lr=0.04, epochs=3, batch_size=10, engine="stacked", **options.get(name, {}))
class Clock(Callback):
    times = []
    def on_validation_end(self, trainer, module): self.times.append(time.process_time())
settings = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0, max_epochs=rounds, callbacks=[Clock()])
Trainer(**settings).fit(method, images((1, 28, 28), clients=40, sizes=(30, 60), fraction=0.25))
print(Clock.times[-1] - Clock.times[0])
"""
METHODS = ["FedAvg", "FedProx", "SCAFFOLD", "PFedMe", "APFL", "FedPer", "QFFL", "WAFFLe", "WAFFLeL1", "FedBPS", "IFCA"]
METHODS += ["FeSEM", "FedGroup", "FedCluster", "WeightErosion", "WAFFLEAvg", "FedMA", "FedDAF", "FedGN", "Local"]


def seconds(root: str, method: str, rounds: int) -> float:
    """Processor time of one run in a process of its own."""
    command = ["taskset", "-c", "0", sys.executable, "-c", CODE, method, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    return float(found.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    for name in asked.methods:
        pairs = [[seconds(root, name, asked.rounds) for root in (asked.old, asked.new)] for _ in range(asked.turns)]
        old, new = map(min, zip(*pairs, strict=True))
        print(f"{name:14s} new / old {new / old:.3f}", flush=True)
