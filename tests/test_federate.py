"""A user's LightningModule made federated: its loss is what clients minimise, and what cannot be done is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.errors import FederationError
from fl_lightning.evaluation import mean_loss
from fl_lightning.federate import federate, sgd_settings
from fl_lightning.methods import FedAvg, FedPer, FedProx
from fl_lightning.parties import LocalData
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, weights


class User(LightningModule):
    """Squared error of the softmax: not what a method would take by itself."""

    def __init__(self, seed: int = 0, optimizer: Any = None) -> None:
        super().__init__()
        self.net = mlp(seed)
        self.optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.3, weight_decay=0.01))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        target = (y[:, None] == torch.arange(CLASSES)).to(x.dtype)  # one_hot cannot be stacked
        loss = (self(x).softmax(1) - target).square().sum(1).mean()
        self.log("loss", loss)
        return {"loss": loss, "more": 1}

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def test_one_client_is_the_users_own_training() -> None:
    sizes, rounds = (24,), 1
    method = federate(User(), epochs=2, batch_size=24)
    fit(method, blobs(sizes), rounds)
    reference = User().double()
    optimizer = reference.configure_optimizers()
    federation = blobs(sizes).federation
    index = federation.train[0]
    for _ in range(2):
        optimizer.zero_grad()
        x, y = federation.inputs[index].double(), federation.targets[index]
        reference.training_step((x, y), 0)["loss"].backward()
        optimizer.step()
    expected = {f"module.{name}": value.detach() for name, value in reference.state_dict().items()}
    assert largest_difference(weights(method), expected) < 1e-9


@pytest.mark.parametrize("engine", ["stacked", "captured"])
@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedPer])
def test_every_engine_and_method_trains_it_alike(kind: type[FedAvg], engine: str) -> None:
    options = {"personal": ["module.net.head"]} if kind is FedPer else {}
    methods = [federate(User(), kind, epochs=2, batch_size=8, engine=e, **options) for e in ("sequential", engine)]
    for method in methods:
        fit(method, blobs(), 2)
    assert largest_difference(weights(methods[0]), weights(methods[1])) < 1e-9


def test_the_users_module_stays_as_it_is_and_its_settings_are_read() -> None:
    user = User()
    before = {name: value.clone() for name, value in user.state_dict().items()}
    method = federate(user, epochs=1, batch_size=8)
    fit(method, blobs(), 1)
    assert all(torch.equal(before[name], value) for name, value in user.state_dict().items())
    assert (method.local.lr, method.local.momentum, method.local.weight_decay) == (0.2, 0.3, 0.01)
    assert federate(user, lr=0.5).local.momentum == 0.0


def test_losses_asked_for_by_the_server_are_the_users() -> None:
    method = federate(User())
    fit(method, blobs(), 1)
    federation = method.federation
    index = federation.train[0]
    with torch.no_grad():
        scores = method.net.module(federation.inputs[index].double())
    target = nn.functional.one_hot(federation.targets[index], CLASSES).double()
    expected = (scores.softmax(1) - target).square().sum(1).mean()
    assert float(mean_loss(method, method.server_state(), LocalData(federation, 0))) == pytest.approx(float(expected))


class Counting(User):
    """Keeps a metric as users do: by forward, by update, or in a list that grows."""

    def __init__(self, metric: Metric | None) -> None:
        super().__init__()
        self.metric = metric

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if isinstance(self.metric, MulticlassAccuracy):
            self.metric(self(batch[0]), batch[1])
        elif self.metric is not None:
            self.metric.update(result["loss"].detach())
            self.metric(result["loss"])
        self.log("metric", self.metric)
        return result


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize(
    "make", [lambda: MulticlassAccuracy(CLASSES), MeanMetric, CatMetric], ids=["Accuracy", "MeanMetric", "CatMetric"]
)
def test_metrics_in_a_step_change_nothing_and_keep_nothing(make: Any, engine: str) -> None:
    plain, method = (federate(Counting(metric), batch_size=8, engine=engine) for metric in (None, make()))
    for one in (plain, method):
        fit(one, blobs(), 2, precision="64-true")
    assert largest_difference(weights(plain), weights(method)) < 1e-9
    metric = method.functional.skeleton.module.metric
    assert metric._update_count == 0
    assert metric._computed is None
    for name, default in metric._defaults.items():
        kept = getattr(metric, name)
        assert kept == [] if isinstance(default, list) else torch.equal(kept, default)


def variant(**members: Any) -> LightningModule:
    return type("Odd", (User,), members)()


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (User(optimizer=lambda p: torch.optim.Adam(p)), "returns Adam, but clients train with SGD"),
        (User(optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)), "sets nesterov=True"),
        (User(optimizer=lambda p: [torch.optim.SGD([q], 0.1) for q in p]), "must return one optimizer, not list"),
        (User(optimizer=lambda p: torch.optim.SGD(list(p)[:1], 0.1)), "leaves parameters out"),
        (User(optimizer=lambda p: {"optimizer": torch.optim.SGD(p, 0.1), "lr_scheduler": 1}), "learning rate schedul"),
        (variant(configure_optimizers=lambda self: self.trainer.optimizers), "cannot be called without a Trainer"),
        (variant(automatic_optimization=False), "optimizes manually"),
        (variant(on_after_backward=lambda self: None), "overrides on_after_backward"),
        (variant(on_before_batch_transfer=lambda self, batch, i: batch), "overrides on_before_batch_transfer"),
        (variant(on_after_batch_transfer=lambda self, batch, i: batch), "overrides on_after_batch_transfer"),
        (FedAvg(mlp()), "is a federated method already"),
        (LightningModule(), "has no training_step"),
        (mlp(), "takes a LightningModule"),
    ],
)
def test_what_clients_cannot_do_is_refused(module: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        federate(module)


def test_parameters_with_different_settings_are_refused() -> None:
    def two(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}], lr=0.1)

    with pytest.raises(FederationError, match="different settings"):
        sgd_settings(User(optimizer=two))


def test_a_step_without_a_loss_is_refused() -> None:
    method = federate(variant(training_step=lambda self, batch, batch_idx: None))
    with pytest.raises(FederationError, match="training_step must return the loss"):
        fit(method, blobs(), 1)


def test_scores_that_do_not_fit_the_data_are_refused() -> None:
    module = User()
    module.net = nn.Linear(FEATURES + 1, CLASSES)
    with pytest.raises(FederationError, match="cannot take inputs of shape"):
        fit(federate(module), blobs(), 1)
