"""A run with a user's own task, optimizer and schedule: what is trained, logged, kept and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.federate import federate
from fl_lightning.local_optim import AdamW
from fl_lightning.methods import FedAvg, FedPer, PFedMe, WAFFLeL1
from fl_lightning.nets import MLP, adapters, lora
from fl_lightning.schedules import Cosine, Step
from fl_lightning.tasks import Classification, Regression
from tests.support import blobs, fit, largest_difference, mlp, weights

SIZES = (14, 9, 17)


def numbers(**options: Any) -> TensorFederation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 4, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(len(x), generator=generator)
    parts = list(torch.arange(len(x)).split(SIZES))
    return TensorFederation(
        x, y, train=[p[4:] for p in parts], test=[p[:4] for p in parts], **{"val_fraction": 0, **options}
    )


def net() -> MLP:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MLP(4, (8,), 1, bias=True)


OPTIONS: dict[str, Any] = {
    "epochs": 2, "batch_size": 5, "lr": 0.01, "task": "Regression", "optimizer": "AdamW", "seed": 0,
    "engine": "sequential",
}  # fmt: skip


def test_metrics_of_clients_equal_scikit_learn() -> None:
    data = numbers(global_test=[0, 14, 23])
    method = FedAvg(net(), **OPTIONS)
    logged = fit(method, data, 2).callback_metrics
    federation, functions = data.federation, (root_mean_squared_error, mean_absolute_error, r2_score)
    for name, function in zip(("rmse", "mae", "r2"), functions, strict=True):
        values = []
        for index in federation.test:
            with torch.no_grad():
                predicted = method.net(federation.inputs[index].double())[:, 0]
            values.append(function(federation.targets[index], predicted))
        assert float(logged[f"test/{name}"]) == pytest.approx(sum(values) / 3, rel=1e-5)
        worst = min(values) if name == "r2" else max(values)
        assert float(logged[f"test/{name}_worst10"]) == pytest.approx(worst, rel=1e-5)
    assert float(method.evaluator.scores["test"].mean()) == pytest.approx(float(logged["test/rmse"]))
    assert "test/acc" not in logged
    assert "test/global_rmse" in logged


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_moments_are_kept_through_a_resume(engine: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "keep_optimizer": True, "lr_schedule": Cosine(), "engine": engine}
    whole, half = FedAvg(net(), **options), FedAvg(net(), **options)
    fit(whole, numbers(), 4)
    stopped = fit(half, numbers(), 4, callbacks=[Stop(2)])
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    again = FedAvg(net(), **options)
    fit(again, numbers(), 4, ckpt_path=str(tmp_path / "half.ckpt"))
    assert largest_difference(weights(whole), weights(again)) == 0
    kept = again.snapshots[0].private
    assert int(kept["optimizer.steps.head.bias"]) == 4 * 2 * 2
    new = FedAvg(net(), **{**options, "keep_optimizer": False})
    fit(new, numbers(), 4)
    assert largest_difference(weights(whole), weights(new)) > 0
    read = FedAvg.load_from_checkpoint(tmp_path / "half.ckpt")
    assert isinstance(read.task, Regression)
    assert read.local.rule == AdamW()
    assert isinstance(read.local.schedule, Cosine)


class Stop(Callback):
    """Ends a run after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        run.should_stop = module.completed_rounds >= self.rounds


def test_rates_fall_by_round() -> None:
    """The third round of a falling schedule is a first round at that rate."""
    scheduled = FedAvg(mlp(), lr=0.4, lr_schedule=Step(1, 0.5), batch_size=8, engine="sequential", seed=0)
    fit(scheduled, blobs(), 2)
    plain = FedAvg(mlp(), lr=0.4, batch_size=8, engine="sequential", seed=0)

    plain.on_round_start = lambda round, cohort: setattr(plain, "local", replace(plain.local, lr=0.4 * 0.5**round))
    fit(plain, blobs(), 2)
    assert largest_difference(weights(scheduled), weights(plain)) < 1e-12


def test_own_entries_of_a_selection_follow_the_schedule() -> None:
    """They step by themselves, within a traced step."""
    options: dict[str, Any] = {"factors": {"fc1": 6}, "lr": 0.2, "batch_size": 8, "seed": 0}
    options["lr_schedule"] = Step(1, 0.1)
    runs = [WAFFLeL1(mlp(), engine=engine, **options) for engine in ("sequential", "stacked")]
    for run in runs:
        fit(run, blobs(), 2)
    assert largest_difference(weights(runs[0]), weights(runs[1])) < 1e-10


def test_a_servers_scheduler_is_stepped_by_round() -> None:
    class Slowing(FedAvg):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
            return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 2, 0.1)}

    run = fit(Slowing(mlp(), engine="sequential"), blobs(), 4)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_frozen_entries_do_not_cross_the_wire() -> None:
    method = FedPer(lora(mlp(), 2, train=()), personal=["fc1.down", "fc1.up"], engine="stacked", batch_size=8, seed=0)
    before = weights(method)
    fit(method, blobs(), 2)
    assert method.shared_names == ("head.down", "head.up")
    assert method.bytes_up == 2 * 4 * 8 * (2 * 16 + 4 * 2)
    assert set(adapters(method.net)) == {*method.shared_names, *method.private_names}
    after = weights(method)
    assert {n for n in after if not torch.equal(before[n], after[n])} == {"head.up", "head.down"}
    assert not torch.equal(method.snapshots[0].private["fc1.up"], method.snapshots[1].private["fc1.up"])


class Judged(LightningModule):
    """A user's module with a validation step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0])[:, 0], batch[1].to(batch[0].dtype))

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("bias", (self(batch[0])[:, 0] - batch[1]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_users_validation_step_is_logged_over_clients() -> None:
    method, data = federate(Judged(), task="Regression", epochs=1, batch_size=5, engine="stacked"), numbers()
    logged = fit(method, data, 1).callback_metrics
    federation = data.federation
    with torch.no_grad():
        parts = [
            (method.net(federation.inputs[i].double())[:, 0] - federation.targets[i]).mean() for i in federation.test
        ]
    found = torch.stack(parts)
    assert float(logged["test/bias"]) == pytest.approx(float(found.mean()))
    assert float(logged["test/bias_std"]) == pytest.approx(float(found.std(correction=0)))


@pytest.mark.parametrize(
    ("make", "data", "sentence"),
    [
        (lambda: FedAvg(net()), numbers, r"Classification needs one integer per sample"),
        (lambda: FedAvg(MLP(4, (), 2), task="Regression"), numbers, r"outputs of shape \(n, 1\), not \(n, 2\)"),
        (lambda: FedAvg(mlp(), task="NextToken"), blobs, r"NextToken needs integers of shape \(n, length\)"),
        (lambda: PFedMe(mlp(), optimizer="Adam"), blobs, r"PFedMe moves w towards theta .* plain SGD alone"),
    ],
)
def test_tasks_that_do_not_fit_are_rejected(make: Any, data: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        fit(make(), data(), 1)


class Smoothed(Classification):
    """Classes with a loss of their own."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.2)


def test_the_loss_of_an_own_task_of_classes_is_logged() -> None:
    data, method = blobs(), FedAvg(mlp(), task=Smoothed(), lr=0.1, engine="sequential")
    logged = fit(method, data, 1).callback_metrics
    with torch.no_grad():
        federation = data.federation
        losses = [
            F.cross_entropy(method.net(federation.inputs[i].double()), federation.targets[i], label_smoothing=0.2)
            for i in federation.test
        ]
    assert float(logged["test/loss"]) == pytest.approx(float(torch.stack(losses).mean()))


def test_a_schedule_needs_the_number_of_rounds() -> None:
    method = FedAvg(mlp(), lr_schedule=Cosine(), engine="sequential")
    with pytest.raises(FederationError, match=r"Cosine depends on the share of completed rounds: set max_epochs"):
        method.local.in_round(0, -1)
    assert FedAvg(mlp(), lr_schedule=Step(3)).local.in_round(4, -1).lr == pytest.approx(0.001)
