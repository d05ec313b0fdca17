"""Failures give a clear error, and earlier state survives."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from fl_lightning.datamodules import IID, Digits, TensorFederation, Unimodal
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedProx, Local
from fl_lightning.nets import MLP, LeNet5, LeNetBN
from fl_lightning.optim import FedAdam
from fl_lightning.parties import Me, Reply
from tests.support import Idle, blobs, fit, largest_difference, mlp, trainer, weights


class Poisoned(FedAvg):
    """Some clients' updates are not finite from some round on."""

    def __init__(self, net: Any, bad: tuple[int, ...], since: int = 0, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.bad, self.since = bad, since

    def leave(self, state: Any, received: Any, me: Me) -> Reply:
        reply = super().leave(state, received, me)
        if me.client in self.bad and me.round >= self.since:
            return reply.plus(up={"head.bias": state["head.bias"] * math.nan})
        return reply


def test_a_client_with_a_non_finite_update_is_left_out_and_named() -> None:
    method = Poisoned(mlp(), bad=(1,), engine="stacked")
    with pytest.warns(UserWarning, match="left out clients 1, whose updates are not finite"):
        run = fit(method, blobs(), rounds=1)
    assert run.callback_metrics["clients/left_out"] == 1
    assert 1 not in method.snapshots

    three = FedAvg(mlp(), engine="stacked")
    three.cohort = lambda round: [0, 2, 3]  # type: ignore[method-assign]
    fit(three, blobs(), rounds=1)
    assert largest_difference(weights(method), weights(three)) < 1e-15


def test_divergence_warns_once() -> None:
    """A loss that is large because of a net's own loss, or of what is predicted, says nothing."""
    with pytest.warns(UserWarning, match="mean training loss of round 0 is .*the run diverges, lower") as told:
        fit(FedAvg(mlp(), lr=10.0, engine="stacked"), blobs(), rounds=3)
    assert sum("diverges" in str(one.message) for one in told) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*diverges.*")
        fit(FedAvg(mlp(), lr=0.1, engine="stacked"), blobs(), rounds=1)


def test_non_finite_private_state_is_not_kept() -> None:
    data = blobs()
    data.federation.inputs[data.federation.train[2]] = math.inf
    method = Local(mlp(), lr=0.1)
    with pytest.warns(UserWarning, match="left out clients 2"):
        fit(method, data, rounds=1)
    assert list(method.snapshots) == [0, 1, 3]


@pytest.mark.parametrize("kind", ["poisoned", "diverged"])
def test_only_non_finite_updates_stop_the_run_and_keep_the_checkpoint(kind: str, tmp_path: Path) -> None:
    method = Poisoned(mlp(), bad=(0, 1, 2, 3), since=2 if kind == "poisoned" else 99, lr=0.1)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    if kind == "diverged":
        fit(method, blobs(), rounds=2, enable_checkpointing=True, callbacks=[saver])
        method.local = type(method.local)(lr=1e300, epochs=3)
        path: str | None = str(tmp_path / "epoch=1.ckpt")
    else:
        path = None
    with pytest.raises(FederationError, match=r"In round 2 the updates of all 4 clients \(0, 1, 2, 3\) are not finite"):
        fit(method, blobs(), 5, path, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path)])
    good = Poisoned(mlp(), bad=(), lr=0.1)
    trainer().test(good, datamodule=blobs(), ckpt_path=str(min(tmp_path.glob("epoch=1*"))), verbose=False)
    assert all(value.isfinite().all() for value in weights(good).values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    fit(FedAvg(mlp()), blobs(), 2, enable_checkpointing=True, callbacks=[ModelCheckpoint(folder, filename="run")])
    return folder / "run.ckpt"


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "missing", "flipped"])
def test_unreadable_checkpoints(damage: str, saved: Path, tmp_path: Path) -> None:
    content, path = bytearray(saved.read_bytes()), tmp_path / "bad.ckpt"
    if damage == "flipped":
        content[len(content) // 3 : len(content) // 3 + 900] = b"x" * 900
    parts = {"truncated": content[: len(content) // 2], "empty": b"", "garbage": b"hello" * 99, "flipped": content}
    if damage != "missing":
        path.write_bytes(parts[damage])
    sentence = "There is no checkpoint" if damage == "missing" else "cannot be read"
    for use in (
        lambda: fit(FedAvg(mlp()), blobs(), ckpt_path=str(path)),
        lambda: trainer().test(FedAvg(mlp()), datamodule=blobs(), ckpt_path=str(path)),
        lambda: FedAvg.load_from_checkpoint(path),
    ):
        with pytest.raises(FederationError, match=sentence):
            use()


def test_checkpoints_that_do_not_fit(saved: Path, tmp_path: Path) -> None:
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(torch.ones(1, 2)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    foreign = trainer(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        foreign.fit(Plain(), [0])
    foreign.save_checkpoint(tmp_path / "foreign.ckpt")
    cases: list[tuple[Any, Any, Path, str]] = [
        (FedAvg(mlp()), blobs(), tmp_path / "foreign.ckpt", "not written by fl_lightning"),
        (FedProx(mlp()), blobs(), saved, "is of FedAvg, not of FedProx"),
        (FedAvg(mlp(hidden=(8,))), blobs(), saved, "model does not fit MLP"),
        (FedAvg(mlp(), seed=5), blobs(), saved, "had seed 0 and cannot continue with seed 5: pass seed=0"),
        (FedAvg(mlp()), blobs(seed=1), saved, "other data or another partition"),
        (FedAvg(mlp(), server_optimizer=FedAdam), blobs(), saved, "optimizer SGD and cannot continue with FedAdam"),
    ]
    for method, data, path, sentence in cases:
        with pytest.raises(FederationError, match=sentence):
            fit(method, data, ckpt_path=str(path))
    # A trained model may be evaluated on other data.
    trainer().test(FedAvg(mlp(), seed=5), datamodule=blobs(seed=1), ckpt_path=str(saved), verbose=False)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FedAvg(mlp(), lr=-1.0), "lr must be 0 or more"),
        (lambda: FedAvg(mlp(), lr=math.nan), "lr must be a number, not nan"),
        (lambda: FedAvg(mlp(), epochs=-1), "epochs must be 1 or more"),
        (lambda: FedAvg(mlp(), batch_size=0), "batch_size must be 1 or more"),
        (lambda: FedAvg(mlp(), momentum=1.0), r"momentum must be at least 0 and below 1"),
        (lambda: FedAvg(mlp(), weight_decay=-0.1), "weight_decay must be 0 or more"),
        (lambda: FedAvg(mlp(), clip_norm=0.0), "clip_norm must be greater than 0"),
        (lambda: FedAvg(mlp(), engine="warp"), "There is no engine 'warp': choose auto, sequential, stacked, captured"),
        (lambda: FedAvg(mlp(), clients_per_stack=0), "clients_per_stack must be 1 or more"),
        (lambda: FedAvg(mlp(), weighting="size"), "weighting must be samples or uniform"),  # type: ignore[arg-type]
        (lambda: FedAvg(mlp(), buffers="drop"), "buffers must be average, keep or reset"),  # type: ignore[arg-type]
        (lambda: Digits(fraction=0.0), "fraction must be greater than 0 and at most 1"),
        (lambda: Digits(fraction=1.1), "fraction must be greater than 0 and at most 1"),
        (lambda: Digits(partition=IID(clients=5000)).setup(), "clients"),
        (lambda: Digits(partition=Unimodal(10, classes_per_client=11)).setup(), "classes_per_client"),
        (
            lambda: TensorFederation(torch.ones(3, 2), torch.tensor([0, 1, 1]), [[0], []], [[1], [2]]).setup(),
            "no train",
        ),
    ],
)
def test_bad_settings(make: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (LeNet5(), r"LeNet5 cannot take inputs of shape \(20,\)"),
        (MLP(in_features=21, num_classes=4), r"MLP cannot take inputs of shape \(20,\)"),
        (MLP(in_features=20, num_classes=3), "MLP has 3 outputs but the data has 4 classes: set num_classes=4"),
        (nn.Sequential(nn.Linear(20, 4), nn.Flatten(0)), "must return scores of shape"),
        (nn.Sequential(nn.LSTM(20, 4)), "must return scores of shape .* not tuple"),
    ],
)
def test_nets_that_do_not_fit_the_data(net: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        fit(FedAvg(net), blobs())


def test_batches_of_one_are_refused_with_batch_normalisation() -> None:
    """They would all be dropped, and nothing be trained."""
    net = LeNetBN(num_classes=4)
    with pytest.raises(FederationError, match=r"LeNetBN has batch normalisation, .* set batch_size to 2 or more"):
        fit(FedAvg(net, batch_size=1), blobs(shape=(1, 28, 28)))
    trainer().test(FedAvg(net, batch_size=1), datamodule=blobs(shape=(1, 28, 28)), verbose=False)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_the_loss_ignores_clients_without_steps(engine: str) -> None:
    """One sample has no variance, so the second client skips it."""
    losses = []
    for sizes in ((16,), (16, 1)):
        method = FedAvg(LeNetBN(num_classes=4), lr=0.0, batch_size=16, engine=engine)
        method.net.load_state_dict({name: torch.ones_like(v) for name, v in method.net.state_dict().items()})
        fit(method, blobs(sizes, (1, 28, 28)), rounds=1)
        losses.append(method.summary["train/loss"])
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] > 0
    idle = Idle(mlp(), engine=engine)
    fit(idle, blobs(), rounds=1)
    assert math.isnan(idle.summary["train/loss"])


def test_data_that_is_not_federated_is_rejected() -> None:
    with pytest.raises(FederationError, match="needs a federated DataModule but was given no DataModule"):
        trainer().fit(FedAvg(mlp()), [0])
    with pytest.raises(FederationError, match="no trainable parameters"):
        fit(FedAvg(nn.Flatten()), blobs(shape=(4,)))  # type: ignore[arg-type]


def test_a_net_that_cannot_be_stacked_is_trained_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(20, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.fc(x)
            return h if h.sum() > 0 else -h

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Sequential(nn.Dropout1d(0.5), nn.Linear(20, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    for net in (Branching(), Noisy()):
        for kind in (FedAvg, Local):
            method = kind(net)  # type: ignore[arg-type]
            fit(method, blobs(), rounds=2)
            assert method.engine.choice == "sequential"  # type: ignore[attr-defined]
            assert "the net cannot be stacked" in method.engine.reason  # type: ignore[attr-defined]


def test_a_net_with_its_own_random_draws_uses_the_clients_stream() -> None:
    def run(**kwargs: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        method = FedAvg(nn.Sequential(nn.Dropout1d(0.5), nn.Linear(20, 4)), engine="sequential", **kwargs)  # type: ignore[arg-type]
        torch.manual_seed(torch.seed())
        fit(method, blobs())
        return weights(method)

    assert largest_difference(run(), run()) == 0.0
    assert largest_difference(run(), run(seed=1)) > 1e-4
