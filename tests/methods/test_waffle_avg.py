"""WAFFLEAvg: its weights by hand, its limits, its control variates, and one run for every agent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.callbacks.agents import local_since
from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedAvg, Local, WAFFLEAvg
from fl_lightning.methods.scaffold import CHANGE, OWN, SERVER
from fl_lightning.methods.schedules import Constant, Linear, Sigmoid
from fl_lightning.methods.waffle_avg import NEW, calculate_weights
from fl_lightning.parties import Reply
from tests.support import blobs, fit, largest_difference, mlp, trainer, weights
from tests.support.engines import differ
from tests.support.problems import Point, twins
from tests.support.stops import make, run

CONTROLS = pytest.mark.parametrize("control", ["eq1", "weighted_mean"])
SETTINGS: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 8, "engine": "stacked"}


def waffle(kind: type[WAFFLEAvg] = WAFFLEAvg, **kwargs: Any) -> WAFFLEAvg:
    return kind(mlp(), **{**SETTINGS, **kwargs})


class Uniform(WAFFLEAvg):
    """Weights forced to be equal."""

    def raw_weights(self, distances: Tensor) -> Tensor:
        return torch.full_like(distances, 1 / distances.shape[1])


# ---- weights ----------------------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    """d = (., 1, 2, 4), Omega = 1/4, Psi = 1/2: d_0 = 1 - 3/4 * 3/4 = 7/16, ratios (0, 3/19, 25/57, 1)."""
    found = calculate_weights(torch.tensor([0.0, 1.0, 2.0, 4.0]), 0, omega=0.25, psi=0.5)
    raw = torch.tensor([1 / 2, 1 / 2 - 3 / 19, 1 / 2 - 25 / 57, 0.0], dtype=torch.float64)
    torch.testing.assert_close(found, raw / raw.sum())


DISTANCES = st.lists(st.floats(0, 1e3), min_size=2, max_size=8)
UNIT = st.floats(0, 1)


@settings(max_examples=300, deadline=None)
@given(DISTANCES, UNIT, UNIT, st.integers(0, 7))
def test_weights_are_a_distribution_with_the_agent_on_top(d: list[float], omega: float, psi: float, agent: int) -> None:
    agent %= len(d)
    found = calculate_weights(torch.tensor(d).double(), agent, omega, psi)
    assert float(found.sum()) == pytest.approx(1)
    assert (found >= 0).all()
    assert float(found[agent]) == float(found.max())


@settings(max_examples=300, deadline=None)
@given(DISTANCES, UNIT, st.floats(0.01, 1))
def test_equation_3_and_line_6_agree(d: list[float], omega: float, psi: float) -> None:
    """Line 6 divides by dM - min_i d_i over all i, after d_agent was overwritten by line 4."""
    others, distances = d[1:], torch.tensor(d, dtype=torch.float64)
    far, near = max(others), min(others)
    if far < 1e-3 or far - near < 1e-6 * far:
        return
    own = near * (1 - (far - near) / far * (1 - omega))
    line4 = torch.tensor([own, *others], dtype=torch.float64)
    raw = (psi - (line4 - own) / (far - line4.min())).clamp(min=0)
    torch.testing.assert_close(calculate_weights(distances, 0, omega, psi), raw / raw.sum(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("distance", [0.0, 1e-14, 3.0])
def test_equal_distances_give_equal_weights(distance: float) -> None:
    found = calculate_weights(torch.tensor([distance, 0.0, distance, distance]), 1, omega=0.3, psi=0.4)
    torch.testing.assert_close(found, torch.full((4,), 0.25).double())


def test_ties_nobody_else_and_nothing_left() -> None:
    tied = calculate_weights(torch.tensor([0.0, 1.0, 1.0, 2.0]), 0, omega=0.9, psi=0.9)
    assert tied[1] == tied[2] > 0
    assert tied[3] == 0  # the farthest never counts while Psi < 1
    assert calculate_weights(torch.tensor([0.0]), 0, 0.9, 0.9).tolist() == [1.0]
    assert calculate_weights(torch.tensor([0.0, 1.0, 1.0]), 0, 0.9, 0.0).tolist() == [1.0, 0.0, 0.0]
    missing = calculate_weights(torch.tensor([0.0, torch.nan, 1.0, 2.0]), 0, 1.0, 1.0)
    assert missing.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_an_agent_with_the_same_data_counts_as_much_as_the_agent_itself() -> None:
    method = waffle(batch_size=12, epochs=1)
    fit(method, twins(), rounds=4)
    used, distances = method.weight_history()[:, 0], method.distance_history()[:, 0]
    assert float(distances[0, 1]) < 1e-9 < 1e-3 < float(distances[0, 2])
    torch.testing.assert_close(used[0, 0], used[0, 1])
    assert (used[:2, 0] > used[:2, 2]).all()


def test_one_agent_is_plain_training() -> None:
    one, other = waffle(), FedAvg(mlp(), **SETTINGS)
    for method in (one, other):
        fit(method, blobs([21]), rounds=4)
    assert largest_difference(weights(one), weights(other)) < 1e-12
    assert one.weight_history().flatten().tolist() == [1.0] * 4


def test_weights_of_a_run_follow_distances_schedules_and_smoothing() -> None:
    """A whole run against the algorithm, written down again; R = 10, only the agent from round 10."""
    method, rounds = waffle(agent_of_interest=1, epochs=1), 10
    fit(method, blobs(), rounds=rounds)
    distances, raw = method.distance_history()[:, 0], [torch.full((4,), 0.25).double()] * 2
    for r in range(1, rounds + 1):
        value = 1 / (1 + math.exp(3.2 * (r / (rounds / 2) - 1)))
        alone = torch.tensor([0.0, 1, 0, 0]).double()
        raw.append(alone if 100 * r >= 95 * rounds else calculate_weights(distances[r - 1], 1, value, value))
        expected = (raw[-1] + raw[-2] + raw[-3]) / 3
        torch.testing.assert_close(method.weight_history()[r - 1, 0], expected)
    assert (method.weight_history().sum(-1) - 1).abs().max() < 1e-12
    assert (method.weight_history()[:, 0, 1:2] >= method.weight_history()[:, 0]).all()


@pytest.mark.parametrize("rounds", [40, 45, 60])
def test_smoothed_weights_are_the_agents_alone_from_two_rounds_after_95_percent(rounds: int) -> None:
    """ceil(0.95 R) + 2, in integers: 0.95 * 60 is just below 57 in floating point. Only the agent trains then."""
    always = Constant(1.0)  # the nearest agent counts as much as the agent itself
    method = waffle(epochs=1, batch_size=40, omega=always, psi=always)
    fit(method, blobs((8, 8, 8)), rounds=rounds, limit_val_batches=0)
    since = -(-95 * rounds // 100) + 2
    assert method.first_local == since - 2
    assert local_since(method.weight_history()[:, 0], 0) == (since if since <= rounds else None)
    trained = [method.snapshots[client].rounds for client in range(3)]
    assert trained == [rounds, min(since - 1, rounds), min(since - 1, rounds)]


def test_smoothing_options() -> None:
    plain, available = waffle(smoothing=1), waffle(before_first="available")
    for method in (plain, available):
        fit(method, blobs(), rounds=1)
    torch.testing.assert_close(plain.weight_history(), available.weight_history())
    usual = waffle()
    fit(usual, blobs(), rounds=1)
    torch.testing.assert_close(usual.weight_history(), plain.weight_history() / 3 + 0.5 / 3)
    longer = waffle(smoothing=1, rounds=20)
    fit(longer, blobs(), rounds=4)
    value, d = Sigmoid()(4 / 20), longer.distance_history()[3, 0]
    torch.testing.assert_close(longer.weight_history()[3, 0], calculate_weights(d, 0, value, value))


def test_schedules_are_objects_or_functions() -> None:
    seen = []

    def psi(progress: float) -> float:
        seen.append(progress)
        return 1.0

    method = waffle(omega=Constant(1.0), psi=psi, smoothing=1, local_from=2.0)
    fit(method, blobs(), rounds=4)
    assert seen == [0.25, 0.5, 0.75, 1.0]
    expected = [calculate_weights(d, 0, 1.0, 1.0) for d in method.distance_history()[:, 0]]
    torch.testing.assert_close(method.weight_history()[:, 0], torch.stack(expected))
    assert [Linear()(p) for p in (0, 0.25, 1)] == [1.0, 0.75, 0.0]
    with pytest.raises(FederationError, match=r"omega must lie in \[0, 1\]"):
        fit(waffle(omega=Constant(1.5), rounds=9), blobs(), rounds=1)


# ---- limits -----------------------------------------------------------------------------------------------------


@CONTROLS
def test_uniform_weights_are_scaffold(control: Any) -> None:
    one, other = waffle(Uniform, control=control), SCAFFOLD(mlp(), **SETTINGS)
    for method in (one, other):
        fit(method, blobs(), rounds=4)
    assert largest_difference(weights(one), weights(other)) < 1e-12
    assert largest_difference(one.server_control(), other.server_control()) < 1e-12


@CONTROLS
@pytest.mark.parametrize("agent", [0, 3])
def test_the_agent_alone_from_the_first_round_is_local(control: Any, agent: int) -> None:
    one = waffle(control=control, local_from=0.0, smoothing=1, agent_of_interest=agent)
    other = Local(mlp(), **SETTINGS)
    for method in (one, other):
        fit(method, blobs())
    assert largest_difference(weights(one), other.snapshots[agent].private) < 1e-12


class Fixed(WAFFLEAvg):
    """Constant weights."""

    def weigh(self, distances: Tensor, moved: Tensor) -> Tensor:
        return torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double()


def test_constant_weights_make_both_controls_the_same() -> None:
    one, other = (waffle(Fixed, control=control) for control in ("eq1", "weighted_mean"))
    for method in (one, other):
        fit(method, blobs(), rounds=5)
    assert largest_difference(weights(one), weights(other)) < 1e-12
    assert largest_difference(one.server_control(), other.server_control()) < 1e-12


# ---- control variates -------------------------------------------------------------------------------------------


def quadratics(control: str, rounds: int = 60) -> tuple[float, float]:
    """Six agents minimise 1/2 a_i (w - t_i)^2; after 30 rounds alone: Alice to her optimum, and ||c - c_alice||."""

    class Quadratic(WAFFLEAvg):
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return 0.5 * output.pow(2).sum(1).mean()

    generator = torch.Generator().manual_seed(0)
    t, a = torch.randn(6, 4, generator=generator), 0.2 + 1.8 * torch.rand(6, 4, generator=generator)
    x = torch.cat((t, a), 1).repeat_interleave(5, 0)
    train, test = [list(range(5 * i, 5 * i + 4)) for i in range(6)], [[5 * i + 4] for i in range(6)]
    data = TensorFederation(x, torch.arange(30) % 4, train=train, test=test, num_classes=4, val_fraction=0)
    options: dict[str, Any] = {"lr": 0.2, "epochs": 10, "batch_size": 4, "engine": "stacked", "local_from": 0.5}
    method = Quadratic(Point(), control=control, **options)
    fit(method, data, rounds=rounds, limit_val_batches=0)
    apart = float((method.server_control()["w"] - method.snapshots[0].private[OWN + "w"]).norm())
    return float((method.net.w.detach() - t[0].double()).norm()), apart


def test_eq1_drifts_and_weighted_mean_does_not() -> None:
    """Once Alice is alone, eq1 leaves c - c_alice frozen: she does not reach her own optimum."""
    distance, apart = quadratics("eq1")
    assert distance > 0.05
    assert apart > 0.05
    distance, apart = quadratics("weighted_mean")
    assert distance < 1e-4
    assert apart < 1e-15


@CONTROLS
def test_what_crosses_is_twice_the_model(control: Any) -> None:
    method, up, down = waffle(control=control), set(), set()
    method.on_client_start = lambda client, message: down.update(message)  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: up.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    fit(method, blobs(fraction=0.25), rounds=1, precision="32-true")
    names = set(method.trainable_names)
    assert up == names | {(CHANGE if control == "eq1" else NEW) + name for name in names}
    assert down == names | {SERVER + name for name in names}
    assert method.bytes_up == method.bytes_down == 4 * 2 * 4 * sum(p.numel() for p in method.net.parameters())


# ---- every agent, engines, resume -------------------------------------------------------------------------------


@CONTROLS
def test_all_agents_at_once_equal_a_run_for_each(control: Any) -> None:
    together = waffle(agent_of_interest="all", control=control, momentum=0.5, local_from=0.6)
    fit(together, blobs(), rounds=6)
    for agent in range(4):
        alone = waffle(agent_of_interest=agent, control=control, momentum=0.5, local_from=0.6)
        fit(alone, blobs(), rounds=6)
        assert largest_difference(together.personal_state(agent), alone.server_state()) < 1e-9
        torch.testing.assert_close(together.weight_history()[:, agent], alone.weight_history()[:, 0])
        own = {name: together.memory[f"each.{SERVER}{name}"][agent] for name in alone.server_control()}
        assert largest_difference(own, alone.server_control()) < 1e-9
        score = together.evaluator.scores["test"][agent]
        assert float(score) == pytest.approx(float(alone.evaluator.scores["test"][agent]))
    assert together.summary["clients/trained"] == 4  # alone from round 4, smoothed from round 6


class Fails(WAFFLEAvg):
    """The update of client 2 for agent 1 is not finite in the second round."""

    def leave(self, state: Any, received: Any, me: Any) -> Reply:
        reply = super().leave(state, received, me)
        whose = self._row(me.number) if self.everyone else self.agent_of_interest
        if (whose, me.client, me.round) == (1, 2, 1):
            reply = reply._replace(up={name: value * math.nan for name, value in reply.up.items()})
        return reply


@pytest.mark.filterwarnings("ignore:Round 1")
def test_a_client_that_is_left_out_of_one_federation_goes_on_with_what_it_has_there() -> None:
    together, alone = waffle(Fails, agent_of_interest="all"), waffle(Fails, agent_of_interest=1)
    for method in (together, alone):
        fit(method, blobs(), rounds=4)
    assert largest_difference(together.personal_state(1), alone.server_state()) < 1e-12


class Silent(WAFFLEAvg):
    """The agent's own update is not finite in the second round."""

    def leave(self, state: Any, received: Any, me: Any) -> Reply:
        reply = super().leave(state, received, me)
        bad = me.number == self.agent_of_interest and me.round == 1
        return reply._replace(up={name: value * math.nan for name, value in reply.up.items()}) if bad else reply


@pytest.mark.filterwarnings("ignore:Round 1")
def test_a_round_without_the_agents_own_update_weighs_as_the_one_before() -> None:
    method, models, raw = waffle(Silent, agent_of_interest=1), [], []
    weigh = method.raw_weights

    def noted(distances: Tensor) -> Tensor:
        raw.append(weigh(distances))
        return raw[-1]

    method.raw_weights = noted  # type: ignore[method-assign]
    method.on_round_end = lambda messages: models.append(weights(method))  # type: ignore[attr-defined]
    fit(method, blobs(), rounds=10)
    assert largest_difference(models[0], models[1]) == 0
    used = method.weight_history()[:, 0]
    assert (used[1] == 0).all()
    torch.testing.assert_close(used[2], (2 * raw[0][0] + raw[2][0]) / 3)
    torch.testing.assert_close(used[3], (raw[0][0] + raw[2][0] + raw[3][0]) / 3)


@pytest.mark.parametrize("agent", [1, "all"])
def test_engines_agree(agent: Any) -> None:
    def trained(engine: str) -> WAFFLEAvg:
        method = waffle(engine=engine, agent_of_interest=agent, momentum=0.9, weight_decay=0.01)
        fit(method, blobs((19, 9, 16, 8)), rounds=4)
        return method

    one, two = trained("sequential"), trained("stacked")
    assert differ(one, two) < 1e-9
    torch.testing.assert_close(one.weight_history(), two.weight_history())


def test_batch_statistics_may_stay_with_the_client_or_start_anew() -> None:
    for buffers in ("keep", "reset"):
        together = make(WAFFLEAvg, agent_of_interest="all", buffers=buffers)
        alone = make(WAFFLEAvg, agent_of_interest=2, buffers=buffers)
        for method in (together, alone):
            fit(method, blobs((19, 9, 16, 8), (1, 28, 28)), rounds=3)
        assert largest_difference(together.personal_state(2), alone.personal_state(2)) < 1e-9


def test_a_checkpoint_knows_the_schedules(tmp_path: Path) -> None:
    method = make(WAFFLEAvg, omega=Linear(0.9, 0.1), control="weighted_mean", smoothing=2)
    run(method, tmp_path)
    loaded = WAFFLEAvg.load_from_checkpoint(tmp_path / "last.ckpt")
    assert isinstance(loaded.omega, Linear)
    assert (loaded.omega.start, loaded.omega.end) == (0.9, 0.1)
    assert isinstance(loaded.psi, Sigmoid)
    assert (loaded.control_rule, loaded.smoothing) == ("weighted_mean", 2)


def halved(progress: float) -> float:
    """A schedule that is a function."""
    return 1 - progress / 2


def test_a_checkpoint_knows_functions_that_can_be_imported_and_asks_for_others(tmp_path: Path) -> None:
    run(make(WAFFLEAvg, omega=halved), tmp_path / "a")
    assert WAFFLEAvg.load_from_checkpoint(tmp_path / "a" / "last.ckpt").omega is halved
    local = lambda progress: 0.5  # noqa: E731
    run(make(WAFFLEAvg, psi=local), tmp_path / "b")
    with pytest.raises(FederationError, match=r"psi was .*<lambda>, which cannot be imported: pass psi= again"):
        WAFFLEAvg.load_from_checkpoint(tmp_path / "b" / "last.ckpt")
    assert WAFFLEAvg.load_from_checkpoint(tmp_path / "b" / "last.ckpt", psi=local).psi is local


@pytest.mark.parametrize("agent", [1, "all"])
def test_a_checkpoint_in_double_precision_is_tested_in_single(agent: Any, tmp_path: Path) -> None:
    double = make(WAFFLEAvg, agent_of_interest=agent)
    data = blobs((19, 9, 16), (1, 28, 28))
    fit(double, data, rounds=2).save_checkpoint(tmp_path / "x.ckpt")
    single = WAFFLEAvg.load_from_checkpoint(tmp_path / "x.ckpt")
    trainer(precision="32-true").test(single, datamodule=data, verbose=False)
    assert single.personal_state(1)["head.weight"].dtype == torch.float32
    assert single.weight_history().dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"control": "eq2"}, "control must be eq1 or weighted_mean, not 'eq2'"),
        ({"before_first": "zeros"}, "before_first must be uniform or available"),
        ({"smoothing": 0}, "smoothing must be 1 or more, not 0"),
        ({"rounds": 0}, "rounds must be 1 or more, not 0"),
        ({"local_from": -0.1}, "local_from must be 0 or more"),
        ({"local_from": float("inf")}, "local_from must be 0 or more and finite, not inf"),
        ({"omega": 0.5}, "omega must be a schedule or a function of the progress, not 0.5"),
        ({"weighting": "samples"}, "WAFFLEAvg has no option 'weighting', as clients are weighted by distance"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        waffle(**options)


def test_a_run_without_end_is_refused() -> None:
    with pytest.raises(FederationError, match="set max_epochs or rounds"):
        fit(waffle(), blobs(), rounds=-1, max_time="00:00:00:01")
