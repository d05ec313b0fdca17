"""How a round grows: with the cohort, with the number of clients and with workers; start-up and memory.

    python benchmarks/scaling.py [--output benchmarks/scaling.json] [--picture docs/pictures/scaling.png]

Every point is a process of its own, with a peak of memory of its own. Small images, so that 100,000 clients' data fit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROUNDS = 3


def point(clients: int, cohort: int, method: str, workers: int, store: bool) -> dict[str, Any]:
    """Seconds per round, without validation, and peak memory of one run; called in a process of its own."""
    began = time.perf_counter()
    import resource

    import torch

    from fl_lightning.bench.data import images
    from fl_lightning.bench.measure import Clock
    from fl_lightning.methods import FedAvg, Local
    from fl_lightning.nets import MLP
    from fl_lightning.quiet import quiet_trainer, silence

    torch.set_num_threads(1)
    imported = time.perf_counter() - began
    data = images((1, 8, 8), clients=clients, sizes=(40, 40), fraction=cohort / clients)
    net = MLP(in_features=64, hidden=(64,), num_classes=10)
    clock = Clock(warm_up=2, rounds=ROUNDS)
    with tempfile.TemporaryDirectory() as folder, silence(warned=False):
        kind = Local if method == "Local" else FedAvg
        options = {"store": folder} if store else {}
        run = kind(net, lr=0.05, epochs=5, batch_size=10, workers=workers, **options)
        if method == "Local":  # a cohort of it, as FedAvg has: what is measured is the private state
            run.cohort = data.cohort  # type: ignore[method-assign]
        quiet_trainer(
            max_epochs=2 + ROUNDS,
            callbacks=[clock],
            limit_val_batches=0,
        ).fit(run, datamodule=data)
    return {
        "clients": clients,
        "cohort": cohort,
        "method": method,
        "workers": workers,
        "store": "disk" if store else "memory",
        "milliseconds_per_client": round(1000 * clock.turns[0].seconds / cohort, 3),
        "seconds_per_round": round(clock.turns[0].seconds, 4),
        "import_seconds": round(imported, 2),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def points() -> list[tuple[int, int, str, int, bool]]:
    """(clients, cohort, method, workers, store on disk)."""
    by_cohort = [(1000, cohort, "FedAvg", 1, False) for cohort in (10, 100, 1000)]
    by_workers = [(1000, 100, "FedAvg", workers, False) for workers in (2,)]
    by_clients = [(clients, 100, "FedAvg", 1, False) for clients in (100, 10_000, 100_000)]
    private = [(clients, 100, "Local", 1, disk) for clients in (1000, 100_000) for disk in (False, True)]
    return [*by_cohort, *by_workers, *by_clients, *private]


def draw(rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    single = [row for row in rows if row["method"] == "FedAvg" and row["workers"] == 1]
    cohorts = sorted((row["cohort"], row["seconds_per_round"]) for row in single if row["clients"] == 1000)
    left.loglog(*zip(*cohorts, strict=True), marker="o", color="#0072B2")
    left.set(xlabel="clients in a round", ylabel="seconds per round", title="of 1,000 clients")
    counts = sorted((row["clients"], row["milliseconds_per_client"]) for row in single if row["cohort"] == 100)
    right.semilogx(*zip(*counts, strict=True), marker="o", color="#D55E00")
    right.set(xlabel="clients", ylabel="ms per client of the round", title="100 in a round", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--output")
    parser.add_argument("--picture")
    args = parser.parse_args()
    if args.point:
        print(json.dumps(point(*json.loads(args.point))))
        return
    rows = []
    for one in points():
        command = [sys.executable, __file__, "--point", json.dumps(one)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(ended.stdout.strip().splitlines()[-1]))
        print(rows[-1], flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1))
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
