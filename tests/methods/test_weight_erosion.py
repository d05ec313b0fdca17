"""Weight Erosion: its weights by hand, its limits, and one run for every agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, Local, WeightErosion
from fl_lightning.methods.weight_erosion import LEFT
from fl_lightning.nets import LeNetBN
from fl_lightning.parties import Reply
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, trainer, weights
from tests.support.engines import differ, seeded
from tests.support.problems import twins


def erosion(**kwargs: Any) -> WeightErosion:
    return WeightErosion(mlp(), **{"lr": 0.1, "epochs": 2, "batch_size": 8, "engine": "stacked", **kwargs})


def test_the_weights_and_the_model_by_hand() -> None:
    """Two rounds against the formulas, written down again from the messages."""
    method, left = erosion(distance_penalty=0.3, size_penalty=0.5, agent_of_interest=2), torch.ones(4).double()
    data = blobs((10, 27, 33, 16))
    server, expected = {name: v.double() for name, v in weights(method).items()}, []

    def check(messages: Any) -> None:
        nonlocal left, server
        flat = [torch.cat([(m.tensors[n] - server[n]).flatten() for n in server]) for m in messages]
        distance = torch.stack([(g - flat[2]).norm() / flat[2].norm() for g in flat])
        passes = torch.tensor([(len(expected) * 8) // n for n in (10, 27, 33, 16)])
        left = (left - 0.3 * (1 + 0.5 * passes) * distance).clamp(0)
        mixed = left / left.sum()
        server = {n: sum(float(w) * m.tensors[n] for w, m in zip(mixed, messages, strict=True)) for n in server}
        expected.append(mixed)

    method.on_before_aggregate = check  # type: ignore[attr-defined]
    fit(method, data, rounds=2)
    assert 0 < float(expected[1][0]) < 0.25  # something wore away, not everything
    torch.testing.assert_close(method.weight_history()[:, 0], torch.stack(expected), atol=1e-12, rtol=0)
    assert largest_difference(weights(method), server) < 1e-12


def test_distances_are_over_trainable_parameters_alone() -> None:
    """Running statistics cross with the weights, but do not count."""
    method, sent = WeightErosion(seeded(lambda: LeNetBN(num_classes=CLASSES)), lr=0.1, engine="stacked"), []
    method.on_before_aggregate = sent.extend  # type: ignore[attr-defined]
    fit(method, blobs((19, 9, 16), (1, 28, 28)), rounds=1)
    names = [name for name, _ in method.net.named_parameters()]
    flat = torch.stack([torch.cat([message.tensors[name].flatten() for name in names]) for message in sent])
    torch.testing.assert_close(method.distance_history()[0, 0], (flat - flat[0]).norm(dim=1))


def test_the_default_penalties_are_a_tenth_of_an_agents_share_and_two() -> None:
    """Four rounds, so that the smallest agent's samples have been seen and the second penalty counts."""
    left = []
    for options in ({}, {"distance_penalty": 0.1 / 4, "size_penalty": 2.0}, {"distance_penalty": 0.1 / 4}):
        method = erosion(**options)
        fit(method, blobs(), rounds=4)
        left.append(method.memory[LEFT])
    assert torch.equal(left[0], left[1])
    assert torch.equal(left[0], left[2])
    assert 0 < float(left[0].min()) < 1


def test_small_agents_lose_more_once_their_samples_have_been_seen() -> None:
    """floor((r - 1) B / n_i) counts batches against samples: with B = 8 and n = 16 it is 1 in round 3."""
    lost = []
    for penalty in (0.0, 1.0):
        method = erosion(distance_penalty=0.01, size_penalty=penalty)
        fit(method, blobs((64, 16)), rounds=3)
        lost.append(1 - float(method.memory[LEFT][0, 1]))
    distances = method.distance_history()[:, 0, 1]
    assert len(distances) == 3
    assert lost[1] > lost[0] * 1.2


def test_no_penalty_is_uniform_fedavg() -> None:
    one, other = (
        erosion(distance_penalty=0.0),
        FedAvg(mlp(), lr=0.1, epochs=2, batch_size=8, weighting="uniform", engine="stacked"),
    )
    for method in (one, other):
        fit(method, blobs())
    assert largest_difference(weights(one), weights(other)) < 1e-12


@pytest.mark.parametrize("agent", [0, 2])
def test_a_huge_penalty_is_local_training(agent: int) -> None:
    one, other = (
        erosion(distance_penalty=1e9, agent_of_interest=agent),
        Local(mlp(), lr=0.1, epochs=2, batch_size=8, engine="stacked"),
    )
    for method in (one, other):
        fit(method, blobs())
    assert largest_difference(weights(one), other.snapshots[agent].private) < 1e-12
    assert [one.snapshots[c].rounds for c in range(4)] == [3 if c == agent else 1 for c in range(4)]


def test_the_agents_own_weight_stays_whole_and_no_weight_grows() -> None:
    class Watched(WeightErosion):
        seen: list[Tensor] = []  # noqa: RUF012

        def weigh(self, distances: Tensor, moved: Tensor) -> Tensor:
            mixed = super().weigh(distances, moved)
            self.seen.append(self.memory[LEFT].clone())
            return mixed

    method = Watched(mlp(), lr=0.1, batch_size=8, distance_penalty=0.05, agent_of_interest=1)
    fit(method, blobs(), rounds=8)
    left = torch.stack(method.seen)[:, 0]
    assert (left[:, 1] == 1).all()
    assert (left.diff(dim=0) <= 0).all()
    assert (left[-1, [0, 2, 3]] < 1).all()
    history = method.weight_history()
    torch.testing.assert_close(history.sum(-1), torch.ones(8, 1).double())


def test_agents_with_the_same_data_and_order_keep_their_weight() -> None:
    """One full batch a round: the order within it does not matter but for rounding."""
    method = erosion(batch_size=12, distance_penalty=0.2)
    fit(method, twins(), rounds=4)
    left = method.memory[LEFT][0]
    assert float(left[1]) > 1 - 1e-9
    assert float(left[2]) < 0.9


def test_one_agent_is_plain_training() -> None:
    one, other = erosion(), FedAvg(mlp(), lr=0.1, epochs=2, batch_size=8, engine="stacked")
    for method in (one, other):
        fit(method, blobs([21]))
    assert largest_difference(weights(one), weights(other)) < 1e-12
    assert one.weight_history().flatten().tolist() == [1.0] * 3


def test_updates_without_length_are_at_no_distance() -> None:
    method = erosion(lr=0.0, distance_penalty=10.0)
    fit(method, blobs(), rounds=2)
    assert method.weight_history().eq(0.25).all()


def test_an_agent_that_takes_no_step_measures_nobody() -> None:
    """Its one sample is no batch to normalise over: there is no length to measure the others' distances by."""
    net = seeded(lambda: LeNetBN(num_classes=CLASSES))
    method = WeightErosion(net, lr=0.05, batch_size=8, agent_of_interest=1, distance_penalty=0.3, engine="stacked")
    fit(method, blobs((17, 1, 9), (1, 28, 28)), rounds=2)
    assert (method.distance_history()[:, 0, [0, 2]] > 1e-3).all()
    torch.testing.assert_close(method.weight_history(), torch.full((2, 1, 3), 1 / 3).double())
    assert (method.memory[LEFT] == 1).all()


def test_all_agents_at_once_equal_a_run_for_each(tmp_path: Path) -> None:
    """Also where weights are gone and their agents no longer train."""
    together = erosion(agent_of_interest="all", distance_penalty=0.3)
    fit(together, blobs(), rounds=4)
    for agent in range(4):
        alone = erosion(agent_of_interest=agent, distance_penalty=0.3)
        fit(alone, blobs(), rounds=4)
        assert largest_difference(together.personal_state(agent), alone.server_state()) < 1e-9
        torch.testing.assert_close(together.weight_history()[:, agent], alone.weight_history()[:, 0])
        score = together.evaluator.scores["test"][agent]
        assert float(score) == pytest.approx(float(alone.evaluator.scores["test"][agent]))
    assert (together.weight_history()[-1] == 0).any()
    assert together.summary["clients/trained"] < 16


@pytest.mark.parametrize("agent", [1, "all"])
def test_engines_agree(agent: Any) -> None:
    def trained(engine: str) -> WeightErosion:
        method = erosion(engine=engine, agent_of_interest=agent, distance_penalty=0.1)
        fit(method, blobs((19, 9, 16, 8)))
        return method

    one, two = trained("sequential"), trained("stacked")
    assert differ(one, two) < 1e-9
    torch.testing.assert_close(one.weight_history(), two.weight_history())


def test_another_fit_begins_with_whole_weights_and_the_trained_model() -> None:
    method = erosion(distance_penalty=0.2, agent_of_interest="all")
    fit(method, blobs(), rounds=2)
    trained = method.personal_state(3)
    first = method.weight_history()[0]
    fit(method, blobs(), rounds=1)
    assert method.weight_history().shape == (1, 4, 4)
    assert not torch.equal(method.weight_history()[0], first)
    assert largest_difference(method.personal_state(3), trained) > 0


def test_a_fit_that_trains_nobody_leaves_every_client_its_own_statistics() -> None:
    net: Any = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    method = WeightErosion(net, agent_of_interest="all", buffers="keep", lr=0.1, batch_size=8, engine="sequential")
    fit(method, blobs((16, 9)), rounds=2)
    trained = method.personal_state(1)
    fit(method, blobs((16, 9)), rounds=0)
    assert largest_difference(method.personal_state(1), trained) == 0


@pytest.mark.parametrize("clients", [3, 5])
def test_models_of_all_agents_are_for_as_many_clients(clients: int, tmp_path: Path) -> None:
    method, other = erosion(agent_of_interest="all"), blobs((20,) * clients)
    fit(method, blobs(), rounds=1).save_checkpoint(tmp_path / "all.ckpt")
    sentence = f"^agent_of_interest=all has a model for each of 4 clients, but the data has {clients}: use the data"
    with pytest.raises(FederationError, match=sentence):
        trainer().test(method, datamodule=other, verbose=False)
    with pytest.raises(FederationError, match=sentence):
        fit(method, other, rounds=1)
    with pytest.raises(FederationError, match=sentence):
        trainer().test(erosion(agent_of_interest="all"), other, ckpt_path=str(tmp_path / "all.ckpt"), verbose=False)
    assert trainer().test(method, datamodule=blobs(), verbose=False)


def test_an_update_that_is_left_out_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = WeightErosion.leave

    def broken(bad: int) -> Any:
        def left(self: Any, state: Any, received: Any, me: Any) -> Reply:
            reply = leave(self, state, received, me)
            return reply._replace(up={n: v * (torch.nan if me.number == bad else 1) for n, v in reply.up.items()})

        return left

    monkeypatch.setattr(WeightErosion, "leave", broken(2))
    method = erosion(distance_penalty=0.0)
    with pytest.warns(UserWarning, match="left out clients 2"):
        fit(method, blobs(), rounds=1)
    torch.testing.assert_close(method.weight_history()[0, 0], torch.tensor([1, 1, 0, 1]).double() / 3)
    method = erosion(distance_penalty=0.3)
    with pytest.warns(UserWarning, match="left out clients 2"):
        fit(method, blobs(), rounds=1)
    assert method.memory[LEFT][0, 2] == 1  # it was not measured
    assert method.memory[LEFT][0, 3] < 1
    monkeypatch.setattr(WeightErosion, "leave", broken(0))
    method = erosion()
    start = weights(method)
    with pytest.warns(UserWarning, match="left out clients 0"):
        fit(method, blobs(), rounds=1)
    assert largest_difference(weights(method), start) == 0.0


@pytest.mark.parametrize("agent", [2, "all"])
def test_a_development_run_has_the_agent_in_it(agent: Any) -> None:
    method = erosion(agent_of_interest=agent)
    start = weights(method)
    fit(method, blobs(), fast_dev_run=True)
    assert len(method.snapshots) == 2
    assert largest_difference(weights(method), start) > 0
    if agent == "all":  # agents without an update of their own keep their model
        assert largest_difference(method.personal_state(3), start) == 0.0


def test_what_crosses_is_the_model() -> None:
    method, up = erosion(agent_of_interest=0), set()
    method.on_before_aggregate = lambda messages: up.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    fit(method, blobs(), rounds=1, precision="32-true")
    assert up == set(method.shared_names)
    assert method.bytes_up == method.bytes_down == 4 * 4 * sum(p.numel() for p in method.net.parameters())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"agent_of_interest": "alice"}, "agent_of_interest must be a whole number or all, not 'alice'"),
        ({"agent_of_interest": -1}, "agent_of_interest must be 0 or more, or be all, not -1"),
        ({"distance_penalty": -1.0}, "distance_penalty must be 0 or more"),
        ({"size_penalty": float("nan")}, "size_penalty must be a number, not nan"),
        ({"weighting": "samples"}, "WeightErosion has no option 'weighting', as clients are weighted by distance"),
        ({"agent_of_interest": "all", "server_optimizer": torch.optim.SGD}, "leave server_optimizer out"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        erosion(**options)


def test_an_agent_that_is_not_there_is_refused() -> None:
    with pytest.raises(FederationError, match="agent_of_interest must be one of 0 to 3 or all, not 4"):
        fit(erosion(agent_of_interest=4), blobs())
