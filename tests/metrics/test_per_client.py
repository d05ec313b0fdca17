"""Metrics of every client equal torchmetrics run on that client's samples alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics as tm
from sklearn.metrics import r2_score, roc_auc_score
from torch import Tensor
from torchmetrics import classification as tmc
from torchmetrics.text import Perplexity

from fl_lightning.errors import FederationError
from fl_lightning.metrics import client_summary
from fl_lightning.metrics.per_client import Each, PerClient, Sums, of_metric

SIZES = (7, 12, 5, 9)


def drawn(make: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = [make(n, generator) for n in SIZES]
    return [o for o, _ in pairs], [t for _, t in pairs]


def scores(*shape: int) -> Any:
    def make(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        target = torch.randint(3, (n, *shape), generator=generator)
        return torch.randn(n, 3, *shape, generator=generator).double(), target

    return drawn(make)


def numbers(*shape: int) -> Any:
    def draw(n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, *shape, generator=generator).double()

    return drawn(lambda n, generator: (draw(n, generator), draw(n, generator)))


def tokens() -> Any:
    outputs, targets = scores(6)
    return [o.movedim(1, -1) for o in outputs], [t.index_fill(1, torch.tensor([5]), -100) for t in targets]


CASES: dict[str, tuple[tm.Metric, Any, type]] = {
    "accuracy": (tmc.MulticlassAccuracy(3, average="micro"), scores(), Sums),
    "pixel accuracy": (tmc.MulticlassAccuracy(3, average="micro"), scores(4, 2), Sums),
    "pixels but one class": (tmc.MulticlassAccuracy(3, average="micro", ignore_index=0), scores(4), Sums),
    "accuracy by class": (tmc.MulticlassAccuracy(3), scores(), Each),
    "f1": (tmc.MulticlassF1Score(3), scores(), Each),
    "auroc": (tmc.MulticlassAUROC(3), scores(), Each),
    "iou": (tmc.MulticlassJaccardIndex(3), scores(4, 2), Each),
    "mse": (tm.MeanSquaredError(), numbers(), Sums),
    "rmse": (tm.MeanSquaredError(squared=False), numbers(2), Sums),
    "mae": (tm.MeanAbsoluteError(), numbers(2), Sums),
    "r2": (tm.R2Score(), numbers(), Each),
    "pearson": (tm.PearsonCorrCoef(), numbers(), Each),
    "perplexity": (Perplexity(ignore_index=-100), tokens(), Sums),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_torchmetrics_on_the_client_alone(name: str) -> None:
    metric, (outputs, targets), kind = CASES[name]
    found = PerClient({name: metric}, len(SIZES) + 1)
    assert isinstance(found.metrics[name], kind)
    found.update([3, 1], outputs[3:] + outputs[1:2], targets[3:] + targets[1:2])
    found.update(torch.tensor([0, 2]), [outputs[0][:4], outputs[2]], [targets[0][:4], targets[2]])
    found.update([0], [outputs[0][4:]], [targets[0][4:]])
    values = found.compute()[name]
    assert values.dtype == torch.float64
    assert values[-1].isnan()
    for client, (output, target) in enumerate(zip(outputs, targets, strict=True)):
        alone = copy.deepcopy(metric)
        alone.update(output, target)
        assert float(values[client]) == pytest.approx(float(alone.compute()), rel=1e-6, abs=1e-9), client
    found.reset()
    assert found.compute()[name].isnan().all()


def test_equals_scikit_learn() -> None:
    outputs, targets = scores()
    some = [target % 2 for target in targets]
    values = PerClient({"auroc": tmc.BinaryAUROC()}, len(SIZES))
    values.update(range(len(SIZES)), [o[:, 0].sigmoid() for o in outputs], some)
    expected = [roc_auc_score(t, o[:, 0]) for o, t in zip(outputs, some, strict=True)]
    np.testing.assert_allclose(values.compute()["auroc"], expected, atol=1e-6)
    outputs, targets = numbers()
    r2 = PerClient({"r2": tm.R2Score()}, len(SIZES))
    r2.update(range(len(SIZES)), outputs, targets)
    expected = [r2_score(t, o) for o, t in zip(outputs, targets, strict=True)]
    np.testing.assert_allclose(r2.compute()["r2"], expected, atol=1e-6)


def test_too_few_samples_are_no_number() -> None:
    r2 = PerClient({"r2": tm.R2Score()}, 1)
    r2.update([0], [torch.zeros(1)], [torch.ones(1)])
    assert r2.compute()["r2"].isnan().all()


def test_a_metric_of_several_numbers_is_refused() -> None:
    by_class = of_metric(tmc.MulticlassAccuracy(3, average="none"), 1, "recalls")
    by_class.update(torch.tensor([0]), [torch.eye(3)], [torch.arange(3)])
    with pytest.raises(FederationError, match=r"The metric recalls gives 3 numbers for a client"):
        by_class.compute()


def test_the_worst_tenth_is_at_the_other_end_for_errors() -> None:
    assert float(client_summary(torch.arange(20.0), higher_is_better=False)["worst10"]) == 18.5
