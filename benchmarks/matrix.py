"""Method by task by optimizer, all triples, two rounds each.

    PYTHONPATH=. python benchmarks/matrix.py [--engine stacked]

Prints the table of docs/own-task.md and how many triples ran and were refused; fails where a triple does not do what
its method's columns say, or where anything but a sentence comes out.
"""

from __future__ import annotations

import argparse
import warnings

import torch

from fl_lightning.sheet import markdown_head, markdown_row
from tests.support.matrix import METHODS, OPTIMIZERS, PROBLEMS, attempt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="sequential")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    columns = [*PROBLEMS, *OPTIMIZERS]
    print(markdown_head(["method", *columns], left=1 + len(columns)))
    refusals: dict[str, list[str]] = {}
    ran = 0
    for method in METHODS:
        found = {(t, o): attempt(method, t, o, engine=options.engine) for t in PROBLEMS for o in OPTIMIZERS}
        runs = {pair for pair, result in found.items() if not isinstance(result, str)}
        tasks, optimizers = ({pair[place] for pair in runs} for place in (0, 1))
        if runs != {(t, o) for t in tasks for o in optimizers}:
            raise SystemExit(f"{method}: what it refuses is no matter of task or optimizer alone.")
        ran += len(runs)
        for pair, result in found.items():
            if isinstance(result, str):
                sentence = result.replace(repr(OPTIMIZERS[pair[1]]), "...")
                refusals.setdefault(sentence, []).append(" with ".join(pair))
        said = ["yes" if column in tasks | optimizers else "no" for column in columns]
        print(markdown_row([method, *said]), flush=True)
    total = len(METHODS) * len(PROBLEMS) * len(OPTIMIZERS)
    print(f"\n{ran} of {total} ran; {total - ran} were refused:")
    for sentence, pairs in refusals.items():
        print(f"- {len(pairs)} times: {sentence}")


if __name__ == "__main__":
    main()
