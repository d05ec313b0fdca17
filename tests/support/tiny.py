"""Small runs on the digits, and a function that makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_lightning.cli.reproduce import assemble
from fl_lightning.papers.cells import run_cell

TINY: dict[str, Any] = {
    "trainer": {"max_epochs": 13},
    "model": {
        "class_path": "fl_lightning.methods.FedAvg",
        "init_args": {
            "net": {"class_path": "fl_lightning.nets.MLP", "init_args": {"in_features": 64, "hidden": [8]}},
            "lr": 0.1,
            "engine": "stacked",
        },
    },
    "data": {
        "class_path": "fl_lightning.datamodules.Digits",
        "init_args": {
            "fraction": 0.5,
            "partition": {
                "class_path": "fl_lightning.datamodules.Multimodal",
                "init_args": {"modes": [[0, 1, 2, 3], [4, 5]], "clients": [8, 4]},
            },
        },
    },
}
GLOBAL: dict[str, Any] = {
    "trainer": {"max_epochs": 3},
    "model": {
        "class_path": "fl_lightning.methods.FedDAF",
        "init_args": {**TINY["model"]["init_args"], "feature_stats": True, "warmup": 1, "inference": {"steps": 5}},
    },
    "data": {
        "class_path": "fl_lightning.datamodules.Digits",
        "init_args": {
            "limit": 800,
            "val_fraction": 0,
            "partition": {
                "class_path": "fl_lightning.datamodules.DominantClass",
                "init_args": {"clients": 5, "shards_per_class": 10},
            },
        },
    },
}


def run(root: Path, config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Run a configuration as ``fl-lightning reproduce`` does."""
    return run_cell(root, config, seed, assemble)
