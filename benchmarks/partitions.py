"""How long partitions take beside one stable sort of the labels.

    python benchmarks/partitions.py [--clients 100000] [--labels 1000000] [--repeats 3]

The two are measured in turns; a row is the median ratio. No data set is needed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from fl_lightning.datamodules import (
    IID,
    ByUser,
    ConceptShift,
    Dirichlet,
    DominantClass,
    LabelSkew,
    MajorMinor,
    Multimodal,
    PartitionScheme,
    Unimodal,
)


def schemes(clients: int) -> dict[str, PartitionScheme]:
    """Every partition, for so many clients."""
    minority = clients // 5
    return {
        "IID": IID(clients),
        "Unimodal": Unimodal(clients, 2),
        "Unimodal, distinct": Unimodal(clients, 2, distinct=True),
        "Multimodal": Multimodal([[1, 3, 5, 7, 9], [0, 2, 4, 6, 8]], [clients - minority, minority]),
        "ConceptShift of LabelSkew": ConceptShift(LabelSkew("C", clients, test_samples=10)),
        "DominantClass": DominantClass(clients, 0.5, clients // 2),
        "MajorMinor": MajorMinor(clients),
        "Dirichlet": Dirichlet(clients, 1.0, min_samples=2),
        "ByUser": ByUser(None, 2),
    }


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Print a row for every partition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--labels", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 10, options.labels))
    users = torch.from_numpy(rng.integers(0, options.clients, options.labels))
    print(f"{options.labels:,} labels, {options.clients:,} clients; one sort = 1")
    for name, scheme in schemes(options.clients).items():
        turns = [
            (seconds(lambda s=scheme: s(labels, 0, users=users)), seconds(lambda: labels.sort(stable=True)))
            for _ in range(options.repeats)
        ]
        print(f"{name:<26} {statistics.median(taken / sort for taken, sort in turns):>8.1f}")


if __name__ == "__main__":
    main()
