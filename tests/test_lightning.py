"""A federated run supports the features of a stock Trainer."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from fl_lightning.callbacks import FederatedCallback, FederatedRichProgressBar, FederatedTQDMProgressBar
from fl_lightning.errors import FederationError
from fl_lightning.lightning_checks import check_trainer
from fl_lightning.methods import FedAvg, FedProx, Local
from fl_lightning.wire import Message
from tests.support import blobs, fit, largest_difference, mlp, trainer, weights


def test_every_round_is_one_epoch_and_one_server_step() -> None:
    run = fit(FedAvg(mlp()), blobs(), rounds=5)
    assert (run.current_epoch, run.global_step) == (5, 5)


def test_hooks_are_called_in_order_with_the_messages() -> None:
    calls: list[tuple[str, Any]] = []

    class Spy(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int, cohort: list[int]) -> None:
            calls.append(("round", (round, sorted(cohort))))

        def on_client_start(self, trainer: Any, pl_module: Any, client: int, message: Any) -> None:
            calls.append(("down", (client, set(message))))

        def on_client_end(self, trainer: Any, pl_module: Any, client: int, message: Message) -> None:
            calls.append(("up", (client, set(message.tensors), message.samples)))

        def on_before_aggregate(self, trainer: Any, pl_module: Any, messages: list[Message]) -> None:
            calls.append(("aggregate", [m.client for m in messages]))

        def on_round_end(self, trainer: Any, pl_module: Any, messages: list[Message]) -> None:
            calls.append(("end", [m.client for m in messages]))

    method = FedAvg(mlp())
    fit(method, blobs((16, 8)), rounds=1, callbacks=[Spy()])
    names = set(method.shared_names)
    assert calls == [
        ("round", (0, [0, 1])),
        ("down", (0, names)),
        ("down", (1, names)),
        ("up", (0, names, 16)),
        ("up", (1, names, 8)),
        ("aggregate", [0, 1]),
        ("end", [0, 1]),
    ]


def test_any_callback_may_implement_a_hook_and_change_the_messages() -> None:
    class Defence(Callback):  # stops every update
        def on_before_aggregate(self, trainer: Any, pl_module: Any, messages: list[Message]) -> None:
            start = pl_module.server_state()
            for message in messages:
                message.tensors = {name: start[name].clone() for name in message.tensors}

    method = FedAvg(mlp())
    start = {k: v.double() for k, v in weights(method).items()}
    fit(method, blobs(), callbacks=[Defence()])
    assert largest_difference(weights(method), start) < 1e-15


def test_logs_have_the_round_as_x(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="csv", version=""), TensorBoardLogger(tmp_path, name="tb", version="")]
    fit(FedAvg(mlp()), blobs(), rounds=4, logger=loggers, log_every_n_steps=1)
    with open(tmp_path / "csv" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for name in ("train/loss", "test/acc", "test/acc_std", "test/acc_worst10", "test/loss", "comm/up_bytes"):
        assert [int(row["step"]) for row in rows if row.get(name)] == [0, 1, 2, 3], name
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [e.step for e in events.Scalars("test/acc")] == [0, 1, 2, 3]
    assert [e.step for e in events.Scalars("train/loss")] == [0, 1, 2, 3]


def test_bytes_are_those_of_the_messages() -> None:
    method = FedAvg(mlp())
    run = fit(method, blobs(fraction=0.5), rounds=3, precision="32-true")
    scalars = sum(p.numel() for p in method.net.parameters())
    assert run.callback_metrics["comm/up_bytes"] == run.callback_metrics["comm/down_bytes"] == 2 * 4 * scalars
    assert method.bytes_up == method.bytes_down == 3 * 2 * 4 * scalars


def test_model_checkpoint_and_early_stopping(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val/acc", mode="max", filename="best")
    stopper = EarlyStopping("val/acc", patience=2, mode="max")
    run = fit(FedAvg(mlp(), lr=0.0), blobs(val_fraction=0.2), 50, enable_checkpointing=True, callbacks=[saver, stopper])
    assert run.current_epoch == 3  # nothing gets better with lr = 0
    assert (tmp_path / "best.ckpt").exists()


def test_max_time_check_val_every_and_fast_dev_run() -> None:
    assert fit(FedAvg(mlp()), blobs(), 10**6, max_time={"seconds": 1}).current_epoch < 10**6
    seen: list[int] = []

    class Spy(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
            seen.append(trainer.current_epoch)

    fit(FedAvg(mlp()), blobs(), 6, check_val_every_n_epoch=3, callbacks=[Spy()])
    assert seen == [2, 5]
    method = Local(mlp(), epochs=3)
    fit(method, blobs(), fast_dev_run=True)
    assert [method.snapshots[c].steps for c in method.snapshots] == [2, 2]  # two clients, two steps


def test_limit_val_batches_evaluates_some_clients() -> None:
    method = FedAvg(mlp())
    fit(method, blobs(eval_clients=1), rounds=1, limit_val_batches=3)
    assert method.evaluator.scores["test"].isnan().tolist() == [False, False, False, True]
    none = fit(FedAvg(mlp()), blobs(), rounds=1, limit_val_batches=0)
    assert "test/acc" not in none.callback_metrics


def test_profilers_see_rounds() -> None:
    run = fit(FedAvg(mlp()), blobs(), rounds=2, profiler="simple")
    assert "local_training" in run.profiler.summary()
    fit(FedAvg(mlp()), blobs(), rounds=2, profiler="advanced")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true", "64-true"])
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_precisions(precision: Any, engine: str) -> None:
    method = FedAvg(mlp(), lr=0.2, epochs=5, engine=engine)
    run = fit(method, blobs(), rounds=10, precision=precision)
    assert run.callback_metrics["test/acc"] > 0.8
    expected = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert {p.dtype for p in method.net.parameters()} == {expected}


def test_mixed_precision_runs_the_net_in_bfloat16_and_caches_no_weights() -> None:
    """Cached low-precision copies of weights that change at every step would pile up for the whole round."""
    seen, caching = set(), set()

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.add(out.dtype)
            caching.add(torch.is_autocast_cache_enabled() and self.training)
            return out

    torch.manual_seed(0)
    net = Watched(20, 4)
    full, mixed = FedAvg(net, lr=0.5, engine="sequential"), None
    start = {k: v.clone() for k, v in net.state_dict().items()}
    fit(full, blobs(), rounds=3, precision="32-true")
    reference = weights(full)
    net.load_state_dict(start)
    mixed = FedAvg(net, lr=0.5, engine="sequential")
    seen.clear()
    fit(mixed, blobs(), rounds=3, precision="bf16-mixed")
    assert torch.bfloat16 in seen
    assert set(caching) == {False}
    assert largest_difference(weights(mixed), reference) < 0.02


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"gradient_clip_val": 1.0}, "use the method's clip_norm"),
        ({"accumulate_grad_batches": 2}, "larger batch_size"),
        ({"overfit_batches": 1}, "fewer clients or samples"),
        ({"strategy": DDPStrategy(), "sync_batchnorm": True}, "each other's batches: leave it out"),
    ],
)
def test_unsupported_trainer_options_are_rejected(option: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        fit(FedAvg(mlp()), blobs(), **option)


def test_unsupported_hardware_options_are_rejected() -> None:
    trainer = SimpleNamespace(strategy=SingleDeviceStrategy(), precision="16-mixed")
    with pytest.raises(FederationError, match="gradient scaler"):
        check_trainer(trainer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bar", "ours"), [(RichProgressBar, FederatedRichProgressBar), (TQDMProgressBar, FederatedTQDMProgressBar)]
)
def test_the_trainers_own_bar_shows_rounds_and_clients(bar: Any, ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = fit(FedAvg(mlp()), blobs(), rounds=2, enable_progress_bar=True, callbacks=[bar()])
    assert type(run.progress_bar_callback) is ours
    assert run.progress_bar_callback._trained == 4
    shown = "".join(capsys.readouterr())
    assert "Round 2" in shown
    assert "4/4" in shown


def test_test_and_predict_from_a_checkpoint(tmp_path: Path) -> None:
    method = Local(mlp(), lr=0.3, epochs=3)
    saver = ModelCheckpoint(tmp_path, filename="run")
    run = fit(method, blobs(), rounds=3, enable_checkpointing=True, callbacks=[saver])
    path = str(tmp_path / "run.ckpt")
    fresh = Local(mlp(seed=7), lr=0.3, epochs=3)
    (tested,) = trainer().test(fresh, datamodule=blobs(), ckpt_path=path, verbose=False)
    assert tested["test/acc"] == pytest.approx(float(run.callback_metrics["test/acc"]))
    (predicted,) = trainer().predict(fresh, datamodule=blobs(), ckpt_path=path)
    federation = blobs().federation
    right = [float((predicted[c] == federation.targets[federation.test[c]]).double().mean()) for c in range(4)]
    assert right == pytest.approx(method.evaluator.scores["test"].tolist())


@pytest.mark.parametrize("kind", [FedAvg, FedProx, Local])
def test_load_from_checkpoint_brings_back_every_client(kind: Any, tmp_path: Path) -> None:
    method = kind(mlp(), lr=0.3, **({"mu": 0.5} if kind is FedProx else {}))
    saver = ModelCheckpoint(tmp_path, filename="run")
    fit(method, blobs(), enable_checkpointing=True, callbacks=[saver], precision="32-true")
    loaded = kind.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    assert largest_difference(weights(loaded), weights(method)) == 0.0
    assert loaded.local == method.local
    assert getattr(loaded, "mu", None) == getattr(method, "mu", None)
    assert list(loaded.snapshots) == [0, 1, 2, 3]
    for client in range(4):
        theirs, ours = loaded.snapshots[client], method.snapshots[client]
        assert (theirs.rounds, theirs.steps, theirs.last_round) == (ours.rounds, ours.steps, ours.last_round)
        assert not ours.private or largest_difference(theirs.private, ours.private) == 0.0
    assert torch.equal(loaded.evaluator.scores["test"], method.evaluator.scores["test"])


def test_load_from_checkpoint_with_a_plain_module(tmp_path: Path) -> None:
    method = FedAvg(nn.Linear(20, 4))  # type: ignore[arg-type]
    fit(method, blobs(), enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, filename="run")])
    with pytest.raises(FederationError, match=r"pass the net again: FedAvg.load_from_checkpoint\(path, net=...\)"):
        FedAvg.load_from_checkpoint(tmp_path / "run.ckpt")
    loaded = FedAvg.load_from_checkpoint(tmp_path / "run.ckpt", net=nn.Linear(20, 4).double())
    assert largest_difference(weights(loaded), weights(method)) == 0.0


def test_seed_everything_decides_the_streams() -> None:
    def run(everything: int | None, **kwargs: Any) -> dict[str, torch.Tensor]:
        if everything is not None:
            seed_everything(everything, verbose=False)
        method = FedAvg(mlp(), lr=0.1, batch_size=8, engine="stacked", **kwargs)
        fit(method, blobs(fraction=0.5))
        return weights(method)

    first = run(3)
    assert largest_difference(first, run(3)) == 0.0
    assert largest_difference(first, run(4)) > 1e-3
    torch.manual_seed(99)  # global generators decide nothing
    assert largest_difference(first, run(None, seed=3)) > 0  # the DataModule still has seed 4
    seed_everything(3, verbose=False)
    torch.rand(5)
    assert largest_difference(first, run(None)) == 0.0


def test_a_second_fit_continues_from_the_weights_of_the_first() -> None:
    method = FedAvg(mlp(), lr=0.1)
    fit(method, blobs(), rounds=2)
    after = weights(method)
    fit(method, blobs(), rounds=2)
    assert largest_difference(weights(method), after) > 1e-3
    assert method.snapshots[0].rounds == 4
