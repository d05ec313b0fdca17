"""Tasks: losses by hand, targets of any shape through every engine, sentences for what does not fit."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.regression import TweedieDevianceScore

from fl_lightning import tasks
from fl_lightning.datamodules import TensorFederation
from fl_lightning.datamodules.partitions import IID, Dirichlet
from fl_lightning.datamodules.strata import given_strata, strata_of
from fl_lightning.engine import CapturedEngine, Job, make_engine
from fl_lightning.engine.schedule import ClientSchedule
from fl_lightning.errors import FederationError
from fl_lightning.metrics.per_client import PerClient
from fl_lightning.tasks import Classification, MultiLabel, NextToken, Regression, Segmentation, Task
from tests.support.problems import Trained

SIZES = (14, 9, 17)


class Counts(Task):
    """A user's own, as the documentation shows it."""

    headline, higher_is_better = "deviance", False

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.poisson_nll_loss(output.squeeze(1), target)

    def metrics(self, outputs: int) -> dict[str, Metric]:
        return {"deviance": TweedieDevianceScore(power=1)}

    def scores(self, output: Tensor) -> Tensor:
        return output.squeeze(1).exp()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def linear(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(top: int, *shape: int) -> Tensor:
    return torch.randint(top, shape, generator=torch.Generator().manual_seed(sum(shape)))


TOTAL = sum(SIZES)
CASES: dict[str, tuple[Task, Any, Tensor, Tensor]] = {
    "classes": (Classification(), lambda: linear(3), draw(TOTAL, 4), whole(3, TOTAL)),
    "labels": (MultiLabel(), lambda: linear(5), draw(TOTAL, 4), whole(2, TOTAL, 5)),
    "number": (Regression(), lambda: linear(1), draw(TOTAL, 4), draw(TOTAL)),
    "numbers": (Regression("huber", "mae"), lambda: linear(2), draw(TOTAL, 4), draw(TOTAL, 2)),
    "masks": (
        Segmentation(ignore=2),
        lambda: nn.Conv2d(2, 3, 3, padding=1),
        draw(TOTAL, 2, 5, 4),
        whole(3, TOTAL, 5, 4),
    ),
    "tokens": (NextToken(ignore=0), Words, whole(6, TOTAL, 7), whole(6, TOTAL, 7)),
    "counts": (Counts(), lambda: linear(1), draw(TOTAL, 4), whole(9, TOTAL).float()),
}


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def federation(inputs: Tensor, targets: Tensor) -> TensorFederation:
    ends = np.cumsum(SIZES)
    train = [list(range(end - size, end - 2)) for end, size in zip(ends, SIZES, strict=True)]
    return TensorFederation(inputs, targets, train=train, test=[[end - 2, end - 1] for end in ends], val_fraction=0)


@pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
@pytest.mark.parametrize("name", CASES)
def test_engines_train_on_any_targets(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedEngine, "seldom", 0)
    task, make, inputs, targets = CASES[name]
    data = federation(inputs, targets).federation
    module = Trained(seeded(make), task, lr=0.1, epochs=2, batch_size=5, seed=1)
    jobs = [Job(client, module.server_state()) for client in range(3)]
    results = make_engine(engine).train(module, data, jobs, 0)
    for client, result in enumerate(results):
        net, schedule = seeded(make), ClientSchedule.of(module, data, client, 0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for part in [part for _ in range(2) for part in schedule.order().split(5)]:
            x = inputs[part].double() if inputs.is_floating_point() else inputs[part]
            optimizer.zero_grad()
            task.loss(net(x), targets[part]).backward()
            optimizer.step()
        for entry, value in net.state_dict().items():
            torch.testing.assert_close(result.state[entry], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_metrics_accept_the_scores_of_tasks(name: str) -> None:
    """The headline metric is among them, fits outputs and targets, and says which way is better."""
    task, make, inputs, targets = CASES[name]
    x = inputs.double() if inputs.is_floating_point() else inputs
    output = seeded(make)(x).detach()
    task.check(output, targets)
    found = PerClient(task.metrics(task.channels(output)), 2)
    found.update([0, 1], [task.scores(o) for o in output.split(20)], list(targets.split(20)))
    values = found.compute()
    assert not any(value.isnan().any() for value in values.values())
    assert task.headline in values
    lower = {"number", "numbers", "tokens", "counts"}
    assert task.higher_is_better is (name not in lower)
    assert len(task.predict(output)) == TOTAL


def test_losses_by_hand() -> None:
    assert float(Regression().loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]))) == 5.0
    assert float(Regression("mae").loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]))) == 2.0
    even = MultiLabel().loss(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [0, 0, 1]]))
    assert float(even) == pytest.approx(math.log(2))
    certain = torch.tensor([[[0.0, 100.0], [0.0, 0.0]]])
    assert float(NextToken(ignore=0).loss(certain, torch.tensor([[1, 0]]))) == 0.0
    mask = Segmentation(ignore=255).loss(torch.zeros(1, 4, 1, 2), torch.tensor([[[3, 255]]]))
    assert float(mask) == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    "task", [Classification("auroc"), MultiLabel("acc"), Regression("mae"), Segmentation(7), NextToken()]
)
def test_specs_round_trip(task: Task) -> None:
    again = tasks.made(json.loads(json.dumps(task.spec)))
    assert type(again) is type(task)
    assert again.spec == task.spec


@pytest.mark.parametrize(
    ("task", "output", "target", "sentence"),
    [
        (Classification(), (3, 2), torch.zeros(3), r"needs one integer .* torch.float32 of shape \(n\)"),
        (Classification(), (3, 2, 2), torch.zeros(3).long(), r"outputs of shape \(n, classes\), not \(n, 2, 2\)"),
        (MultiLabel(), (3, 2), torch.full((3, 2), 2), r"MultiLabel needs targets of 0 and 1"),
        (MultiLabel(), (3, 4), torch.ones(3, 2), r"outputs of shape \(n, 2\), not \(n, 4\)"),
        (Regression(), (3, 1), torch.tensor([1.0, math.nan, 0.0]), r"targets that are finite"),
        (Regression(), (3, 1), torch.zeros(3, 1), r"targets of shape \(n\), not \(n, 1\): pass y\[:, 0\]"),
        (Regression(), (3, 2), torch.zeros(3), r"outputs of shape \(n, 1\), not \(n, 2\)"),
        (Segmentation(), (3, 2, 4, 4), torch.zeros(3), r"needs integers of shape \(n, height, width\)"),
        (Segmentation(), (3, 2, 2, 2), torch.zeros(3, 4, 4).long(), r"outputs of shape \(n, classes, 4, 4\)"),
        (Segmentation(), (3, 2, 4, 4), torch.full((3, 4, 4), 5), r"Targets name class 5 to 5, .* outputs for 0 to 1"),
        (NextToken(), (3, 5), torch.zeros(3, 4).long(), r"outputs of shape \(n, 4, tokens\)"),
        (NextToken(), (3, 4, 5), torch.zeros(3, 4), r"NextToken needs integers of shape \(n, length\)"),
    ],
)  # fmt: skip
def test_targets_that_do_not_fit(task: Task, output: tuple[int, ...], target: Tensor, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        task.check(torch.zeros(output), target)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("Regresion", r"There is no task 'Regresion': choose Classification, MultiLabel"),
        (3, r"task must be one of Classification"),
        ({"class_path": "Regression", "init_args": {"loss": 1}}, r"Regression has no option 'loss'"),
        ({"class_path": "Regression", "init_args": {"headline": "acc"}}, "headline must be rmse, mae or r2"),
    ],
)
def test_unknown_tasks(given: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        tasks.made(given)


# ---- samples without classes, dealt ---------------------------------------------------------------------------


def test_numbers_are_dealt_by_bins() -> None:
    targets = torch.arange(40.0)
    data = TensorFederation(draw(40, 4), targets, partition=Dirichlet(4, alpha=0.5, min_samples=2), seed=0)
    assert data.num_classes == 0
    assert data.samples.labels.bincount().tolist() == [4] * 10
    assert torch.equal(data.federation.targets, targets)
    by_hand = TensorFederation(draw(40, 4), torch.arange(40) // 4, partition=data.partition, seed=0)
    assert torch.equal(by_hand.federation.train.flat, data.federation.train.flat)


def test_a_column_says_how_samples_are_dealt() -> None:
    where = ["b", "a"] * 20
    data = TensorFederation(draw(40, 4), draw(40, 2), partition=Dirichlet(2, min_samples=2), stratify=where)
    assert data.samples.labels.tolist() == [1, 0] * 20
    assert given_strata(torch.tensor([0.5, 3.0]), 2).tolist() == [0, 1]
    with pytest.raises(FederationError, match=r"stratify must have one value for each of the 3 samples"):
        given_strata([1, 2], 3)


def test_partitions_by_class_need_classes() -> None:
    with pytest.raises(FederationError, match=r"Dirichlet deals samples by their classes, .* stratify="):
        _ = TensorFederation(draw(40, 4), draw(40, 2), partition=Dirichlet(2)).federation
    assert TensorFederation(draw(40, 4), draw(40, 2), partition=IID(2)).federation.num_clients == 2
    assert strata_of(whole(2, 9, 3)) is None


def test_a_part_of_the_samples_keeps_their_bins() -> None:
    data = TensorFederation(draw(40, 4), torch.arange(40.0), partition=IID(2), limit=20)
    assert data.samples.labels.bincount().tolist() == [2] * 10
    assert len(data.federation.targets) == 20


def test_arrays_are_tensors() -> None:
    x, y = np.zeros((6, 2), dtype=np.float32), np.array([0, 1, 0, 1, 2, 1])
    data = TensorFederation(x, y, train=[[0, 1], [2, 3]], test=[[4], [5]])
    assert (data.num_classes, data.federation.inputs.dtype) == (3, torch.float32)
    with pytest.raises(FederationError, match=r"inputs must be a tensor or an array of numbers"):
        TensorFederation(np.array([["a"], ["b"]]), [0, 1])


def test_labels_are_not_renamed_where_there_are_none() -> None:
    with pytest.raises(FederationError, match=r"label_maps rename classes"):
        _ = TensorFederation(
            draw(4, 2), draw(4), train=[[0, 1]], test=[[2, 3]], label_maps=torch.zeros(1, 1).long()
        ).federation
