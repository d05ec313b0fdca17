"""A user's LightningModule made federated: its loss is what clients minimise, and what cannot be done is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau
from torchmetrics import CatMetric, MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.engine import Job, make_engine
from fl_lightning.engine.schedule import ClientSchedule
from fl_lightning.errors import FederationError
from fl_lightning.evaluation import mean_loss
from fl_lightning.federate import federate, local_settings
from fl_lightning.methods import FedAvg, FedPer, FedProx
from fl_lightning.nets import Asked
from fl_lightning.parties import LocalData
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, weights
from tests.support.problems import User


def test_a_method_object_is_refused() -> None:
    with pytest.raises(FederationError, match=r"takes a method's class and its options: federate\(module, FedAvg, ep"):
        federate(User(), FedAvg(mlp()))  # type: ignore[arg-type]


def test_one_client_trains_like_the_users_own_module() -> None:
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


def test_the_users_module_is_unchanged_and_its_settings_are_used() -> None:
    user = User()
    before = {name: value.clone() for name, value in user.state_dict().items()}
    method = federate(user, epochs=1, batch_size=8)
    fit(method, blobs(), 1)
    assert all(torch.equal(before[name], value) for name, value in user.state_dict().items())
    assert (method.local.lr, method.local.momentum, method.local.weight_decay) == (0.2, 0.3, 0.01)
    assert federate(user, lr=0.5).local.momentum == 0.0


def test_losses_for_the_server_are_those_of_the_users_module() -> None:
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
def test_metrics_in_a_step_have_no_effect_and_no_state(make: Any, engine: str) -> None:
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


def scheduled(make: Any = lambda o: ExponentialLR(o, 0.1), **config: Any) -> Any:
    """A user's optimizer with a scheduler."""

    def configured(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, 0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return configured


def variant(**members: Any) -> LightningModule:
    return type("Odd", (User,), members)()


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (User(optimizer=lambda p: torch.optim.Adagrad(p)), "returns Adagrad, but clients train with SGD, Adam, AdamW"),
        (User(optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5)), "sets dampening=0.5"),
        (User(optimizer=lambda p: torch.optim.Adam(p, amsgrad=True)), "sets amsgrad=True"),
        (User(optimizer=lambda p: [torch.optim.SGD([q], 0.1) for q in p]), "must return one optimizer, not list"),
        (User(optimizer=lambda p: torch.optim.SGD(list(p)[:1], 0.1)), "leaves parameters out"),
        (User(optimizer=scheduled(ReduceLROnPlateau)), "returns ReduceLROnPlateau, which depends on metrics"),
        (User(optimizer=scheduled(interval="step")), "steps its scheduler by step"),
        (User(optimizer=lambda p: ([torch.optim.SGD(p, 0.1)], [1, 2])), "returns 2 schedulers"),
        (variant(configure_optimizers=lambda self: self.trainer.optimizers), "cannot be called without a Trainer"),
        (variant(automatic_optimization=False), "optimizes manually"),
        (variant(on_after_backward=lambda self: None), "overrides on_after_backward"),
        (variant(on_before_batch_transfer=lambda self, batch, i: batch), "overrides on_before_batch_transfer"),
        (variant(on_after_batch_transfer=lambda self, batch, i: batch), "overrides on_after_batch_transfer"),
        (variant(on_train_epoch_end=lambda self: None), "overrides on_train_epoch_end, which a federated run does not"),
        (variant(predict_step=lambda self, batch: None), "overrides predict_step, .* into a callback"),
        (FedAvg(mlp()), "is a federated method already"),
        (LightningModule(), "has no training_step"),
        (mlp(), "takes a LightningModule"),
    ],
)
def test_unsupported_modules_are_rejected(module: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        federate(module)


def groups_of(parameters: Any) -> torch.optim.Optimizer:
    first, second, *rest = parameters
    return torch.optim.AdamW([{"params": [first, second], "lr": 0.02, "weight_decay": 0.3}, {"params": rest}], lr=0.05)


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.9), weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, 0.9, momentum=0.4, centered=True),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
    "groups": groups_of,
    "scheduled": scheduled(),
    "every other epoch": scheduled(frequency=2),
    "warmed up": scheduled(lambda o: LinearLR(o, 0.25, total_iters=3)),
}


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_the_users(name: str, engine: str) -> None:
    """A round is the user's own loop, of which the scheduler is stepped after every pass over the data."""
    method = federate(User(optimizer=OPTIMIZERS[name]), epochs=4, batch_size=8, engine=engine, seed=1)
    federation = blobs().federation
    method.local = method.local.in_round(0, 2)
    method = method.double()
    jobs = [Job(client, method.server_state()) for client in range(4)]
    results = make_engine(engine).train(method, federation, jobs, 0)
    for client, result in enumerate(results):
        reference = User(optimizer=OPTIMIZERS[name]).double()
        found = reference.configure_optimizers()
        optimizer, config = (found["optimizer"], found["lr_scheduler"]) if isinstance(found, dict) else (found, None)
        schedule = ClientSchedule.of(method, federation, client, 0)
        for epoch in range(4):
            for part in schedule.order().split(8):
                optimizer.zero_grad()
                reference.training_step((federation.inputs[part].double(), federation.targets[part]), 0)[
                    "loss"
                ].backward()
                optimizer.step()
            if config is not None and (epoch + 1) % config.get("frequency", 1) == 0:
                config["scheduler"].step()
        expected = {f"module.{entry}": value.detach() for entry, value in reference.named_parameters()}
        assert largest_difference({n: result.state[n] for n in expected}, expected) < 1e-12


def test_schedules_are_tabulated_until_they_are_constant() -> None:
    assert local_settings(User(optimizer=scheduled()))["lr_schedule"].values[:3] == pytest.approx([1.0, 0.1, 0.01])
    warm = local_settings(User(optimizer=scheduled(lambda o: LinearLR(o, 0.5, total_iters=2))))
    assert warm["lr"] == 0.1
    assert warm["lr_schedule"].values == pytest.approx([0.5, 0.75, 1.0])
    cycle = local_settings(User(optimizer=scheduled(lambda o: OneCycleLR(o, 1.0, total_steps=5))))
    assert len(cycle["lr_schedule"].values) == 6  # torch allows one step more


def test_groups_that_are_scheduled_differently_are_refused() -> None:
    def two(parameters: Any) -> Any:
        first, *rest = parameters
        optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, [lambda e: 1.0, lambda e: 0.5**e])}

    with pytest.raises(FederationError, match="schedules its parameter groups differently"):
        federate(User(optimizer=two))


class Judged(User):
    """Logs a metric, a mean and a dict in its validation step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores = self(batch[0])
        self.accuracy(scores, batch[1])
        self.log("mine", self.accuracy, prog_bar=True)
        self.log_dict({"spread": scores.std(), "one": 1.0})

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("many", batch[0])


def test_logged_metrics_are_kept_by_client() -> None:
    method = federate(Judged())
    federation = blobs().federation
    for client in range(4):
        x, y = (values[federation.test[client]] for values in (federation.inputs, federation.targets))
        found, _ = method.functional(method.server_state(), Asked(x, y, "val"), {}, training=False)
        scores = method.net.module(x).detach()
        assert float(found["mine"]) == pytest.approx(float((scores.argmax(1) == y).double().mean()))
        assert float(found["spread"]) == pytest.approx(float(scores.std()))
        assert set(found) == {"mine", "spread", "one"}
        with pytest.raises(FederationError, match="many is logged with 200 values per client"):
            method.functional(method.server_state(), Asked(x, y, "test"), {}, training=False)
    assert not federate(User()).net.logs("val")


def test_without_a_test_step_the_validation_step_evaluates_test_samples() -> None:
    """Without held-out samples clients are validated on test samples: what is logged must not be lost."""

    class Validated(Judged):
        test_step = LightningModule.test_step

    method = federate(Validated(), engine="sequential")
    logged = fit(method, blobs(), 1).callback_metrics
    assert float(logged["test/mine"]) == pytest.approx(float(logged["test/acc"]))
    net = federate(Judged()).net
    assert (net._steps["val"], net._steps["test"]) == ("validation_step", "test_step")


def test_a_method_that_needs_plain_sgd_refuses_others() -> None:
    class Needs(FedAvg):
        plain_sgd = "takes a client's change for its gradient"

    with pytest.raises(FederationError, match=r"Needs takes a client's .* plain SGD alone: leave optimizer=Adam"):
        federate(User(optimizer=torch.optim.Adam), Needs)
    assert federate(User(), Needs).local.momentum == 0.3


def test_a_step_without_a_loss_is_refused() -> None:
    method = federate(variant(training_step=lambda self, batch, batch_idx: None))
    with pytest.raises(FederationError, match="training_step must return the loss"):
        fit(method, blobs(), 1)


def test_scores_that_do_not_fit_the_data_are_refused() -> None:
    module = User()
    module.net = nn.Linear(FEATURES + 1, CLASSES)
    with pytest.raises(FederationError, match="cannot take inputs of shape"):
        fit(federate(module), blobs(), 1)
