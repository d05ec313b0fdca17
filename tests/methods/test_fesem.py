"""FeSEM: its two steps, who is known, and what happens to centres and clients that nobody knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_lightning.errors import FederationError
from fl_lightning.methods import FeSEM
from fl_lightning.methods.lib.clusters import squared_distances
from fl_lightning.nets import LeNetBN
from fl_lightning.wire import Message
from tests.support import blobs, fit, largest_difference, mlp, planted, weights

MANY = (19, 9, 16, 8, 30, 12, 24, 10)


def fesem(**kwargs: Any) -> FeSEM:
    return FeSEM(mlp(), **{"lr": 0.3, "batch_size": 8, "engine": "stacked", "centres": "same", **kwargs})


def spread(method: FeSEM, labels: dict[int, int]) -> float:
    """Sum of the squared distances of all known models to the centres of their clusters."""
    clients = sorted(method.known)
    centres = [method.model_state(q) for q in range(method.clusters)]
    distances = squared_distances([method.known[c] for c in clients], centres, method.trainable_names)
    return sum(float(distances[i, labels[c]]) for i, c in enumerate(clients))


class Watched(FeSEM):
    """Notes the sum of squared distances before the E-step and after it, and how many clients it moved."""

    def nearest(self) -> dict[int, int]:
        before = {client: self.cluster_sent(client) for client in self.known}
        after = super().nearest()
        self.notes.append((spread(self, before), spread(self, after)))
        self.moved.append(sum(before[c] != after[c] for c in after))
        return after


def test_sum_of_squared_distances_increases_in_neither_step() -> None:
    method = Watched(mlp(), clusters=3, centres="same", lr=0.3, batch_size=8, engine="stacked")
    method.notes, method.moved, ends = [], [], []
    method.on_round_end = lambda messages: ends.append(spread(method, method.labels))
    fit(method, planted(12, fraction=0.5), rounds=8)
    for (before, between), after in zip(method.notes, ends, strict=True):
        assert between <= before
        assert after <= between * (1 + 1e-9)
    assert sum(method.moved) > 0
    assert any(between < before for before, between in method.notes)


def test_a_step_by_hand() -> None:
    """Models at 0, 1, 10 and 11 on a line; centres at 2 and 4: the first two and the last two belong together."""
    method = fesem(clusters=2)
    names = method.trainable_names
    state = {name: torch.zeros_like(value) for name, value in method.server_state().items()}

    def at(x: float) -> dict[str, torch.Tensor]:
        return {**state, names[0]: torch.full_like(state[names[0]], x)}

    for q, x in enumerate((2.0, 4.0)):
        (method.net if q == 0 else method.others[0]).load_state_dict(at(x))
    method.labels = {0: 1, 1: 1, 2: 0, 3: 0}
    target = method.aggregate([Message(client, at(x), 1) for client, x in enumerate((0.0, 1.0, 10.0, 11.0))])
    assert method.labels == {0: 0, 1: 0, 2: 1, 3: 1}
    assert torch.unique(target[f"0.{names[0]}"]).tolist() == [0.5]
    assert torch.unique(target[f"1.{names[0]}"]).tolist() == [10.5]


def test_the_last_known_models_of_missing_clients_count() -> None:
    method, last = fesem(clusters=1), {}
    method.on_before_aggregate = lambda messages: last.update({m.client: m.tensors for m in messages})  # type: ignore[attr-defined]
    fit(method, blobs(MANY, fraction=0.25), rounds=5)
    assert 2 < len(last) < 8
    mean = {name: sum(m[name] for m in last.values()) / len(last) for name in weights(method)}
    assert largest_difference(weights(method), mean) < 1e-12


def test_first_assignments_are_balanced_and_centres_independent() -> None:
    method = fesem(clusters=4, centres="independent")
    down = []
    method.on_client_start = lambda client, message: down.append((client, message["fc1.weight"].clone()))  # type: ignore[attr-defined]
    models = [method.model_state(q)["fc1.weight"].clone().double() for q in range(4)]
    fit(method, blobs(MANY), rounds=1)
    received = [next(q for q in range(4) if torch.equal(models[q], value)) for _, value in down]
    assert sorted(received.count(q) for q in range(4)) == [2, 2, 2, 2]
    assert method.labels == {client: q for (client, _), q in zip(down, received, strict=True)}  # nobody left


def test_empty_clusters_keep_their_centres_and_more_clusters_than_clients_are_fine() -> None:
    method = fesem(clusters=6, centres="independent")
    before = [method.model_state(q)["fc1.weight"].clone().double() for q in range(6)]
    fit(method, blobs((19, 9, 16)), rounds=3)
    used = set(method.labels.values())
    assert len(used) == 3
    for q in range(6):
        assert torch.equal(method.model_state(q)["fc1.weight"], before[q]) == (q not in used)


def test_clients_that_never_trained_get_the_largest_cluster() -> None:
    method = fesem(clusters=2)
    assert method.cluster_of(0) == 0
    method.labels = {0: 1, 1: 1, 2: 0}
    assert [method.cluster_of(client) for client in range(5)] == [1, 1, 0, 1, 1]
    method.labels = {0: 1, 1: 0}
    assert method.cluster_of(7) == 0
    fit(method := fesem(clusters=2), planted(fraction=0.25), rounds=2)
    never = [client for client in range(8) if client not in method.snapshots]
    assert never
    models = [method.personal_state(client) for client in never]
    assert all(len({model[name].data_ptr() for model in models}) == 1 for name in method.entry_names)


@pytest.mark.parametrize("centres", ["same", "independent"])
def test_planted_clusters_are_found_from_equal_centres_and_not_from_independent_ones(centres: str) -> None:
    method = fesem(clusters=2, centres=centres)
    fit(method, planted(12), rounds=4, limit_val_batches=0)
    found = method.assignment()
    assert (found in ([0, 1] * 6, [1, 0] * 6)) == (centres == "same")


def test_identical_models_in_different_clusters_stay_where_they_are() -> None:
    """Equal centres are equally near: nobody moves, rather than everybody to the first."""
    method = fesem(clusters=3)
    state = method.server_state()
    method.labels = {0: 2, 1: 1}
    method.aggregate([Message(0, state, 1), Message(1, state, 1)])
    assert method.labels == {0: 2, 1: 1}


def test_running_statistics_play_no_part_in_distances() -> None:
    """A client with the statistics of one centre and the weights of both stays with the other."""
    method = FeSEM(LeNetBN(), clusters=2, centres="same")
    method.others[0].bn1.running_mean += 100.0  # type: ignore[operator, union-attr]
    method.labels = {0: 0}
    method.aggregate([Message(0, method.model_state(1), 1)])
    assert method.labels == {0: 0}


def test_other_weights_and_words_are_refused() -> None:
    with pytest.raises(FederationError, match="all members of a cluster count the same"):
        fesem(weighting="samples")
    with pytest.raises(FederationError, match="centres must be independent or same, not 'equal'"):
        fesem(centres="equal")
