"""Secure aggregation: masks that hide and cancel, runs that do not change by it, and what attacks then see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from fl_lightning import methods
from fl_lightning.callbacks import (
    DifferentialPrivacyCallback,
    GradientLeakageCallback,
    MembershipInferenceCallback,
    SecureAggregationCallback,
)
from fl_lightning.callbacks.secure import secure_mean
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg
from fl_lightning.module import FederatedModule
from fl_lightning.nets import MLP
from fl_lightning.privacy import VIEWS, Wire, Wiretap, intercept
from fl_lightning.privacy.secure import decoded, encoded, masked, summed
from fl_lightning.privacy.wiretap import finished
from fl_lightning.robust import Median
from fl_lightning.wire import Message, weighted_mean
from tests.support import blobs, fit, largest_difference, mlp, weights
from tests.support.privacy import REFUSED, SIDE, net, noise, spots


@pytest.mark.parametrize("clients", [2, 3, 10])
def test_masks_hide_every_message_and_cancel(clients: int) -> None:
    values = torch.randn(clients, 4000, generator=torch.Generator().manual_seed(0)).double()
    rows = [encoded(row, clients) for row in values]
    sent = masked(rows)
    for plain, hidden in zip(rows, sent, strict=True):
        assert kstest(hidden / 2.0**64, "uniform").pvalue > 1e-5
        assert abs(np.corrcoef(plain.view(np.int64) / 2.0**32, hidden / 2.0**64)[0, 1]) < 0.08
    assert not (sent[0] == masked(rows)[0]).any()  # masks are new each time
    assert (summed(sent) == summed(rows)).all()
    torch.testing.assert_close(decoded(summed(sent)), values.sum(0), rtol=0, atol=clients * 2.0**-33)
    if clients > 2:
        assert float((decoded(summed(sent[:-1])) - values[:-1].sum(0)).abs().max()) > 1e6  # one missing, nothing known


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(FederationError, match="takes weighted values below 1073741824"):
        encoded(torch.tensor([2.0**30]), 2)
    with pytest.raises(FederationError, match="of one client hides nothing"):
        masked([encoded(torch.ones(1), 1)])


def test_the_mean_of_messages() -> None:
    generator = torch.Generator().manual_seed(1)
    messages = [
        Message(k, {"w": torch.randn(3, 2, generator=generator), "count": torch.tensor(4 + k)}, 10 * (k + 1))
        for k in range(3)
    ]
    found = secure_mean(messages, [10.0, 20.0, 30.0])
    expected = weighted_mean(messages, [1 / 6, 2 / 6, 3 / 6], ["w"])
    torch.testing.assert_close(found["w"], expected["w"], rtol=0, atol=1e-6)
    assert (int(found["count"]), found["count"].dtype) == (5, torch.int64)  # 4, 5, 6 with weights 1, 2, 3: 5.33
    assert secure_mean([Message(0, {}, 1), Message(1, {}, 1)], [1.0, 1.0]) == {}


@pytest.mark.parametrize("name", methods.__all__)
def test_runs_are_the_same_or_refused(name: str) -> None:
    kind = getattr(methods, name)
    options: dict[str, Any] = {"lr": 0.1, "batch_size": 8, "engine": "stacked"}
    options |= {"FedCluster": {"clusters": 2}, "PFedMe": {"lr": 0.05}, "WAFFLe": {"factors": {"fc1": 6}}}.get(name, {})

    def run(*callbacks: Any) -> FederatedModule:
        method: FederatedModule = kind(mlp(), **options)
        fit(method, blobs(), 2, callbacks=list(callbacks))
        return method

    if name in REFUSED:
        with pytest.raises(FederationError, match=f"The server of {name} needs more than the mean"):
            run(SecureAggregationCallback())
        return
    plain, secure = run(), run(SecureAggregationCallback())
    assert largest_difference(weights(plain), weights(secure)) < 1e-7
    for client in plain.snapshots:
        assert largest_difference(plain.personal_state(client), secure.personal_state(client)) < 1e-7


def test_who_cannot_go_together() -> None:
    with pytest.raises(FederationError, match="A robust rule needs single messages"):
        fit(FedAvg(mlp(), aggregation=Median()), blobs(), 1, callbacks=[SecureAggregationCallback()])
    late = [SecureAggregationCallback(), DifferentialPrivacyCallback()]
    with pytest.raises(FederationError, match="put it before SecureAggregationCallback"):
        fit(FedAvg(mlp(), engine="stacked"), blobs(), 1, callbacks=late)
    fit(FedAvg(mlp(), engine="stacked"), blobs(), 1, callbacks=late[::-1])


def test_the_server_sees_the_sum_and_colluding_clients_the_last_message() -> None:
    """The view of sums is the mean; the one of collusion is the message itself, but for rounding."""
    sent: list[list[Message]] = []
    method = FedAvg(mlp(), lr=0.1, engine="stacked", weighting="uniform")
    method.on_before_aggregate = lambda messages: sent.append(  # type: ignore[attr-defined]
        [Message(m.client, dict(m.tensors), m.samples) for m in messages]
    )
    wire = Wire(memory=2)
    fit(method, blobs(), 3, callbacks=[Wiretap(wire, sums=True)])
    run = finished(method, wire)
    mean = weighted_mean(sent[-1], [0.25] * 4)
    (last,) = VIEWS["sums"]().observe(run, 1)["seen"][-1:]
    assert largest_difference(last, mean) < 1e-12
    assert len(VIEWS["sums"]().observe(run, 1)["seen"]) == 2
    for client in range(4):
        found = VIEWS["colluding"]().observe(run, client)["seen"][-1]
        assert largest_difference(found, sent[-1][client].tensors) < 1e-12
    asked = intercept(method, [0, 2], others=[1, 3])
    assert largest_difference(VIEWS["sums"]().observe(asked, 0)["seen"][0], dict(asked.wire.means[0])) == 0.0
    assert largest_difference(VIEWS["colluding"]().observe(asked, 2)["seen"][0], asked.wire.sent[2][0]) < 1e-12


def test_under_secure_aggregation_membership_is_that_of_the_sum(tmp_path: Path) -> None:
    """Nothing is left for outsider and server, the mean of four models gives away less than each of them."""
    recipe: dict[str, Any] = {"lr": 0.2, "epochs": 8, "batch_size": 10, "engine": "stacked"}
    found = {}
    for secure in (False, True):
        views: Any = ["server", "sums", "colluding"] if not secure else ["outsider", "server"]
        attack = MembershipInferenceCallback(views, shadows=2, folder=str(tmp_path))
        others = [SecureAggregationCallback()] if secure else []
        fit(FedAvg(net(), **recipe), noise(), 3, callbacks=[attack, *others])
        assert attack.report is not None
        found[secure] = attack.report
    assert found[True].views() == ["sums"]
    one, other = (
        report.mean(report.select(view="sums", variant="loss"))["auroc"] for report in (found[False], found[True])
    )
    assert one == pytest.approx(other, abs=1e-3)
    server, sums, colluding = (
        found[False].mean(found[False].select(view=view, variant="loss"))["auroc"]
        for view in ("server", "sums", "colluding")
    )
    assert server > sums + 0.05
    assert colluding == pytest.approx(server, abs=1e-3)
    assert "**sums** sees the mean of all clients' messages" in (tmp_path / "attack_membership.md").read_text()


def image_net() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MLP(SIDE * SIDE, (12,), 3)


def test_a_sum_hides_single_images_and_collusion_does_not(tmp_path: Path) -> None:
    method = FedAvg(image_net(), lr=0.01, engine="stacked")
    views: Any = ["server", "sums", "colluding"]
    leakage = GradientLeakageCallback(views, steps=5, clients=1, folder=str(tmp_path))
    fit(method, spots(), 1, callbacks=[leakage])
    assert leakage.report is not None
    best = {view: leakage.report.strongest(view=view)["psnr"] for view in views}  # type: ignore[index]
    assert best["server"] > 100
    assert best["colluding"] > 80
    assert best["sums"] < 25
    hidden = GradientLeakageCallback(["server"], steps=5, clients=1, folder=str(tmp_path))
    fit(FedAvg(image_net(), lr=0.01, engine="stacked"), spots(), 1, callbacks=[hidden, SecureAggregationCallback()])
    assert hidden.report is not None
    assert hidden.report.views() == ["sums"]
