"""FedCluster: groups that take turns, each from where the last one left the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_lightning import seeding
from fl_lightning.engine import entries
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedCluster
from fl_lightning.methods.fedcluster import dominant_class
from fl_lightning.parties import LocalData, Reply
from tests.support import CLASSES, blobs, fit, largest_difference, mlp, sgd, weights

MANY = (19, 9, 16, 8, 30, 12, 24)


def fedcluster(**kwargs: Any) -> FedCluster:
    return FedCluster(mlp(), **{"clusters": 3, "lr": 0.1, "batch_size": 8, "engine": "stacked", **kwargs})


def test_every_client_trains_once_per_round() -> None:
    method, trained = fedcluster(), []
    method.on_client_end = lambda client, message: trained.append(client)  # type: ignore[attr-defined]
    fit(method, blobs(MANY), rounds=3)
    for round in range(3):
        assert sorted(trained[7 * round : 7 * round + 7]) == list(range(7))
    assert [method.snapshots[client].rounds for client in range(7)] == [3] * 7
    assert method.summary["clients/trained"] == 7


def test_groups_are_balanced_fixed_and_visited_in_an_order_of_their_own_every_round() -> None:
    method, visits = fedcluster(), []
    method.on_before_aggregate = lambda messages: visits.append([m.client for m in messages])  # type: ignore[attr-defined]
    fit(method, blobs(MANY), rounds=6)
    groups = method.assignment()
    assert sorted(Counter(groups).values()) == [2, 2, 3]
    for visit in visits:
        assert visit == [client for client in range(7) if groups[client] == groups[visit[0]]]
    orders = [tuple(groups[visit[0]] for visit in visits[3 * r : 3 * r + 3]) for r in range(6)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len(set(orders)) > 1


def test_as_many_groups_as_clients_are_cyclic_sgd() -> None:
    sizes, net = (19, 9, 16, 8), mlp().double()
    method, data = fedcluster(clusters=4), blobs(sizes)
    fit(method, data, rounds=3)
    federation, groups = data.federation, method.assignment()
    for round in range(3):
        for group in seeding.stream(0, "visits", round).permutation(4):
            client = groups.index(group)
            order = seeding.permutation(seeding.stream(0, "batches", round, client), sizes[client])
            parts = federation.train[client][order].split(8)
            sgd(net, [(federation.inputs[part].double(), federation.targets[part]) for part in parts], lr=0.1)
    assert largest_difference(weights(method), net.state_dict()) < 1e-12


def test_a_visit_is_the_samples_mean_from_where_the_last_one_left_the_model() -> None:
    method, down, sent = fedcluster(clusters=2), {}, []
    method.on_client_start = lambda client, m: down.update({client: {n: v.clone() for n, v in m.items()}})  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: sent.append(list(messages))  # type: ignore[attr-defined]
    fit(method, blobs(MANY), rounds=1)
    assert len(sent) == 2
    for messages, after in zip(sent, (down[sent[1][0].client], weights(method)), strict=True):
        total = sum(m.samples for m in messages)
        mean = {name: sum(m.tensors[name] * m.samples for m in messages) / total for name in after}
        assert largest_difference(mean, after) < 1e-12


def test_groups_without_a_client_in_the_cohort_are_not_visited() -> None:
    method, visits = fedcluster(clusters=7), []
    method.on_before_aggregate = lambda messages: visits.append(len(messages))  # type: ignore[attr-defined]
    fit(method, blobs(MANY, fraction=0.3), rounds=3)
    assert visits == [1] * 6


def test_groups_by_dominant_class() -> None:
    data, method = blobs((40,) * 8), fedcluster(clusters=4, groups="dominant")
    fit(method, data, rounds=1)
    classes = [int(dominant_class(LocalData(data.federation, client))) for client in range(8)]
    assert classes == [0, 1, 2, 3] * 2
    assert method.assignment() == classes
    maps = torch.arange(CLASSES).repeat(8, 1)
    maps[4] = torch.tensor([1, 0, 2, 3])  # calls the first two classes by each other's name
    mapped = replace(data.federation, label_maps=maps)
    assert [int(dominant_class(LocalData(mapped, client))) for client in (0, 4)] == [0, 1]


def test_everyone_has_the_same_model_and_groups_do_help_nobody_to_another() -> None:
    method = fedcluster()
    fit(method, blobs(MANY), rounds=1)
    for name, value in entries(method.net).items():
        assert {method.personal_state(client)[name].data_ptr() for client in range(7)} == {value.data_ptr()}
    other = FedAvg(mlp(), lr=0.1, batch_size=8, engine="stacked")
    fit(other, blobs(MANY), rounds=1)
    assert largest_difference(weights(method), weights(other)) > 1e-3


@pytest.mark.filterwarnings("ignore:Round 0")
def test_a_group_whose_only_client_diverges_leaves_the_model_as_it_is() -> None:
    method = fedcluster(clusters=4)
    leave = method.leave

    def broken(state: Any, received: Any, me: Any) -> Reply:
        reply = leave(state, received, me)
        return reply._replace(up={name: v * torch.nan for name, v in reply.up.items()}) if me.number == 2 else reply

    method.leave = broken  # type: ignore[method-assign]
    run = fit(method, blobs(), rounds=1)
    assert run.callback_metrics["clients/left_out"] == 1
    assert run.callback_metrics["clients/trained"] == 3
    others = fedcluster(clusters=4)
    others.cohort = lambda round: [0, 1, 3]  # type: ignore[method-assign]
    fit(others, blobs(), rounds=1)
    assert largest_difference(weights(method), weights(others)) == 0
    method.leave = lambda state, received, me: Reply(  # type: ignore[method-assign]
        {name: value * torch.nan for name, value in state.items()}, {}
    )
    with pytest.raises(FederationError, match="are not finite"):
        fit(method, blobs(), rounds=1)


def test_refusals() -> None:
    with pytest.raises(FederationError, match="4 clients cannot form 5 groups: set clusters to 4 or less"):
        fit(fedcluster(clusters=5), blobs(), rounds=1)
    with pytest.raises(FederationError, match="groups must be random or dominant"):
        fedcluster(groups="even")
