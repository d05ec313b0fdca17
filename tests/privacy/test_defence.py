"""Differential privacy: bounded updates, noise of the size that the accountant is told, epsilon by round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from fl_lightning.callbacks import DifferentialPrivacyCallback
from fl_lightning.callbacks.defence import _seen
from fl_lightning.errors import FederationError
from fl_lightning.methods import QFFL, SCAFFOLD, FedAvg, FedGroup, FedPer, WAFFLe, WeightErosion
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.accounting import Release
from fl_lightning.privacy.defence import central_std, change, clipped, epsilon, norm, split_noise
from fl_lightning.wire import Message, State, message_weights, weighted_mean
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, trainer, weights


class Watch(DifferentialPrivacyCallback):
    """Keeps every round's messages as they are aggregated, with what their clients received."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[State, State]] = []
        self.crossed: list[State] = []

    def on_message_up(self, trainer: Any, pl_module: Any, client: int, message: Message) -> None:
        self.crossed.append(dict(message.tensors))

    def on_before_aggregate(self, trainer: Any, pl_module: Any, messages: list[Message]) -> None:
        super().on_before_aggregate(trainer, pl_module, messages)
        # Copied: what goes down shares memory with the server's model, which is about to step.
        received = {c: {n: v.clone() for n, v in message.items()} for c, message in self._received.items()}
        self.seen += [(dict(m.tensors), received[m.client]) for m in messages]


METHODS: list[tuple[type[FederatedModule], dict[str, Any]]] = [
    (FedAvg, {}),
    (FedPer, {}),
    (SCAFFOLD, {}),
    (WAFFLe, {"factors": {"fc1": 5}, "epochs": 2}),
]


@pytest.mark.parametrize("where", ["central", "local"])
@pytest.mark.parametrize(("kind", "options"), METHODS, ids=[kind.__name__ for kind, _ in METHODS])
def test_clipping_bounds_every_update(kind: type[FederatedModule], options: dict[str, Any], where: Any) -> None:
    watch = Watch(clip=0.05, noise_multiplier=0.0, where=where)
    fit(kind(mlp(), lr=0.5, engine="stacked", **options), blobs(), 2, callbacks=[watch])
    norms = [norm(change(sent, received)) for sent, received in watch.seen]
    assert len(norms) == 8
    assert max(norms) <= 0.05 * (1 + 1e-9)
    assert max(norms) > 0.05 * (1 - 1e-6)  # it had something to clip
    assert watch.epsilon() == math.inf


def test_a_bound_that_nothing_reaches_changes_nothing() -> None:
    plain, bounded = FedAvg(mlp(), lr=0.1, engine="stacked"), FedAvg(mlp(), lr=0.1, engine="stacked")
    fit(plain, blobs(), 2)
    fit(bounded, blobs(), 2, callbacks=[DifferentialPrivacyCallback(clip=1e9, noise_multiplier=0.0)])
    assert largest_difference(weights(plain), weights(bounded)) == 0.0


def test_integer_entries_stay_and_others_point_the_same_way() -> None:
    sent = {"w": torch.tensor([3.0, 4.0]), "count": torch.tensor(7), "extra": torch.tensor([12.0])}
    out = clipped(sent, {"w": torch.zeros(2), "count": torch.tensor(5)}, 1.3)
    assert int(out["count"]) == 7
    torch.testing.assert_close(out["w"], torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(out["extra"], torch.tensor([1.2]))


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_central_noise_is_what_the_accountant_is_told(weighting: Any) -> None:
    """The mean's noise has the standard deviation noise_multiplier * clip * (largest weight)."""
    quiet, loud = (FedAvg(mlp(hidden=(400,)), lr=0.1, engine="stacked", weighting=weighting) for _ in range(2))
    fit(quiet, blobs(), 1, callbacks=[DifferentialPrivacyCallback(0.5, 0.0)])
    defence = DifferentialPrivacyCallback(0.5, 3.0)
    fit(loud, blobs(), 1, callbacks=[defence])
    difference = torch.cat([(weights(loud)[n] - v).flatten() for n, v in weights(quiet).items()])
    sizes = blobs().federation.train.sizes
    largest = 0.25 if weighting == "uniform" else float(sizes.max() / sizes.sum())
    assert len(difference) > 10_000
    assert float(difference.std()) == pytest.approx(3.0 * 0.5 * largest, rel=0.03)
    assert abs(float(difference.mean())) < 0.02
    assert defence.epsilon() == pytest.approx(epsilon([Release("gaussian", 3.0, 1.0, 1)], 1 / 40))


def test_local_noise_is_on_the_wire_and_central_noise_is_not() -> None:
    noise: dict[str, float] = {}
    for where in ("local", "central"):
        plain, watch = Watch(0.5, 0.0, where=where), Watch(0.5, 2.0, where=where)  # type: ignore[arg-type]
        for callback in (plain, watch):
            fit(FedAvg(mlp(hidden=(200,)), lr=0.1, engine="stacked"), blobs(), 1, callbacks=[callback])
        pairs = zip(watch.crossed, plain.crossed, strict=True)
        noise[where] = float(torch.cat([(a[n] - b[n]).flatten() for a, b in pairs for n in a]).std())
    assert noise["local"] == pytest.approx(2.0 * 0.5, rel=0.03)
    assert noise["central"] == 0.0


def most_rounds(method: FederatedModule) -> int:
    return max(method.snapshots[client].rounds for client in method.snapshots)


def test_epsilon_by_round_and_resumed(tmp_path: Path) -> None:
    def run(rounds: int, path: str | None = None) -> tuple[Any, DifferentialPrivacyCallback, FedAvg]:
        defence = DifferentialPrivacyCallback(1.0, 1.5, delta=1e-3, reproducible_noise=True)
        method = FedAvg(mlp(), lr=0.1, engine="stacked")
        done = fit(method, blobs(fraction=0.5), rounds, path, callbacks=[defence], precision="32-true")
        return done, defence, method

    part, defence, method = run(2)
    assert defence.epsilon() == pytest.approx(epsilon([Release("gaussian", 1.5, 1.0, most_rounds(method))], 1e-3))
    assert float(part.callback_metrics["privacy/epsilon"]) == pytest.approx(defence.epsilon())
    part.save_checkpoint(tmp_path / "part.ckpt")
    _, resumed, mine = run(4, str(tmp_path / "part.ckpt"))
    _, whole, theirs = run(4)
    assert resumed.rounds == whole.rounds
    assert resumed.epsilon() == pytest.approx(epsilon([Release("gaussian", 1.5, 1.0, most_rounds(mine))], 1e-3))
    assert resumed.epsilon() > defence.epsilon()
    assert largest_difference(weights(mine), weights(theirs)) == 0.0


def test_epsilon_of_the_client_that_took_part_most() -> None:
    defence, method = DifferentialPrivacyCallback(1.0, 4.0, "local", 1e-3), FedAvg(mlp(), lr=0.1, engine="stacked")
    fit(method, blobs(fraction=0.5), 3, callbacks=[defence])
    most = max(method.snapshots[client].rounds for client in method.snapshots)
    assert defence.epsilon() == pytest.approx(epsilon([Release("gaussian", 2.0, 1.0, most)], 1e-3))


def test_a_client_that_trains_several_models_releases_as_many() -> None:
    """Four clients, one message each in the round that all share, then four in each of two."""
    callback = DifferentialPrivacyCallback(clip=1.0, noise_multiplier=4.0, where="local")
    method = WeightErosion(mlp(), agent_of_interest="all", distance_penalty=0.0, engine="stacked")
    fit(method, blobs(), rounds=3, callbacks=[callback])
    assert callback.epsilon() == pytest.approx(epsilon([Release("gaussian", 2.0, 1.0, 9)], 1 / 40))


def test_accountant_against_the_gaussian_mechanism() -> None:
    """One release without sampling: Renyi divergence a / (2 z^2), turned into epsilon by hand, is an upper bound."""
    z, delta = 2.0, 1e-5
    orders = [1 + x / 10 for x in range(1, 1000)]
    best = min(a / (2 * z * z) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders)
    pytest.importorskip("opacus", reason="opacus is not installed: pip install '.[privacy]'")
    once = [Release("gaussian", z, 1.0, 1)]
    assert epsilon(once, delta, "rdp") == pytest.approx(best, rel=1e-2)
    assert epsilon(once, delta) < epsilon(once, delta, "rdp")
    sampled = [Release("poisson", z, 0.1, 10)]
    assert epsilon(sampled, delta) == pytest.approx(epsilon(sampled, delta, "prv"), abs=0.02)
    with pytest.raises(FederationError, match="The accountant rdp does not support cohorts of a fixed size: use pld"):
        epsilon([Release("fixed", z, 0.1, 10)], delta, "rdp")
    assert epsilon([], delta) == 0.0


def test_bad_settings_are_refused() -> None:
    for options, sentence in (
        ({"clip": 0.0}, "clip must be greater than 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be 0 or more"),
        ({"where": "cloud"}, "where must be central or local"),
        ({"delta": 2.0}, "delta must be greater than 0 and below 1"),
        ({"quantile": 0.5, "where": "local"}, "needs where='central'"),
        ({"accountant": "gdp"}, "accountant must be pld, rdp or prv"),
    ):
        with pytest.raises(FederationError, match=sentence):
            DifferentialPrivacyCallback(**options)  # type: ignore[arg-type]
    with pytest.raises(FederationError, match=r"server of QFFL does not take a mean.*where='local'"):
        fit(QFFL(mlp()), blobs(), 1, callbacks=[DifferentialPrivacyCallback()])
    with pytest.raises(FederationError, match="needs a federated method, not BoringModel"):
        trainer(callbacks=[DifferentialPrivacyCallback()], precision="32-true").fit(BoringModel())


@pytest.mark.parametrize(("kind", "fits"), [(FedGroup, 1), (FedAvg, 2)])
def test_noise_is_never_used_twice(kind: type[FederatedModule], fits: int) -> None:
    """Nor in two stages of a round, in which clients send twice, nor in two fits: else one takes it off the other.

    Clients that do not learn send what they received and the noise.
    """
    watch = Watch(1.0, 1.0, "local")
    method = kind(mlp(), lr=0.0, engine="stacked", **({"clusters": 2} if kind is FedGroup else {}))
    for _ in range(fits):
        fit(method, blobs(), 1, callbacks=[watch])
    noise = [change(sent, received) for sent, received in watch.seen]
    assert len(noise) == 8
    for first, second in zip(noise[:4], noise[4:], strict=True):
        assert min(float((first[n] - second[n]).abs().max()) for n in first) > 0.1


@pytest.mark.parametrize("where", ["central", "local"])
def test_earlier_fits_count(where: Any, tmp_path: Path) -> None:
    method, defence = FedAvg(mlp(), lr=0.1, engine="stacked"), DifferentialPrivacyCallback(1.0, 4.0, where, 1e-3)
    fit(method, blobs(), 2, callbacks=[defence])
    run = fit(method, blobs(), 3, callbacks=[defence])
    told = 4.0 if where == "central" else 2.0
    assert defence.epsilon() == pytest.approx(epsilon([Release("gaussian", told, 1.0, 5)], 1e-3))
    run.save_checkpoint(tmp_path / "run.ckpt")
    again = DifferentialPrivacyCallback(1.0, 4.0, where, 1e-3)
    fit(FedAvg(mlp(), lr=0.1, engine="stacked"), blobs(), 4, str(tmp_path / "run.ckpt"), callbacks=[again])
    assert again.epsilon() == pytest.approx(epsilon([Release("gaussian", told, 1.0, 6)], 1e-3))


def test_the_mean_moves_no_further_than_the_noise_is_for() -> None:
    """A client's clipped update against nothing in its place, for the worst of updates and weights."""
    opposite = [Message(0, {"w": torch.tensor([1.0])}, 30), Message(1, {"w": torch.tensor([-1.0])}, 10)]
    for weighting in ("uniform", "samples"):
        shares = message_weights(opposite, weighting)  # type: ignore[arg-type]
        whole = float(weighted_mean(opposite, shares, ["w"])["w"])
        for k in range(2):
            without = [Message(m.client, {"w": m.tensors["w"] * (m.client != k)}, m.samples) for m in opposite]
            moved = abs(float(weighted_mean(without, shares, ["w"])["w"]) - whole)
            std = central_std(2.0, 1.0, opposite, weighting) * math.hypot(*shares)  # type: ignore[arg-type]
            assert std >= 2.0 * moved - 1e-12


def test_losses_under_noise() -> None:
    """Noise makes losses of q-FFL's clients negative: they have no powers, and the run goes on."""
    method = QFFL(mlp(), q=0.5, lr=0.1, engine="stacked")
    fit(method, blobs(), 3, callbacks=[DifferentialPrivacyCallback(1.0, 1.0, "local")])
    assert all(bool(value.isfinite().all()) for value in weights(method).values())
    assert largest_difference(weights(method), dict(mlp().double().state_dict())) > 0


@pytest.mark.parametrize("where", ["central", "local"])
def test_variances_under_noise(where: Any) -> None:
    """Noise takes means of running variances below 0, of which there is no root."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    method = FedAvg(net, lr=0.1, engine="stacked")
    run = fit(method, blobs(), 3, callbacks=[DifferentialPrivacyCallback(1.0, 40.0, where, reproducible_noise=True)])
    assert float(weights(method)["1.running_var"].min()) == 0
    assert math.isfinite(run.callback_metrics["test/loss"])


def noise_of(seed: int, **kwargs: Any) -> torch.Tensor:
    """The noise of one round, as clients that do not learn send it."""
    watch = Watch(1.0, 1.0, "local", **kwargs)
    fit(FedAvg(mlp(), lr=0.0, engine="stacked", seed=seed), blobs(), 1, callbacks=[watch])
    return torch.cat([value.flatten() for sent, received in watch.seen for value in change(sent, received).values()])


def test_noise_cannot_be_told_from_the_seed() -> None:
    """Two runs with one seed share no noise, unless they are asked to, which warns."""
    one, other = noise_of(0), noise_of(0)
    assert float((one - other).abs().min()) > 0
    assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.1
    with pytest.warns(UserWarning, match="epsilon holds only against those who do not know it"):
        assert torch.equal(noise_of(0, reproducible_noise=True), noise_of(0, reproducible_noise=True))


def test_whether_noise_is_reproducible_stands_beside_epsilon() -> None:
    defence = DifferentialPrivacyCallback(reproducible_noise=True)
    run = fit(FedAvg(mlp(), lr=0.1, engine="stacked"), blobs(), 1, callbacks=[defence])
    assert float(run.callback_metrics["privacy/noise_reproducible"]) == 1.0
    assert defence.run_metrics()["noise_reproducible"] == 1.0
    assert "noise_reproducible" not in DifferentialPrivacyCallback().run_metrics()


@pytest.mark.parametrize(("sampling", "kind"), [("poisson", "poisson"), ("fixed", "fixed")])
def test_secret_cohorts_count_for_epsilon(sampling: Any, kind: Any) -> None:
    data = blobs((8,) * 20, fraction=0.25, sampling=sampling, secret_cohorts=True)
    defence = DifferentialPrivacyCallback(1.0, 3.0, delta=1e-3)
    method = FedAvg(mlp(), lr=0.1, engine="stacked", weighting="uniform")
    fit(method, data, 6, callbacks=[defence])
    assert [took[:2] for took in defence.rounds.values()] == [(kind, 0.25)] * 6
    told = epsilon([Release(kind, 3.0, 0.25, 6)], 1e-3)
    assert defence.epsilon() == pytest.approx(min(told, epsilon(_seen([*defence.rounds.values()], 3.0), 1e-3)))
    open_ = DifferentialPrivacyCallback(1.0, 3.0, delta=1e-3)
    fit(FedAvg(mlp(), lr=0.1, engine="stacked"), data, 2, callbacks=[open_])
    assert {took.kind for took in open_.rounds.values()} == {"gaussian"}  # weights by samples


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_the_mean_is_taken_over_the_expected_cohort(sampling: Any) -> None:
    """A drawn client moves the mean by its clipped update over q N, and the noise is z C / (q N), in every round."""
    data = blobs((8,) * 20, fraction=0.25, sampling=sampling, secret_cohorts=True, seed=1)
    data._key = b"0" * 32
    method = FedAvg(mlp(hidden=(200,)), lr=0.0, engine="stacked", weighting="uniform")
    before = {name: value.double() for name, value in mlp(hidden=(200,)).state_dict().items()}
    fit(method, data, 1, callbacks=[DifferentialPrivacyCallback(1.0, 2.0)])
    noise = torch.cat([(weights(method)[name] - before[name]).flatten() for name in before])
    assert float(noise.std()) == pytest.approx(2.0 / 5, rel=0.05)
    moved = FedAvg(mlp(), lr=0.1, engine="stacked", weighting="uniform")
    watch = Watch(0.01, 0.0)
    fit(moved, data, 1, callbacks=[watch])
    drawn = data.drawn(0)
    norms = [norm(change(sent, received)) for sent, received in watch.seen]
    assert norms == pytest.approx([0.01 * max(1, len(drawn)) / 5] * len(drawn) or [0.0], rel=1e-6)


def test_a_round_that_draws_nobody_releases_noise_alone() -> None:
    data = blobs((8,) * 4, fraction=1e-9, sampling="poisson", secret_cohorts=True)
    method, start = FedAvg(mlp(), lr=0.5, engine="stacked", weighting="uniform"), mlp().double().state_dict()
    assert data.drawn(0) == []
    fit(method, data, 1, callbacks=[DifferentialPrivacyCallback(1.0, 0.0)])
    assert largest_difference(weights(method), dict(start)) < 1e-12


def test_cohorts_are_poisson_and_secret(tmp_path: Path) -> None:
    open_ = blobs((4,) * 40, fraction=0.3, sampling="poisson")
    sizes = [len(open_.cohort(round)) for round in range(200)]
    assert 11 < sum(sizes) / 200 < 13
    assert float(torch.tensor(sizes).double().var()) == pytest.approx(40 * 0.3 * 0.7, rel=0.3)
    assert [open_.cohort(r) for r in range(5)] == [
        blobs((4,) * 40, fraction=0.3, sampling="poisson").cohort(r) for r in range(5)
    ]
    one, other = (blobs((4,) * 40, fraction=0.3, secret_cohorts=True) for _ in range(2))
    assert [len(one.cohort(r)) for r in range(5)] == [12] * 5
    assert [one.cohort(r) for r in range(5)] != [other.cohort(r) for r in range(5)]
    other.load_state_dict(one.state_dict())
    assert [one.cohort(r) for r in range(5)] == [other.cohort(r) for r in range(5)]
    with pytest.raises(FederationError, match="sampling must be fixed or poisson"):
        blobs(sampling="all")


def test_the_bound_follows_a_quantile() -> None:
    """Without noise it moves by exp(-rate (share - quantile)) a round, and settles where half of the updates are."""
    defence = DifferentialPrivacyCallback(1e-4, 0.0, quantile=0.5, clip_rate=1.0)
    fit(FedAvg(mlp(), lr=0.1, engine="stacked"), blobs((16,) * 8), 1, callbacks=[defence])
    assert defence.clip == pytest.approx(1e-4 * math.exp(0.5))
    fit(FedAvg(mlp(), lr=0.1, engine="stacked"), blobs((16,) * 8), 30, callbacks=[defence])
    watch = Watch(1e9, 0.0)
    fit(FedAvg(mlp(), lr=0.1, engine="stacked"), blobs((16,) * 8), 1, callbacks=[watch])
    norms = sorted(norm(change(sent, received)) for sent, received in watch.seen)
    assert 0.2 * norms[0] < defence.clip < 2 * norms[-1]
    assert split_noise(2.0, 5.0) ** -2 + 10.0**-2 == pytest.approx(2.0**-2)
    with pytest.raises(FederationError, match="too little for a noise_multiplier"):
        split_noise(2.0, 0.5)
