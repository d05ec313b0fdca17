"""Accuracy on Digits with one of ten clients hostile, by method, rule and poison.

python benchmarks/poisoning.py --out poisoning.json
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything

from fl_lightning import robust
from fl_lightning.callbacks import FederatedCallback, LabelFlipCallback, UpdatePoisoningCallback
from fl_lightning.datamodules import IID, Digits
from fl_lightning.methods import SCAFFOLD, FedAvg, FedPer
from fl_lightning.nets import MLP

RULES: dict[str, Any] = {
    "mean": None,
    "median": robust.Median(),
    "trimmed mean": robust.TrimmedMean(0.1),
    "Krum": robust.Krum(1),
    "multi-Krum": robust.Krum(1, None),
    "geometric median": robust.GeometricMedian(),
    "norm bound": robust.NormBound(),
    "centred clipping": robust.CentredClipping(),
}
POISONS: dict[str, Any] = {
    "none": list,
    "x1000": lambda: [UpdatePoisoningCallback("scale", 1000.0)],
    "sign flip x10": lambda: [UpdatePoisoningCallback("sign_flip", 10.0)],
    "label flip": lambda: [LabelFlipCallback()],
    "a little": lambda: [UpdatePoisoningCallback("little")],
    "min-max": lambda: [UpdatePoisoningCallback("min_max")],
}


class Rule(FederatedCallback):
    """Puts a rule's result into all messages, so that the server's mean of them is that; for methods of one mean."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def on_before_aggregate(self, trainer: Any, pl_module: Any, messages: Any) -> None:
        found = self.rule(messages, pl_module.server_state())
        for message in messages:
            message.tensors = dict(found)


def accuracy(kind: Any, rule: Any, poison: Any) -> float:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*poison(), *([] if rule is None else [Rule(rule)])],
    )
    trainer.fit(kind(MLP(64, (32,), 10, bias=True), lr=0.05, epochs=2, engine="stacked"), Digits(partition=IID(10)))
    return round(100 * float(trainer.callback_metrics["val/acc"]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    table: dict[str, dict[str, dict[str, float]]] = {}
    for kind in (FedAvg, SCAFFOLD, FedPer):
        print(f"\n| {kind.__name__} | {' | '.join(POISONS)} |\n|{'---|' * (len(POISONS) + 1)}")
        for name, rule in RULES.items():
            row = {label: accuracy(kind, rule, poison) for label, poison in POISONS.items()}
            table.setdefault(kind.__name__, {})[name] = row
            print(f"| {name} | {' | '.join(map(str, row.values()))} |", flush=True)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
