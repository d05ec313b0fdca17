"""Every agent's model in one run (``agent_of_interest="all"``) beside one run for each agent.

    python benchmarks/agents.py [--rounds N] [--repeats N] [--mnist] [--threads N] [--json FILE]

Both make the same N models; the largest difference between their weights is reported. They are measured in turns, in
seconds of CPU, from the first round to the last with validation, the tracing of captured steps included. Ten agents
with the label distribution C: the embedded digits and a perceptron, or MNIST with 300 samples an agent and LeNet-5.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Trainer

from fl_lightning.datamodules import MNIST, Digits, FederatedDataModule, LabelSkew
from fl_lightning.methods import WAFFLEAvg, WeightErosion
from fl_lightning.methods.lib.agents import AgentsOfInterest
from fl_lightning.nets import MLP, LeNet5

AGENTS = 10


def run(
    kind: type[AgentsOfInterest], agent: Any, data: FederatedDataModule, args: argparse.Namespace
) -> tuple[float, AgentsOfInterest]:
    """CPU seconds of a run, and the method as it left it."""
    torch.manual_seed(0)
    net = LeNet5() if args.mnist else MLP(in_features=64)
    method = kind(net, agent_of_interest=agent, lr=0.1, batch_size=10, engine=args.engine)
    settings: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(max_epochs=args.rounds, accelerator="cpu", num_sanity_val_steps=0, **settings)
    began = time.process_time()
    trainer.fit(method, datamodule=data)
    return time.process_time() - began, method


def trainings(method: AgentsOfInterest) -> int:
    """Local trainings of a run."""
    return sum(method.snapshots[number].rounds for number in method.snapshots)


def difference(together: AgentsOfInterest, alone: AgentsOfInterest, agent: int) -> float:
    """Largest difference between the weights that both made for an agent."""
    one, other = together.personal_state(agent), alone.server_state()
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def measure(kind: type[AgentsOfInterest], data: FederatedDataModule, args: argparse.Namespace) -> dict[str, Any]:
    at_once, one_by_one = [], []
    for _ in range(args.repeats):
        seconds, together = run(kind, "all", data, args)
        at_once.append(seconds)
        alone = [run(kind, agent, data, args) for agent in range(AGENTS)]
        one_by_one.append(sum(seconds for seconds, _ in alone))
    methods = [method for _, method in alone]
    return {
        "cpu_seconds_all": round(statistics.median(at_once), 2),
        "cpu_seconds_separate": round(statistics.median(one_by_one), 2),
        "ratio": round(statistics.median(a / b for a, b in zip(at_once, one_by_one, strict=True)), 3),
        "local_trainings_all": trainings(together),
        "local_trainings_separate": sum(map(trainings, methods)),
        "largest_difference": max(difference(together, m, agent) for agent, m in enumerate(methods)),
        "engines": sorted({getattr(m.engine, "choice", None) or m.engine.name for m in (together, *methods)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mnist", action="store_true")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    limits = {"samples_per_agent": 300, "test_samples": 300} if args.mnist else {}
    kind = MNIST if args.mnist else Digits
    data = kind(partition=LabelSkew("C", clients=AGENTS, **limits), seed=0)
    _ = data.federation
    shown = {"agents": AGENTS, "rounds": args.rounds, "repeats": args.repeats, "data": kind.__name__}
    result: dict[str, Any] = {"setting": shown, "methods": {}}
    for method in (WAFFLEAvg, WeightErosion):
        result["methods"][method.__name__] = measure(method, data, args)
        print(method.__name__, result["methods"][method.__name__], flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
