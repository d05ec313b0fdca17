"""FactorsCallback: numbers by brute force, and where they are logged."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning.callbacks import FactorsCallback
from fl_lightning.callbacks.factors import pairwise_distance
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, WAFFLe, WAFFLeL1
from fl_lightning.nets import LeNet5
from tests.support import CLASSES, blobs, fit, mlp

SCALARS = ("active", "distance", "used")


def waffle(kind: Any = WAFFLe, **kwargs: Any) -> Any:
    return kind(
        mlp(), **{"factors": {"fc1": 12}, "lr": 0.1, "epochs": 3, "batch_size": 8, "engine": "stacked", **kwargs}
    )


@pytest.mark.parametrize("clients", [1, 2, 7])
def test_pairwise_distance(clients: int) -> None:
    choices = torch.rand(clients, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    pairs = [float((a != b).sum()) for a, b in combinations(choices, 2)]
    assert float(pairwise_distance(choices)) == pytest.approx(sum(pairs) / max(len(pairs), 1))


def test_values_equal_a_count_by_hand() -> None:
    method, callback = waffle(), FactorsCallback()
    run = fit(method, blobs(fraction=0.5), callbacks=[callback])
    clients = list(method.snapshots)
    assert 1 < len(clients) < 4
    pi = torch.stack([method.snapshots[c].private["fc1.logits"].sigmoid() for c in clients])
    chosen = pi >= 0.5
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    assert metrics["factors/fc1/active"] == pytest.approx(float(chosen.sum()) / len(clients))
    pairs = [float((a != b).sum()) for a, b in combinations(chosen, 2)]
    assert metrics["factors/fc1/distance"] == pytest.approx(sum(pairs) / len(pairs))
    assert metrics["factors/fc1/used"] == pytest.approx(float(chosen.any(0).double().mean()))
    torch.testing.assert_close(callback.reuse["fc1"], chosen.double().mean(0))


def test_kl_terms_are_those_of_the_objective() -> None:
    """The reported KL of b is near the mean over many draws of v; that of v has no randomness."""
    method = waffle()
    run = fit(method, blobs(), callbacks=[FactorsCallback()])
    generator = torch.Generator().manual_seed(0)
    expected = []
    for client in range(4):
        own = {kind: method.snapshots[client].private[f"fc1.{kind}"] for kind in ("logits", "c", "d")}
        c, d = (torch.nn.functional.softplus(own[kind]) + 1e-3 for kind in ("c", "d"))
        u = torch.rand(4000, 12, dtype=torch.float64, generator=generator)
        p = ((1 - u ** (1 / d)) ** (1 / c)).cumprod(1)
        bernoulli = torch.distributions.Bernoulli
        kl = torch.distributions.kl_divergence(
            bernoulli(logits=own["logits"].expand_as(p)), bernoulli(probs=p.clamp(1e-9, 1 - 1e-9))
        )
        expected.append(float(kl.sum(1).mean()))
    assert float(run.callback_metrics["factors/fc1/kl_b"]) == pytest.approx(sum(expected) / 4, rel=0.1)
    terms = [method.selection_terms(client) for client in range(4)]
    assert float(run.callback_metrics["factors/fc1/kl_v"]) == pytest.approx(sum(t["fc1/kl_v"] for t in terms) / 4)
    assert terms == [method.selection_terms(client) for client in range(4)]


def test_every_layer_and_the_ablation() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = LeNet5(num_classes=CLASSES)
    method = WAFFLe(net, {"conv2": 5, "fc1": 6}, lr=0.1, epochs=2, batch_size=8)
    run = fit(method, blobs((16, 8), (1, 28, 28)), rounds=1, callbacks=[FactorsCallback()])
    names = {f"factors/{m}/{n}" for m in ("conv2", "fc1") for n in (*SCALARS, "kl_b", "kl_v")}
    assert names <= set(run.callback_metrics)
    ablation = waffle(WAFFLeL1, omega=50.0, score_lr_mult=10.0)
    run = fit(ablation, blobs(), callbacks=[FactorsCallback()])
    scores = torch.stack([ablation.snapshots[c].private["fc1.scores"] for c in range(4)])
    assert float(run.callback_metrics["factors/fc1/l1"]) == pytest.approx(float(scores.abs().sum(1).mean()))
    assert float(run.callback_metrics["factors/fc1/active"]) == pytest.approx(float((scores.abs() >= 0.1).sum()) / 4)


def test_any_logger_has_the_scalars_and_tensorboard_the_histograms(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, "tb", version=""), CSVLogger(tmp_path, "csv", version="")]
    fit(waffle(), blobs(), rounds=3, logger=loggers, log_every_n_steps=1, callbacks=[FactorsCallback()])
    header = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {f"factors/fc1/{name}" for name in SCALARS} <= set(header)
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0}).Reload()
    tags = events.Tags()
    assert {"factors/fc1/reuse", "factors/fc1/active_clients"} <= set(tags["histograms"])
    assert "factors/fc1/distance" in tags["scalars"]
    steps = [event.step for event in events.Histograms("factors/fc1/reuse")]
    assert steps == [event.step for event in events.Scalars("factors/fc1/distance")] == [0, 1, 2]
    assert events.Histograms("factors/fc1/reuse")[0].histogram_value.num == 12


def test_every_so_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    method, asked = waffle(), []
    active = WAFFLe.active_factors
    monkeypatch.setattr(WAFFLe, "active_factors", lambda self, client: (asked.append(client), active(self, client))[1])
    fit(method, blobs(), rounds=5, callbacks=[FactorsCallback(every=2)])
    assert len(asked) == 2 * 4


def test_it_changes_nothing() -> None:
    one, other = waffle(), waffle()
    fit(one, blobs())
    fit(other, blobs(), callbacks=[FactorsCallback()])
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))


def test_grown_factors_count_as_unused() -> None:
    method = waffle()
    fit(method, blobs(), rounds=1)
    method.grow(4)
    active = method.active_factors(0)["fc1"]
    assert active.shape == (16,)
    assert not active[12:].any()


def test_other_methods_and_settings_are_refused() -> None:
    with pytest.raises(FederationError, match="such as WAFFLe, not FedAvg"):
        fit(FedAvg(mlp()), blobs(), callbacks=[FactorsCallback()])
    with pytest.raises(FederationError, match="every must be 1 or more"):
        FactorsCallback(every=0)
