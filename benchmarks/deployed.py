"""Runs every method and variant over a real Flower federation on this machine and compares it with its simulation.

python benchmarks/deployed.py [--only FedAvg SCAFFOLD] [--all]     the matrix: one net of each variant, or all of them
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from pathlib import Path

from fl_lightning.papers.environment import environment
from tests.golden import cases
from tests.remote.deployed import Deployed

OUT = Path(__file__).with_suffix(".json")


def matrix(names: list[str], every: bool) -> list[dict[str, object]]:
    """One row for each case."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="fl-") as folder, Deployed(Path(folder)) as federation:
        for case in cases.CASES:
            if case.name == "FedBPS-auto" or (names and case.name not in names):
                continue
            for net, policy in list(case.runs())[: None if every else 1]:
                began = time.perf_counter()
                server = federation.run(case, net, policy)
                seconds = time.perf_counter() - began
                same = federation.same(server, case, net, policy)
                rows.append({"case": case.name, "net": net, "policy": policy, **same, "seconds": round(seconds, 1)})
                print(*rows[-1].values(), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of golden cases")
    parser.add_argument("--all", action="store_true", help="all nets and buffer policies")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = matrix(given.only, given.all)
    equal = sum(all(row[part] for part in ("weights", "private", "scores")) for row in rows)
    print(f"{equal} of {len(rows)} equal bit for bit")
    if not given.only:
        OUT.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
