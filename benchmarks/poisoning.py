"""Accuracy on Digits with one of ten clients hostile, by method, rule and poison, as tables and pictures.

python benchmarks/poisoning.py --methods FedAvg WAFFLe --out poisoning.json --pictures folder
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from fl_lightning import robust
from fl_lightning.callbacks import LabelFlipCallback, UpdatePoisoningCallback
from fl_lightning.datamodules import IID, Digits
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedAvg, FedPer, WAFFLe
from fl_lightning.nets import MLP
from fl_lightning.privacy.figures import rules_figure
from fl_lightning.privacy.hostile import hostile_clients
from fl_lightning.quiet import quiet_trainer
from fl_lightning.sheet import markdown_head, markdown_row

CLIENTS = 10
#: A client that is not hostile, for the rule that trusts one.
TRUSTED = next(client for client in range(CLIENTS) if client not in hostile_clients(0, CLIENTS, 0.1))
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FedAvg": (FedAvg, {}),
    "SCAFFOLD": (SCAFFOLD, {}),
    "WAFFLe": (WAFFLe, {"factors": {"fc1": 40}}),
    "FedPer": (FedPer, {}),
}
#: Instead of the accuracy of a run that ended because no update was finite any more.
ENDED = "ends"
RULES: dict[str, Any] = {
    "mean": None,
    "median": robust.Median(),
    "trimmed mean": robust.TrimmedMean(0.1),
    "Krum": robust.Krum(1),
    "multi-Krum": robust.Krum(1, None),
    "geometric median": robust.GeometricMedian(),
    "norm bound": robust.NormBound(),
    "centred clipping": robust.CentredClipping(),
    "FLTrust": robust.FLTrust(TRUSTED),
}
POISONS: dict[str, Any] = {
    "none": list,
    "x1000": lambda: [UpdatePoisoningCallback("scale", 1000.0)],
    "sign flip x10": lambda: [UpdatePoisoningCallback("sign_flip", 10.0)],
    "label flip": lambda: [LabelFlipCallback()],
    "a little": lambda: [UpdatePoisoningCallback("little")],
    "min-max": lambda: [UpdatePoisoningCallback("min_max")],
}


def accuracy(name: str, rule: Any, poison: Any, rounds: int) -> float:
    seed_everything(0, verbose=False)
    kind, options = METHODS[name]
    method = kind(MLP(64, (32,), 10, bias=True), lr=0.05, epochs=2, engine="stacked", aggregation=rule, **options)
    trainer = quiet_trainer(
        max_epochs=rounds,
        limit_val_batches=0,
        callbacks=poison(),
    )
    data = Digits(partition=IID(CLIENTS))
    try:
        trainer.fit(method, data)
    except FederationError:  # nothing finite is left
        return math.nan
    (found,) = trainer.test(method, datamodule=data, verbose=False)
    return round(100 * found["test/acc"], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", default=None)
    parser.add_argument("--pictures", default=None)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    table: dict[str, dict[str, dict[str, float]]] = {}
    for method in arguments.methods:
        print(f"\n{markdown_head([method, *POISONS])}")
        for name, rule in RULES.items():
            row = {label: accuracy(method, rule, poison, arguments.rounds) for label, poison in POISONS.items()}
            table.setdefault(method, {})[name] = row
            print(markdown_row([name, *(ENDED if math.isnan(v) else v for v in row.values())]), flush=True)
        if arguments.pictures:
            Path(arguments.pictures).mkdir(parents=True, exist_ok=True)
            rules_figure(table[method], method).savefig(Path(arguments.pictures) / f"rules_{method}.png", dpi=130)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
