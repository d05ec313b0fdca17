"""``fl-lightning bench``: training speed of this machine relative to a plain PyTorch loop."""

from __future__ import annotations

import json
import sys

import torch

from fl_lightning.bench.measure import measure
from fl_lightning.bench.workloads import WORKLOADS
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.errors import FederationError


def build_parser() -> FederatedArgumentParser:
    """The command's options."""
    parser = FederatedArgumentParser(
        prog="fl-lightning bench",
        description="Measure client steps per second through Trainer.fit relative to a plain loop.",
    )
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="workloads to run")
    parser.add_argument("--repeats", type=int, default=3, help="alternations of library and loop")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of the library; the loop uses one")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--engine", default="auto", help="engine of the library")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--output", help="write all figures to this JSON file")
    return parser


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    options = build_parser().parse_args(argv[1:])
    for option in ("repeats", "workers", "threads"):
        if options[option] < 1:
            raise FederationError(f"--{option} must be 1 or more, not {options[option]}.")
    torch.set_num_threads(options.threads)
    results = {}
    print(f"{'workload':<12}{'ratio':>7}{'steps/s':>10}{'plain':>10}{'validation':>12}  engine", file=sys.stderr)
    for name in options.only:
        figures = results[name] = measure(
            WORKLOADS[name], options.repeats, engine=options.engine, workers=options.workers
        )
        print(
            f"{name:<12}{figures['ratio']:>7.2f}{figures['steps_per_second']:>10.1f}"
            f"{figures['plain_steps_per_second']:>10.1f}{figures['validation_share']:>12.1%}  {figures['engine']}",
            file=sys.stderr,
            flush=True,
        )
    if options.output:
        with open(options.output, "w") as file:
            json.dump({"workloads": results}, file, indent=1)
    if options.json:
        print(json.dumps({"workloads": {name: {"ratio": figures["ratio"]} for name, figures in results.items()}}))
