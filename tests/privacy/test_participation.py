"""Client-level membership: who took part is found where updates stand out, and not where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.callbacks import (
    ClientMembershipCallback,
    DifferentialPrivacyCallback,
    FederatedCallback,
    SecureAggregationCallback,
)
from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import IFCA, SCAFFOLD, FedAvg, FedCluster, FedPer, Local
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.participation import participation_scores, teach
from tests.support import fit, largest_difference, trainer, weights
from tests.support.privacy import net, noise


def data(**kwargs: Any) -> TensorFederation:
    return noise(clients=12, **{"fraction": 0.4, **kwargs})


def method(kind: type[FederatedModule] = FedAvg, **options: Any) -> FederatedModule:
    return kind(net(), engine="stacked", **{"lr": 0.1, "batch_size": 20, "epochs": 3, **options})


def attacked(callback: ClientMembershipCallback, *others: Any, **options: Any) -> FederatedModule:
    found = method(**options)
    fit(found, data(), 4, callbacks=[*others, callback])
    return found


def found_by(callback: ClientMembershipCallback, view: str, variant: str, assumption: str = "own") -> dict[str, Any]:
    assert callback.report is not None
    (row,) = callback.report.select(view=view, variant=variant, assumption=assumption)
    return row


def test_scores_are_standard_normal_where_nobody_took_part() -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(5000, generator=generator)
    updates = 3 * common + torch.randn(220, 5000, generator=generator)
    change = updates[:10].mean(0)
    scores = participation_scores(change, updates[:60], updates[60:])
    assert float(scores[:10].min()) > 5  # 1 / sqrt(10) in units of 1 / sqrt(5000)
    assert abs(float(scores[10:].mean())) < 0.5
    assert 0.7 < float(scores[10:].std()) < 1.4
    taught = teach(change, updates[60:100], 1 / 10)
    assert taught.auroc == 1.0
    assert float(scores[:10].min()) > taught.threshold > float(scores[10:].max())


def test_scores_do_not_depend_on_the_servers_learning_rate_or_on_what_all_have_in_common() -> None:
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(20, 300, generator=generator).double() + 1
    change = updates[:4].mean(0)
    scores = participation_scores(change, updates[:8], updates[8:])
    torch.testing.assert_close(participation_scores(0.1 * change, updates[:8], updates[8:]), scores)
    torch.testing.assert_close(participation_scores(change, 5 * updates[:8], updates[8:]), scores)


def test_a_change_of_nothing_tells_nothing() -> None:
    updates = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    assert participation_scores(torch.zeros(30), updates[:3], updates[3:]).tolist() == [0.0, 0.0, 0.0]
    assert teach(torch.zeros(30), updates, 0.0).auroc == 0.5


def test_who_took_part_is_found_and_the_run_is_the_same(tmp_path: Path) -> None:
    callback = ClientMembershipCallback(["other_client", "sums"], every=2, folder=str(tmp_path))
    found = attacked(callback)
    plain = method()
    fit(plain, data(), 4)
    assert largest_difference(weights(found), weights(plain)) == 0.0
    for view in ("other_client", "sums"):
        row = found_by(callback, view, "round")
        assert row["auroc_low"] > 0.9
        assert row["accuracy"] > 0.85
        assert (row["inside"], row["outside"]) == (20.0, 28.0)
        assert row["tpr_at_1"] != row["tpr_at_1"]  # NaN: 28 cannot tell 1%
        assert found_by(callback, view, "training")["auroc"] > 0.9
    assert sorted(callback.reports) == [2, 4]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"client_membership.pt", "client_membership_sums.png", "attack_client_membership.md"} <= names


def test_behind_secure_aggregation_the_sums_are_attacked(tmp_path: Path) -> None:
    callback = ClientMembershipCallback(folder=str(tmp_path))
    found = method()
    fit(found, data(), 4, callbacks=[callback, SecureAggregationCallback()])
    assert found_by(callback, "sums", "round")["auroc"] > 0.9


def test_what_learnt_nothing_gives_chance(tmp_path: Path) -> None:
    """Updates drown in noise, or there are none."""
    for options in ({"lr": 1e-12}, {}):
        callback = ClientMembershipCallback(folder=str(tmp_path))
        noisy = DifferentialPrivacyCallback(clip=1e-3, noise_multiplier=1e4)
        attacked(callback, *([] if options else [noisy]), **options)
        row = found_by(callback, "other_client", "round")
        if not options:
            assert row["auroc_low"] <= 0.5 <= row["auroc_high"]
        else:  # the smallest step is a step
            assert row["auroc"] > 0.4


@pytest.mark.slow
def test_noise_and_secret_poisson_cohorts_hide_who_took_part(tmp_path: Path) -> None:
    found = []
    for noise_multiplier in (0.0, 100.0):
        callback = ClientMembershipCallback(folder=str(tmp_path))
        defence = DifferentialPrivacyCallback(clip=1.0, noise_multiplier=noise_multiplier)
        secret = data(fraction=0.5, sampling="poisson", secret_cohorts=True)
        fit(method(weighting="uniform"), secret, 4, callbacks=[defence, callback])
        found.append(found_by(callback, "other_client", "round")["auroc"])
    assert found[0] > 0.9
    assert found[1] < 0.75


def test_where_everybody_takes_part_strangers_are_the_null(tmp_path: Path) -> None:
    callback = ClientMembershipCallback(folder=str(tmp_path))
    fit(method(), data(fraction=1.0), 2, callbacks=[callback])
    assert callback.report is not None
    assert {row["variant"] for row in callback.report.rows} == {"training"}
    assert found_by(callback, "other_client", "training")["auroc"] > 0.8


@pytest.mark.slow
def test_a_resumed_run_reports_the_same(tmp_path: Path) -> None:
    whole, first, second = (ClientMembershipCallback(folder=str(tmp_path)) for _ in range(3))
    fit(method(), data(), 4, callbacks=[whole])
    fit(method(), data(), 2, callbacks=[first]).save_checkpoint(tmp_path / "run.ckpt")
    fit(method(), data(), 4, ckpt_path=str(tmp_path / "run.ckpt"), callbacks=[second])
    assert whole.report is not None
    assert second.report is not None
    assert second.report.markdown() == whole.report.markdown()


def test_after_a_test_rounds_are_made_up(tmp_path: Path) -> None:
    fit(method(), data(), 2).save_checkpoint(tmp_path / "run.ckpt")
    before = (tmp_path / "run.ckpt").read_bytes()
    callback = ClientMembershipCallback(["other_client", "sums"], folder=str(tmp_path))
    again = method()
    trainer(callbacks=[callback]).test(again, datamodule=data(), ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)
    assert found_by(callback, "sums", "round")["auroc"] > 0.9
    assert (tmp_path / "run.ckpt").read_bytes() == before
    assert again.completed_rounds == 2


@pytest.mark.parametrize("kind", [SCAFFOLD, FedPer, FedCluster, Local])
def test_other_methods(kind: type[FederatedModule], tmp_path: Path) -> None:
    """Private entries and control variates are assumed to be as at first; several stages add up."""
    callback = ClientMembershipCallback(["other_client", "sums"], folder=str(tmp_path))
    fit(method(kind), data(), 3, callbacks=[callback])
    assert callback.report is not None
    if kind is Local:
        assert callback.report is None or callback.report.rows == []
    else:
        assert callback.report.rows


def test_bad_settings_and_methods_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="has no view server, as it sees who sends a message"):
        ClientMembershipCallback(["server"])
    with pytest.raises(FederationError, match="references must be 3 or more, not 2"):
        ClientMembershipCallback(references=2)
    with pytest.raises(FederationError, match="Clients of IFCA receive several models"):
        fit(method(IFCA, clusters=2), data(), 1, callbacks=[ClientMembershipCallback(folder=str(tmp_path))])
    assert issubclass(ClientMembershipCallback, FederatedCallback)
