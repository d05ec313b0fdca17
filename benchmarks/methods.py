"""Every method's perceptron on ten of a hundred clients, against a plain loop of its own moves.

    python benchmarks/methods.py [--only FedAvg ...] [--repeats 3] [--output benchmarks/methods.json]

The plain loop trains one client after the other, minibatch by minibatch, with autograd: what a method's paper would be
programmed as.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fl_lightning import methods
from fl_lightning.bench.measure import measure
from fl_lightning.bench.workloads import of_method
from fl_lightning.module import FederatedModule
from fl_lightning.nets import MLP

#: What a method needs beyond its defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "WAFFLe": {"factors": {"fc1": 120}},
    "WAFFLeL1": {"factors": {"fc1": 120}},
    "FedDAF": {"feature_stats": True},
    "WAFFLEAvg": {"rounds": 100},
    "PFedMe": {"lr": 0.02},
}
#: Rounds that are timed where rounds differ: FedDAF fits its autoencoder in one of five.
ROUNDS = {"FedDAF": 5}
METHODS = {name: kind for name, kind in vars(methods).items() if isinstance(kind, type)}


def maker(name: str) -> Any:
    def make(**options: Any) -> FederatedModule:
        settings = {"lr": 0.04, "epochs": 5, "batch_size": 10, **OPTIONS.get(name, {}), **options}
        method: FederatedModule = METHODS[name](MLP(), **settings)
        return method

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(METHODS), default=sorted(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = Path(args.output) if args.output else None
    results = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    for name in args.only:
        workload = of_method(maker(name))
        results[name] = measure(workload._replace(rounds=ROUNDS.get(name, workload.rounds)), args.repeats)
        print(f"{name:<14} {results[name]['ratio']:.2f} {results[name]['engine']}", flush=True)
        if kept is not None:  # what other calls measured stays
            kept.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
