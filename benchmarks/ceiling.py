"""Worth of a second core of this machine: two plain loops side by side against one alone.

    python benchmarks/ceiling.py [--only mnist-mlp ...] [--repeats 5] [--output benchmarks/ceiling.json]

Cores that share a cache, memory or a thread of one physical core are worth less than two; no number of workers can make
more of them. One and two processes take turns, and the median of the ratios counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fl_lightning.bench.data import features
from fl_lightning.bench.workloads import WORKLOADS, seeded
from fl_lightning.quiet import silence

#: Seconds of a turn.
TURN = 3.0


def serve(name: str, asked: Connection) -> None:
    """In a process of its own: make rounds of the plain loop whenever asked, and answer with steps per second."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    with silence(warned=False):
        data = workload.data()
        method = seeded(workload.method)
        x = features(data.federation)
        cohort = data.cohort(0)
        workload.loop(method, data.federation, x, cohort[:1])
        asked.send(0.0)
        while asked.recv():
            steps, began = 0, time.perf_counter()
            while (seconds := time.perf_counter() - began) < TURN:
                steps += workload.loop(method, data.federation, x, cohort[:1])
            asked.send(steps / seconds)


def ceiling(name: str, repeats: int) -> dict[str, float]:
    """How many times the steps of one process two make together."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=serve, args=(name, theirs), daemon=True) for _, theirs in ends]
    for worker in workers:
        worker.start()
    own = [mine for mine, _ in ends]
    for end in own:
        end.recv()

    def turn(taking: list[Connection]) -> float:
        for end in taking:
            end.send(True)
        return sum(end.recv() for end in taking)

    alone, ratios = [], []
    for repeat in range(repeats):
        alone.append(turn([own[repeat % 2]]))
        ratios.append(turn(own) / alone[-1])
    for end in own:
        end.send(False)
    for worker in workers:
        worker.join()
    return {"two_of_one": round(statistics.median(ratios), 3), "steps_per_second": round(statistics.median(alone), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output")
    args = parser.parse_args()
    results = {}
    for name in args.only:
        results[name] = ceiling(name, args.repeats)
        print(name, json.dumps(results[name]), flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
