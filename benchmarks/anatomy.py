"""Where a round's time goes, how far it is from bare matrix products, and what the start of a run takes.

    python benchmarks/anatomy.py [--only mnist-mlp ...] [--output benchmarks/anatomy.json]

The parts of the clients' training are told apart by PyTorch's profiler, in a round in which nothing is traced any more.
The floor is the time of that round's matrix products alone, on tensors of the same shapes that lie ready in memory;
nets with convolutions have none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fl_lightning.bench.measure import federated
from fl_lightning.bench.workloads import WORKLOADS, seeded
from fl_lightning.engine import Job
from fl_lightning.quiet import silence

#: Kinds of operations by the words in their names; what has none of them is "other".
KINDS = {
    "matrix products": ("mm", "baddbmm"),
    "convolutions": ("convolution",),
    "pooling": ("max_pool",),
    "batches": ("index", "_to_copy"),
}
PRODUCTS: dict[str, Callable[..., Any]] = {
    "mm": torch.mm,
    "bmm": torch.bmm,
    "baddbmm_": lambda total, left, right: total.baddbmm_(left, right, alpha=1e-6),
}
#: The round that is looked at: by then all shapes have been traced.
ROUND = 60


def kind_of(name: str) -> str:
    words = name.removeprefix("aten::").strip("_")
    return next((kind for kind, signs in KINDS.items() if any(sign in words for sign in signs)), "other operations")


def best(run: Callable[[], Any], repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def anatomy(name: str) -> dict[str, Any]:
    """Shares of the clients' training in a round of a workload, and the start of its run."""
    workload = WORKLOADS[name]._replace(warm_up=0, rounds=1, validate_every=2)
    data = WORKLOADS[name].data()
    began = time.perf_counter()
    _, method = federated(workload, data, {})
    first = time.perf_counter() - began
    mes = [method.simulation.me(client, method.setting()) for client in data.cohort(ROUND)]
    jobs = [Job(me.client, method.enter(method.message_down(me.client), me)) for me in mes]
    engine = method.engine

    def train() -> None:
        engine.train(method, method.federation, jobs, ROUND)

    train()
    whole = best(train)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        train()
    calls = recorded.key_averages(group_by_input_shape=True)
    spent: dict[str, float] = {}
    for call in calls:
        spent[kind_of(call.key)] = spent.get(kind_of(call.key), 0.0) + call.self_cpu_time_total
    total = sum(spent.values())
    return {
        "engine": engine.choice,
        "round_seconds": round(whole, 3),
        "first_round_seconds": round(first, 3),
        "shares": {kind: round(part / total, 3) for kind, part in sorted(spent.items(), key=lambda item: -item[1])},
        "floor_seconds": floor(calls),
    }


def floor(calls: Any) -> float | None:
    """Seconds of the matrix products alone; None where there are convolutions, too."""
    seconds = 0.0
    for call in calls:
        name = call.key.removeprefix("aten::")
        if "convolution" in name:
            return None
        if name in PRODUCTS:
            tensors = [torch.randn(shape) for shape in call.input_shapes if shape]
            seconds += call.count * best(lambda name=name, tensors=tensors: PRODUCTS[name](*tensors), 50)  # type: ignore[misc]
    return round(seconds, 3)


def started(code: str) -> float:
    """Seconds of a Python process that runs some code."""
    return round(best(lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS)[:-1])
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"import_torch_and_lightning": started("import torch, lightning.pytorch")}
    results["import_all"] = started("import fl_lightning.methods, fl_lightning.datamodules")
    with silence(warned=False):
        for name in args.only:
            results[name] = seeded(lambda name=name: anatomy(name))  # type: ignore[misc]
            print(name, json.dumps(results[name]), flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
