"""Property inference: by hand on tensors, on clients whose classes are known, and on clients that are all alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning.callbacks import PropertyInferenceCallback, SecureAggregationCallback
from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedPer, Local
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.properties import draw_clients, infer_property
from tests.support import CLASSES, FEATURES, fit, largest_difference, mlp, trainer, weights
from tests.support.privacy import noise


def data(clients: int = 24, **kwargs: Any) -> TensorFederation:
    """Gaussian classes in shares that differ from client to client; most rows are nobody's."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (4000,), generator=generator)
    x = centres[y] + torch.randn(4000, FEATURES, generator=generator)
    rng = np.random.default_rng(0)
    free = [torch.nonzero(y == c).flatten().tolist() for c in range(CLASSES)]
    rows = []
    for _ in range(clients):
        counts = rng.multinomial(50, rng.dirichlet([0.5] * CLASSES))
        own = sum(([rest.pop() for _ in range(n)] for rest, n in zip(free, counts, strict=True)), list[int]())
        rows.append(rng.permutation(own).tolist())
    parts = {"train": [own[:40] for own in rows], "test": [own[40:] for own in rows]}
    return TensorFederation(x, y, num_classes=CLASSES, **parts, **{"val_fraction": 0.0, **kwargs})


def method(kind: type[FederatedModule] = FedAvg, **options: Any) -> FederatedModule:
    return kind(mlp(), engine="stacked", **{"lr": 0.05, "batch_size": 10, **options})


def strongest(callback: PropertyInferenceCallback, view: str) -> dict[str, Any]:
    assert callback.report is not None
    best = callback.report.strongest(view=view)
    assert best is not None
    return best


def test_updates_that_differ_in_one_entry_are_told_apart() -> None:
    """By hand: the shadows' means are 1 and -1 in the first entry, and nothing else differs."""
    generator = torch.Generator().manual_seed(0)

    def updates(number: int, first: float) -> Tensor:
        found = torch.randn(number, 30, generator=generator)
        found[:, 0] = first + 0.1 * found[:, 0]
        return found

    targets = torch.cat((updates(20, 1.0), updates(20, -1.0)))
    for name, one in infer_property(updates(20, 1.0), updates(20, -1.0), targets).items():
        assert bool((one.scores[:20] >= one.line).all()), name
        assert bool((one.scores[20:] < one.line).all()), name
        assert one.shadow_auroc == 1.0
    for one in infer_property(updates(20, 0.0), updates(20, 0.0), targets).values():
        assert one.shadow_auroc < 0.8


def test_clients_are_drawn_with_and_without_the_property() -> None:
    labels = torch.arange(4).repeat_interleave(100)
    holds = lambda own: bool((own == 2).double().mean() >= 0.5)  # noqa: E731
    with_it, without = draw_clients(labels, 4, holds, 10, 50, np.random.default_rng(0))
    assert [holds(labels[rows]) for rows in with_it + without] == [True] * 10 + [False] * 10
    assert all(len(torch.unique(rows)) == len(rows) <= 50 for rows in with_it)
    with pytest.raises(FederationError, match="0 have the property and 10 have not, and 10 of either kind"):
        draw_clients(labels, 4, lambda own: False, 10, 50, np.random.default_rng(0))


def test_class_shares_show_in_updates_and_the_run_is_the_same(tmp_path: Path) -> None:
    callback = PropertyInferenceCallback(["outsider", "server", "colluding"], 1, every=1, folder=str(tmp_path))
    found, plain = method(), method()
    fit(found, data(), 2, callbacks=[callback])
    fit(plain, data(), 2)
    assert largest_difference(weights(found), weights(plain)) == 0.0
    for view in ("server", "colluding"):
        best = strongest(callback, view)
        assert best["auroc_low"] > 0.8, view
        assert best["accuracy_low"] > 0.55
        assert best["shadow_auroc"] > 0.8
    assert callback.report is not None
    assert callback.report.floor()["majority"] == 0.5
    assert "of the samples are of class 1" in callback.report.markdown()
    first = callback.reports[1]  # the outsider has the model that clients began with
    assert first.mean(first.select(view="outsider")) == first.mean(first.select(view="server"))
    assert {"property.pt", "property_server.png"} <= {path.name for path in tmp_path.iterdir()}


def test_what_learnt_nothing_gives_chance(tmp_path: Path) -> None:
    """Labels have nothing to do with a property that is drawn by lot, and clients of noise are all alike."""
    lots = torch.Generator().manual_seed(0)
    known: dict[tuple[int, ...], bool] = {}

    def by_lot(labels: Tensor) -> bool:
        key = tuple(labels.tolist())
        return known.setdefault(key, bool(torch.rand((), generator=lots) < 0.5))

    callback = PropertyInferenceCallback(holds=by_lot, folder=str(tmp_path))
    fit(FedAvg(mlp(), lr=0.05, engine="stacked"), noise(4000, 20), 1, callbacks=[callback])
    best = strongest(callback, "server")
    assert best["auroc_low"] <= 0.5 <= best["auroc_high"]
    assert best["accuracy_low"] <= 0.5 <= best["accuracy_high"]


def test_groups_of_clients_are_told_by_acquaintances(tmp_path: Path) -> None:
    """Clients of one group have the labels of others turned round."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (20 * 60,), generator=generator)
    x = torch.randn(20 * 60, FEATURES, generator=generator) + 2 * y[:, None]
    owner = torch.arange(20 * 60) // 60
    turned = torch.where(owner % 2 == 1, 1 - y, y)
    rows = [list(range(60 * k, 60 * (k + 1))) for k in range(20)]
    given = TensorFederation(
        x,
        turned,
        train=[own[:30] for own in rows],
        test=[own[30:] for own in rows],
        num_classes=CLASSES,
        val_fraction=0.0,
        meta={"mode": ["odd" if k % 2 else "even" for k in range(20)]},
    )
    callback = PropertyInferenceCallback(value="odd", folder=str(tmp_path))
    fit(method(), given, 2, callbacks=[callback])
    assert strongest(callback, "server")["auroc"] == 1.0
    assert callback.scored[0]["clients"] == [k for k in range(20) if k % 4 in (2, 3)]


def test_behind_secure_aggregation_colluding_clients_are_needed(tmp_path: Path) -> None:
    for views, seen in ((["server"], []), (["server", "colluding"], ["colluding"])):
        callback = PropertyInferenceCallback(views, 1, folder=str(tmp_path))
        fit(method(), data(), 1, callbacks=[callback, SecureAggregationCallback()])
        assert callback.report is not None
        assert callback.report.views() == seen


@pytest.mark.slow
def test_a_resumed_run_reports_the_same(tmp_path: Path) -> None:
    whole, first, second = (PropertyInferenceCallback(label=1, folder=str(tmp_path)) for _ in range(3))
    fit(method(), data(), 3, callbacks=[whole])
    fit(method(), data(), 2, callbacks=[first]).save_checkpoint(tmp_path / "run.ckpt")
    fit(method(), data(), 3, ckpt_path=str(tmp_path / "run.ckpt"), callbacks=[second])
    assert whole.report is not None
    assert second.report is not None
    assert second.report.rows == whole.report.rows


def test_after_a_test(tmp_path: Path) -> None:
    fit(method(), data(), 1).save_checkpoint(tmp_path / "run.ckpt")
    callback = PropertyInferenceCallback(label=1, folder=str(tmp_path))
    trainer(callbacks=[callback]).test(method(), datamodule=data(), ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)
    assert strongest(callback, "server")["auroc"] > 0.8


@pytest.mark.parametrize("kind", [FedPer, Local])
def test_other_methods(kind: type[FederatedModule], tmp_path: Path) -> None:
    callback = PropertyInferenceCallback(label=1, folder=str(tmp_path))
    fit(method(kind), data(), 1, callbacks=[callback])
    assert callback.report is not None
    assert bool(callback.report.rows) is (kind is FedPer)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="has no view sums, as it sees no update of a single client"):
        PropertyInferenceCallback(["sums"])
    with pytest.raises(FederationError, match="share must be greater than 0 and at most 1, not 2"):
        PropertyInferenceCallback(share=2)
    with pytest.raises(FederationError, match="either holds or value"):
        PropertyInferenceCallback(holds=bool, value="odd")
    for options, words in (
        ({"value": "odd"}, "No group of clients by 'mode' is 'odd': there are none"),
        ({"share": 0.999}, "0 of 24 attacked clients have the property|0 have the property"),
    ):
        with pytest.raises(FederationError, match=words):
            fit(method(), data(), 1, callbacks=[PropertyInferenceCallback(folder=str(tmp_path), **options)])
