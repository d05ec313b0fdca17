"""Record the golden numbers: ``python -m tests.golden.record [CASE ...]`` writes ``golden.json``.

Entries of other processors are kept, and those of cases that are not named. Record anew only to repair a defect, and
name the changed cases in CHANGELOG.md.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support import cases

PATH = Path(__file__).parent / "golden.json"


def entries(case: cases.Case) -> dict[str, dict[str, Any]]:
    """The numbers of one case by run, for this processor."""
    found: dict[str, dict[str, Any]] = {}
    for net, policy in case.runs():
        for engine in cases.ENGINES:
            parts = cases.parts(cases.run(case, net, policy, engine))
            found[f"{case.name} {net} {policy} {engine}"] = {
                "sums": {name: cases.checksum(part) for name, part in parts.items()},
                "bits": {name: cases.digest(part) for name, part in parts.items()},
            }
    return found


def main(names: list[str]) -> None:
    """Record the named cases, or all."""
    torch.set_num_threads(1)
    logging.captureWarnings(True)
    known: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {"sums": {}, "bits": {}}
    bits = known["bits"].setdefault(cases.platform(), {})
    for case in cases.CASES:
        if names and case.name not in names:
            continue
        for run, entry in entries(case).items():
            known["sums"][run], bits[run] = entry["sums"], entry["bits"]
        print(case.name, flush=True)
    PATH.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
