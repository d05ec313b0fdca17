"""One turn of one simulator, in the environment that it is installed in: ``python benchmarks/peer_runs NAME FILE``."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import tomllib
from importlib.metadata import version

import torch

PROJECT = pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.name == "fl-lightning":
        from fl_lightning.bench.measure import measure
        from fl_lightning.bench.workloads import WORKLOADS

        result = measure(WORKLOADS["mnist-mlp"], repeats=1)
        result["version"] = tomllib.loads(PROJECT.read_text())["project"]["version"]
    else:
        from turns import Turns

        peer = importlib.import_module(f"run_{args.name}")
        turns = Turns(args.rounds, args.memory)
        peer.run(turns)
        result = {**turns.result(), "version": version(peer.PACKAGE)}
    args.file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
