"""One sample of a client out of its update, by method and view, on Digits: today's attacks beside weak settings.

    python benchmarks/leakage.py --out leakage.json

``weak`` is matching by plain Adam with a total variation of 0.001, without the reading of outer products; ``sums`` sees
the mean of all ten clients' steps (secure aggregation), ``colluding`` that and the messages of nine.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import seed_everything

from fl_lightning.callbacks import GradientLeakageCallback
from fl_lightning.datamodules import IID, Digits
from fl_lightning.methods import FedAvg, FedPer, PFedMe, WAFFLe
from fl_lightning.nets import MLP
from fl_lightning.quiet import quiet_trainer
from fl_lightning.sheet import markdown_head, markdown_row

VIEWS: Any = ["outsider", "server", "insider", "sums", "colluding"]
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FedAvg": (FedAvg, {}),
    "FedPer": (FedPer, {}),
    "WAFFLe": (WAFFLe, {"factors": {"fc1": 40}, "epochs": 2}),
    "PFedMe": (PFedMe, {}),
}


def attacked(name: str, seed: int, folder: str, **options: Any) -> Any:
    seed_everything(seed, verbose=False)
    kind, settings = METHODS[name]
    method = kind(MLP(64, (100,), 10), lr=0.05, engine="stacked", **settings)
    callback = GradientLeakageCallback(VIEWS, clients=3, folder=folder, **options)
    quiet_trainer(
        max_epochs=3,
        callbacks=[callback],
    ).fit(method, Digits(partition=IID(10)))
    return callback.report


def best(report: Any, view: str, *variants: str) -> float | None:
    """Highest mean PSNR over clients of the ways of a view."""
    ways = [way for way in report.ways() if way["view"] == view and way["variant"] in variants]
    return max((round(report.mean(report.select(**way))["psnr"], 1) for way in ways), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    table: dict[str, dict[str, Any]] = {}
    columns = ["method", "grey", "data mean", "weak: server", "weak: insider", *VIEWS]
    print(markdown_head(columns))
    with TemporaryDirectory() as folder:
        for name in METHODS:
            weak = attacked(name, arguments.seed, folder, steps=arguments.steps, variation=1e-3, signed=False)
            strong = attacked(name, arguments.seed, folder, steps=arguments.steps)
            everything = ("analytic", "rank_one", "matching")
            floor = strong.floor()
            table[name] = {
                "grey": round(floor["grey"], 1),
                "data mean": round(floor["mean"], 1),
                **{f"weak: {view}": best(weak, view, "matching") for view in ("server", "insider")},
                **{view: best(strong, view, *everything) for view in VIEWS},
            }
            print(markdown_row([name, *table[name].values()]), flush=True)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
