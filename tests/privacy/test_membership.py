"""Membership inference: chance where there is nothing to find, found out where there is, and agreement with others."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from fl_lightning.callbacks import MembershipInferenceCallback
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedPer, Local, WAFFLe
from fl_lightning.metrics import auroc_interval, membership_summary
from fl_lightning.module import FederatedModule
from fl_lightning.privacy import Report, attack_data, infer_membership, intercept, make_views, train_shadows
from fl_lightning.privacy.data import deal_shadows
from fl_lightning.privacy.inference import Answers, Teacher, answers
from tests.support import fit, largest_difference, trainer, weights
from tests.support.privacy import CLIENTS, net, noise

RECIPE: dict[str, Any] = {"lr": 0.2, "epochs": 8, "batch_size": 10, "engine": "stacked"}
ROUNDS = 3


@cache
def attacked() -> tuple[FedAvg, MembershipInferenceCallback, Report]:
    """A target that knows its clients' samples by heart, and the attack on it."""
    callback, method = MembershipInferenceCallback(), FedAvg(net(), **RECIPE)
    fit(method, noise(), ROUNDS, callbacks=[callback])
    assert callback.report is not None
    return method, callback, callback.report


@pytest.mark.slow
def test_an_overfitted_target_is_found_out() -> None:
    _, _, report = attacked()
    assert report.views() == ["outsider", "server", "other_client", "insider"]
    for variant in ("shadow", "loss", "lira", "rmia"):
        scores = report.mean(report.select(view="outsider", variant=variant))
        assert scores["accuracy"] > 0.7, variant
        assert scores["shadow_auroc"] > 0.8
        assert scores["auroc_low"] < scores["auroc"] < scores["auroc_high"]
        assert scores["f1"] > 0.7
        assert scores["auroc"] > 0.8
        assert scores["best_accuracy"] >= scores["accuracy"] - 1e-9
        assert np.isnan(scores["tpr_at_01"])  # of a hundred samples 0.1% is none
    assert {row["client"] for row in report.rows} == set(range(CLIENTS))
    metrics = attacked()[1].run_metrics()
    plain = report.mean(report.select(view="outsider", assumption="seen", variant="shadow"))
    assert metrics["mia_accuracy"] == pytest.approx(100 * plain["accuracy"])
    ways = [way for way in report.ways() if way["view"] != "insider"]
    picked = max((report.mean(report.select(**way)) for way in ways), key=lambda one: one["shadow_auroc"])
    assert metrics["mia_auroc/strongest"] == pytest.approx(100 * picked["auroc"])  # chosen on shadows
    best = report.strongest(view="server")
    assert best is not None
    assert best["shadow_auroc"] == max(row["shadow_auroc"] for row in report.select(view="server"))


def test_the_global_model_of_a_federation_is_one_shadow() -> None:
    """In the view of another client the models of shadow federations differ, and lira has something to compare."""
    _, _, report = attacked()
    scores = report.mean(report.select(view="other_client", variant="lira"))
    assert scores["auroc"] > 0.6
    assert 0.5 < scores["accuracy"] < 1


@pytest.mark.slow
def test_online_attacks_and_raw_scores(tmp_path: Path) -> None:
    callback = MembershipInferenceCallback(["outsider"], online=True, clients=2, folder=str(tmp_path))
    fit(FedAvg(net(), **RECIPE), noise(), ROUNDS, callbacks=[callback])
    assert callback.report is not None
    for variant in ("lira_online", "rmia_online"):
        assert callback.report.mean(callback.report.select(variant=variant))["auroc"] > 0.8
    raw = torch.load(tmp_path / "membership.pt", weights_only=True)
    (row,) = callback.report.select(variant="loss", client=raw[0]["client"])
    (kept,) = (one for one in raw if one["variant"] == "loss" and one["client"] == raw[0]["client"])
    assert float(membership_summary(kept["scores"], kept["members"])["auroc"]) == pytest.approx(row["auroc"])
    assert (tmp_path / "membership_outsider.png").exists()
    assert "![membership/outsider](membership_outsider.png)" in (tmp_path / "attack_membership.md").read_text()


@pytest.mark.slow
def test_an_untrained_target_gives_chance() -> None:
    """The shadows are as well trained as ever; the target has seen nothing."""
    target, data = FedAvg(net(seed=1), **{**RECIPE, "lr": 0.0}), noise()
    run = fit(target, data, 1)
    rows = attack_data(data.federation, range(CLIENTS), 0, shadow_clients=CLIENTS)
    dealt = deal_shadows(rows.pool, 4, CLIENTS, 100, seed=0)
    shadows = train_shadows(FedAvg(net(), **RECIPE), data.federation, dealt, ROUNDS, run)
    found, raw = infer_membership(intercept(target, range(CLIENTS)), shadows, rows, make_views(["outsider"]))
    report = Report("membership", "FedAvg", 1, found, "auroc")
    for variant in ("shadow", "loss", "lira", "rmia"):
        scores = report.mean(report.select(variant=variant))
        assert abs(scores["accuracy"] - 0.5) < 0.05, variant
        joined = [one.result for one in raw if one.how["variant"] == variant]
        flags = torch.cat([one.members for one in joined])
        low, high = auroc_interval(torch.cat([one.scores for one in joined]), flags)
        assert low <= 0.5 <= high, variant


def drawn(shift: Tensor, generator: torch.Generator) -> Answers:
    """Answers of a model whose log odds are shifted for some samples."""
    confidence = torch.randn(shift.shape, generator=generator).double() + shift
    p = torch.sigmoid(confidence)[..., None]
    return Answers(torch.cat((p, 1 - p, p, -p.log()), -1), -p.log()[..., 0], confidence)


@pytest.mark.parametrize("shuffled", [False, True])
def test_shuffled_labels_give_chance(shuffled: bool) -> None:
    """An attack taught with shuffled memberships learns nothing, and scores mean nothing for shuffled members."""
    generator = torch.Generator().manual_seed(0)
    inside = torch.rand(4, 1000, generator=generator) < 0.5
    known = drawn(3.0 * inside, generator)
    told = torch.rand(4, 1000, generator=generator) < 0.5 if shuffled else inside
    others = drawn(torch.zeros(4, 200), generator).loss.neg().exp()
    teacher = Teacher(known, told, ~told, torch.arange(4), others, seed=0)
    members = torch.arange(1000) < 500
    target, nobody = drawn(3.0 * members, generator), torch.zeros(4, 1000, dtype=torch.bool)
    references, mine = drawn(torch.zeros(4, 1000), generator), drawn(torch.zeros(200), generator).loss.neg().exp()
    found = teacher.infer(target, references, nobody, ~nobody, mine, members)
    assert set(found) == {"shadow", "loss", "lira", "rmia"}
    if shuffled:
        assert all(abs(result.shadow_auroc - 0.5) < 0.06 for result in found.values())
        return
    assert float(membership_summary(found["shadow"].scores, members)["accuracy"]) > 0.9
    elsewhere = members[torch.randperm(1000, generator=generator)]
    for name, result in found.items():
        assert result.shadow_auroc > 0.9, name
        assert float(membership_summary(result.scores, members, result.threshold)["accuracy"]) > 0.85, name
        assert float(membership_summary(result.scores, elsewhere)["auroc"]) == pytest.approx(0.5, abs=0.05)


def test_members_are_told_by_data_the_attack_never_saw() -> None:
    method, callback, _ = attacked()
    assert callback.data is not None
    used = torch.cat([callback.data.pool, callback.data.reference])
    judged = torch.cat([*callback.data.members.values(), *callback.data.nonmembers.values()])
    assert not set(used.tolist()) & set(judged.tolist())
    assert not set(used.tolist()) & set(method.federation.train.flat.tolist())


@pytest.mark.parametrize("kind", [FedAvg, WAFFLe])
def test_with_and_without_attacks_the_weights_are_the_same(kind: type[FederatedModule]) -> None:
    options: dict[str, Any] = {"lr": 0.1, "epochs": 2, "engine": "stacked"} | (
        {"factors": {"fc1": 8}} if kind is WAFFLe else {}
    )

    def run(*callbacks: Any) -> FederatedModule:
        method = kind(net(16), **options)
        torch.manual_seed(3)
        fit(method, noise(fraction=0.5), 3, callbacks=list(callbacks))
        method.drawn = torch.rand(3)  # type: ignore[assignment]
        return method

    plain = run()
    attacked = run(MembershipInferenceCallback(["outsider", "other_client"], every=2, samples=40, shadows=1, clients=2))
    assert largest_difference(weights(plain), weights(attacked)) == 0.0
    for client in plain.snapshots:
        mine, theirs = plain.snapshots[client].private, attacked.snapshots[client].private
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert torch.equal(plain.drawn, attacked.drawn)  # type: ignore[arg-type]


def test_every_so_many_rounds_and_the_files(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = MembershipInferenceCallback(["outsider"], shadows=1, samples=50, every=2, clients=2)
    method = FedAvg(net(16), lr=0.1, engine="stacked")
    fit(method, noise(), 5, callbacks=[callback], logger=logger)
    assert list(callback.reports) == [2, 4, 5]
    written = json.loads((Path(logger.log_dir) / "attack_membership.json").read_text())
    assert [one["round"] for one in written] == [2, 4, 5]
    assert written[0]["threat_models"] == {"outsider": "one intercepted up message of the client"}
    assert {row["view"] for row in written[0]["rows"]} == {"outsider"}
    assert len({row["client"] for row in written[0]["rows"]}) == 2
    assert {row["variant"] for row in written[0]["rows"]} == {"shadow", "loss"}  # lira needs three shadows
    page = (Path(logger.log_dir) / "attack_membership.md").read_text()
    assert "**outsider** sees one intercepted up message" in page
    logged = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert "membership/outsider/auroc" in logged


def test_after_a_test_and_by_group(tmp_path: Path) -> None:
    data = noise()
    federation = data.federation
    object.__setattr__(federation, "meta", {"mode": [0, 0, 0, 1]})
    method = FedAvg(net(16), lr=0.1, engine="stacked")
    fit(method, data, 2).save_checkpoint(tmp_path / "run.ckpt")
    before, method = weights(method), FedAvg(net(16), lr=0.1, engine="stacked")
    callback = MembershipInferenceCallback(["outsider", "insider"], samples=50, shadows=2, folder=str(tmp_path))
    tester = trainer(callbacks=[callback], default_root_dir=tmp_path)
    tester.test(method, datamodule=data, ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)
    assert callback.report is not None
    assert {row["group"] for row in callback.report.rows} == {"majority", "minority"}
    assert "by group of clients" in (tmp_path / "attack_membership.md").read_text()
    assert largest_difference(before, weights(method)) == 0.0


def test_shadows_begin_as_the_run_did_and_know_nothing_of_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever model the module holds when it is tested."""
    data, begun = noise(), []

    def shadows(method: FederatedModule, *args: Any) -> Any:
        begun.append((weights(method), list(method.snapshots)))
        return train_shadows(method, *args)

    monkeypatch.setattr("fl_lightning.callbacks.membership.train_shadows", shadows)
    callback = MembershipInferenceCallback(["outsider"], samples=40, shadows=1, clients=1)
    method = FedPer(net(16).double(), lr=0.1, engine="stacked")
    start = weights(method)
    run = fit(method, data, 1, callbacks=[callback])
    run.save_checkpoint(tmp_path / "one.ckpt")
    fit(method, data, 2, str(tmp_path / "one.ckpt"), callbacks=[callback])
    test = trainer(callbacks=[callback], default_root_dir=tmp_path).test
    test(method, datamodule=data, ckpt_path=str(tmp_path / "one.ckpt"), verbose=False)
    test(method, datamodule=data, verbose=False)
    between = weights(method)
    fit(method, data, 1, callbacks=[callback])  # another run, from there on
    assert len(begun) == 5
    assert max(largest_difference(begun[number][0], start) for number in range(4)) == 0.0
    assert largest_difference(begun[4][0], between) == 0.0
    assert all(known == [] for _, known in begun)

    blind = trainer(callbacks=[MembershipInferenceCallback(["outsider"], samples=40, shadows=1)]).test
    with pytest.raises(FederationError, match=r"initial weights of the run are unknown.*shadow_start='current'"):
        blind(method, datamodule=data, verbose=False)


def test_every_test_is_attacked(tmp_path: Path) -> None:
    """Two runs of as many rounds, one after the other."""
    data, reports = noise(), []
    callback = MembershipInferenceCallback(["outsider"], samples=40, shadows=1, clients=2, folder=str(tmp_path))
    for seed in (0, 1):
        method = FedAvg(net(16), lr=0.1, engine="stacked", seed=seed)
        fit(method, data, 1).save_checkpoint(tmp_path / f"{seed}.ckpt")
        fresh = FedAvg(net(16), lr=0.1, engine="stacked", seed=seed)
        tester = trainer(callbacks=[callback], default_root_dir=tmp_path)
        tester.test(fresh, datamodule=data, ckpt_path=str(tmp_path / f"{seed}.ckpt"), verbose=False)
        reports.append(callback.report)
    assert reports[0] is not reports[1]
    assert reports[0].rows != reports[1].rows  # type: ignore[union-attr]


def test_nothing_that_crosses_nothing_to_attack() -> None:
    callback = MembershipInferenceCallback(samples=40, shadows=2)
    fit(Local(net(16), lr=0.1, engine="stacked"), noise(), 1, callbacks=[callback])
    assert callback.report is not None
    assert callback.report.views() == ["insider"]
    assert not any(name.startswith("mia_auroc/outsider") for name in callback.run_metrics())


@pytest.mark.parametrize(("start", "together"), [("current", True), ("initial", False)])
def test_other_shadows(start: Any, together: bool) -> None:
    callback = MembershipInferenceCallback(
        ["outsider"], shadow_start=start, shadows_together=together, samples=40, shadows=2
    )
    method = FedAvg(net(16), **RECIPE)
    fit(method, noise(), 2, callbacks=[callback])
    assert callback.report is not None
    assert callback.report.mean(callback.report.select(variant="loss"))["auroc"] > 0.6


def test_bad_settings_are_refused() -> None:
    for options, sentence in (
        ({"shadows": 0}, "shadows must be 1 or more, not 0"),
        ({"every": 0}, "every must be 1 or more, not 0"),
        ({"views": []}, "There is no view none"),
        ({"shadow_start": "later"}, "shadow_start must be initial or current"),
    ):
        with pytest.raises(FederationError, match=sentence):
            MembershipInferenceCallback(**options)  # type: ignore[arg-type]


def test_scores_agree_with_the_adversarial_robustness_toolbox() -> None:
    """The toolbox's black-box attack, taught by the same shadows' losses, on the same target: the same within noise."""
    pytest.importorskip("art", reason="adversarial-robustness-toolbox is not installed: pip install '.[oracle]'")
    from art.attacks.inference.membership_inference import MembershipInferenceBlackBox
    from art.estimators.classification import PyTorchClassifier

    method, callback, report = attacked()
    data, federation = callback.data, method.federation
    assert data is not None
    dealt = deal_shadows(data.pool, 1, CLIENTS, 100, method.seed)
    shadow = train_shadows(callback._initial, federation, dealt, ROUNDS, method.trainer)[0]  # type: ignore[arg-type]
    rest = torch.tensor(sorted(set(data.pool.tolist()) - set(shadow.touched.tolist())))[: len(shadow.inside)]
    run = intercept(method, [0])

    def estimator(state: dict[str, torch.Tensor]) -> Any:
        model = net().double()
        model.load_state_dict(state)
        return PyTorchClassifier(model.float(), torch.nn.CrossEntropyLoss(), (20,), 4)

    def samples(rows: torch.Tensor) -> tuple[Any, Any]:
        return federation.inputs[rows].numpy().astype(np.float32), federation.targets[rows].numpy()

    teacher = estimator(shadow.run.wire.sent[shadow.client][-1])
    attack = MembershipInferenceBlackBox(teacher, input_type="loss", attack_model_type="lr")
    attack.fit(*samples(shadow.inside), *samples(rest))
    attack._estimator = estimator(run.wire.sent[0][-1])
    called = [attack.infer(*samples(rows)).ravel() for rows in (data.members[0], data.nonmembers[0])]
    theirs = (called[0].mean() + 1 - called[1].mean()) / 2
    (ours,) = (row["accuracy"] for row in report.select(view="outsider", variant="loss", client=0))
    assert theirs == pytest.approx(ours, abs=0.1)
    probabilities = answers(method, [run.wire.sent[0][-1]], federation, data.members[0])
    torch.testing.assert_close(
        torch.from_numpy(np.exp(-probabilities.loss.numpy())).float(),
        torch.softmax(torch.from_numpy(attack.estimator.predict(samples(data.members[0])[0])), 1)
        .gather(1, federation.targets[data.members[0]][:, None])[:, 0]
        .float(),
        rtol=1e-3,
        atol=1e-5,
    )


def test_a_resumed_run_has_heard_what_the_first_part_heard(tmp_path: Path) -> None:
    def run(rounds: int, path: str | None = None) -> tuple[Any, MembershipInferenceCallback]:
        callback = MembershipInferenceCallback(["server"], samples=40, shadows=1, memory=9)
        method = FedAvg(net(16), lr=0.1, engine="stacked")
        done = fit(method, noise(fraction=0.25), rounds, path, callbacks=[callback], precision="32-true")
        return done, callback

    part, _ = run(2)
    part.save_checkpoint(tmp_path / "part.ckpt")
    _, resumed = run(4, str(tmp_path / "part.ckpt"))
    _, whole = run(4)
    assert resumed.report is not None
    assert whole.report is not None
    assert str(resumed.report.rows) == str(whole.report.rows)  # NaN equals itself in words
