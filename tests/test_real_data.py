"""A few rounds of the published setting on real data reach the expected accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.datamodules import MNIST, Multimodal, Unimodal
from fl_lightning.methods import FedAvg, WAFFLe
from fl_lightning.module import FederatedModule
from fl_lightning.nets import MLP
from tests.support import fit

SETTING: dict[str, Any] = {"lr": 0.04, "epochs": 5, "batch_size": 10, "weighting": "uniform"}


def after(method: FederatedModule, data: MNIST, rounds: int) -> dict[str, float]:
    run = fit(method, data, rounds, precision="32-true", check_val_every_n_epoch=rounds)
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.slow
def test_fedavg_on_mnist(real_data: Path) -> None:
    """100 clients with two digits each, ten a round: 10 rounds are enough for 70 percent, on clients and overall."""
    torch.manual_seed(0)
    data = MNIST(root=str(real_data), partition=Unimodal(100, 2), fraction=0.1, val_fraction=0)
    scores = after(FedAvg(MLP(), **SETTING), data, rounds=10)
    assert scores["test/acc"] > 0.7
    assert scores["test/global_acc"] > 0.7
    assert abs(scores["test/acc"] - scores["test/global_acc"]) < 0.1


@pytest.mark.slow
def test_waffle_personalises_where_fedavg_cannot(real_data: Path) -> None:
    """20 of 120 clients have even digits: after 10 rounds FedAvg fails most of them, WAFFLe hardly any."""
    minority = {}
    for name, options in (("FedAvg", {}), ("WAFFLe", {"factors": {"fc1": 120}, "vi_lr_mult": 1000.0})):
        torch.manual_seed(0)
        data = MNIST(root=str(real_data), partition=Multimodal("mnist"), fraction=0.1, val_fraction=0)
        method = FedAvg(MLP(), **SETTING) if name == "FedAvg" else WAFFLe(MLP(), **SETTING, **options)
        after(method, data, rounds=10)
        minority[name] = float(method.evaluator.scores["test"][100:].mean())
    assert minority["FedAvg"] < 0.6
    assert minority["WAFFLe"] > 0.8
