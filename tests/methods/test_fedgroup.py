"""FedGroup: the cold start, the groups it forms, who joins which, and clients that have none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD

from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedGroup, fedgroup
from fl_lightning.methods.fedgroup import cosine_features, gram_matrix, k_means
from fl_lightning.methods.lib.adaptation import fit_entries, fitting
from fl_lightning.nets import LeNetBN
from fl_lightning.parties import LocalData, Reply
from tests.support import blobs, fit, largest_difference, mlp, planted, weights


def group(**kwargs: Any) -> FedGroup:
    return FedGroup(
        mlp(), **{"clusters": 2, "cold_steps": 10, "lr": 0.1, "batch_size": 8, "engine": "stacked", **kwargs}
    )


@pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
def test_one_group_is_fedavg_from_the_initial_model_and_the_mean_update(engine: str) -> None:
    method = group(clusters=1, engine=engine, epochs=2)
    fit(method, blobs(), rounds=3)
    start = mlp().double()
    other = FedAvg(mlp(), lr=0.1, batch_size=8, epochs=2, engine=engine).double()
    state = {name: value.clone() for name, value in start.state_dict().items()}
    cold = fitting(other, other.trainable_names, 10, 10, "cold start")
    federation = blobs().federation
    trained = fit_entries(other, cold, [LocalData(federation, client) for client in range(4)], [state] * 4)
    mean = {name: state[name] + sum(own[name] - state[name] for own in trained) / 4 for name in state}
    other.net.load_state_dict(mean)
    fit(other, blobs(), rounds=3)
    assert largest_difference(weights(method), weights(other)) < 1e-12


def test_cold_start_takes_exactly_its_steps_and_clients_keep_nothing_of_it() -> None:
    """Clients with one to five batches an epoch all take ten steps; losses and rounds are those of the round."""
    method, steps = group(), []
    train = method.engine.train
    method.engine.train = lambda *args: [steps.append(r.steps) or r for r in train(*args)]  # type: ignore[method-assign, func-returns-value]
    fit(method, blobs((8, 40, 19, 27)), rounds=1)
    assert sorted(steps[:4]) == [10] * 4
    assert [method.snapshots[c].rounds for c in range(4)] == [1] * 4
    assert [method.snapshots[c].steps for c in range(4)] == [1, 5, 3, 4]
    assert method.summary["clients/trained"] == 4


def test_planted_groups_are_found_and_sizes_sum_to_the_number_of_clients() -> None:
    method = group(epochs=2)
    run = fit(method, planted(), rounds=6)
    found = method.assignment()
    assert found in ([0, 1] * 4, [1, 0] * 4)
    assert sorted(method.groups) == list(range(8))
    assert float(run.callback_metrics["test/acc"]) > 0.9


def test_groups_models_and_references_after_the_cold_start() -> None:
    method, sent, after = group(), {}, []
    start = {name: value.double() for name, value in mlp().state_dict().items()}

    def note(messages: list[Any]) -> None:
        if method.stage.name != "train":
            sent.update({m.client: m.tensors for m in messages})
        else:
            after.extend({n: v.clone() for n, v in method.model_state(q).items()} for q in range(2))

    method.on_before_aggregate = note  # type: ignore[attr-defined]
    fit(method, planted(), rounds=1)
    for q in range(2):
        own = [sent[client] for client in range(8) if method.groups[client] == q]
        mean = {name: sum(t[name] for t in own) / len(own) for name in start}
        assert largest_difference(after[q], mean) < 1e-12
        assert largest_difference(method.references[q], {name: mean[name] - start[name] for name in start}) < 1e-12


def test_groups_begin_where_the_cold_start_led_whatever_the_servers_optimizer() -> None:
    plain, adaptive = group(), group(server_optimizer=partial(torch.optim.Adam, lr=0.02))
    begun: list[list[dict[str, torch.Tensor]]] = []
    for method in (plain, adaptive):

        def note(messages: list[Any], method: Any = method) -> None:
            if method.stage.name == "train":
                begun.append([{n: v.clone() for n, v in method.model_state(q).items()} for q in range(2)])

        method.on_before_aggregate = note  # type: ignore[attr-defined]
        fit(method, planted(), rounds=1)
    for one, other in zip(*begun, strict=True):
        assert largest_difference(one, other) == 0
    moments = adaptive.optimizers().state  # type: ignore[union-attr]
    assert {float(m["step"]) for m in moments.values()} == {1.0}  # of the first round, none of the cold start


@pytest.mark.filterwarnings("ignore:Round 0")
def test_a_newcomer_that_diverges_in_the_cold_start_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedgroup, "PER_GROUP", 2)
    method = group()
    leave = method.leave

    def broken(state: Any, received: Any, me: Any) -> Reply:
        reply = leave(state, received, me)
        spoilt = {n: v * torch.nan for n, v in reply.up.items()}
        return reply._replace(up=spoilt) if me.stage == fedgroup.JOIN else reply

    method.leave = broken  # type: ignore[method-assign]
    run = fit(method, planted(), rounds=1)
    assert len(method.groups) == 4
    assert run.callback_metrics["clients/trained"] == 8
    method = group()
    method.leave = lambda state, received, me: Reply(  # type: ignore[method-assign]
        {name: value * torch.nan for name, value in state.items()}, {}
    )
    with pytest.raises(FederationError, match=r"updates of all 4 clients .* are not finite"):
        fit(method, planted(), rounds=1)


def test_a_second_fit_goes_on_with_the_groups_and_their_models() -> None:
    method, stages = group(), []
    fit(method, planted(), rounds=2)
    groups, models = dict(method.groups), [{n: v.clone() for n, v in method.model_state(q).items()} for q in range(2)]
    method.on_before_aggregate = lambda messages: stages.append(method.stage.name)  # type: ignore[attr-defined]
    method.local = replace(method.local, lr=0.0)
    fit(method, planted(), rounds=2)
    assert stages == ["train", "train"]
    assert method.groups == groups
    for q in range(2):
        assert largest_difference(method.model_state(q), models[q]) < 1e-15


def test_others_take_the_same_steps_and_join_the_nearest_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedgroup, "PER_GROUP", 2)
    method, stages, sent, initial = group(), [], {}, mlp().double().state_dict()

    def note(messages: list[Any]) -> None:
        stages.append((method.stage.name, [m.client for m in messages]))
        if method.stage.name != "train":
            sent.update({m.client: m.tensors for m in messages})

    def received(client: int, message: dict[str, torch.Tensor]) -> None:
        if method.stage.name != "train":
            assert largest_difference(message, initial) == 0  # also for the others

    method.on_client_start = received  # type: ignore[attr-defined]
    method.on_before_aggregate = note  # type: ignore[attr-defined]
    fit(method, planted(), rounds=2)
    assert [name for name, _ in stages] == ["cold start", "newcomers", "train", "train"]
    picked, others = stages[0][1], stages[1][1]
    assert len(picked) == len(others) == 4
    assert sorted(picked + others) == list(range(8)) == sorted(method.groups)
    for client in others:
        dw = torch.cat([(sent[client][n] - method.start[n]).flatten() for n in method.trainable_names])
        refs = [torch.cat([method.references[q][n].flatten() for n in method.trainable_names]) for q in range(2)]
        distances = [float((1 - torch.cosine_similarity(dw, ref, 0)) / 2) for ref in refs]
        assert method.groups[client] == distances.index(min(distances))
    assert method.assignment() in ([0, 1] * 4, [1, 0] * 4)


def test_a_client_without_a_group_is_evaluated_after_a_cold_start_of_its_own() -> None:
    method, data = group(), planted()
    run = fit(method, data, rounds=2)
    whole, models = method.assignment(), [method.personal_state(client) for client in range(8)]
    for client in (2, 5):
        del method.groups[client]
    assert method.assignment() == whole
    for client, model in enumerate(models):
        again = method.personal_state(client)
        assert {n: v.data_ptr() for n, v in again.items()} == {n: v.data_ptr() for n, v in model.items()}
    assert sorted(method.groups) == [0, 1, 3, 4, 6, 7]
    assert run.validate(method, data, verbose=False)[0]["test/acc"] > 0.5


def test_before_the_first_round_everyone_has_the_initial_model() -> None:
    method = group()
    fit(method, blobs(), rounds=0)
    assert method.assignment() == [0, 0, 0, 0]


def test_updates_are_those_of_trainable_parameters() -> None:
    method = FedGroup(LeNetBN())
    method.start = method.server_state()
    assert method.update_of(method.server_state()).keys() == set(method.trainable_names)


def test_twenty_clients_per_group_start_and_k_means_restarts_ten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    method, made = group(clusters=1), []
    fit(method, blobs([8] * 30), rounds=0)
    assert [len(stage.clients) for stage in method.stages(0, [0])] == [20, 10, 1]
    monkeypatch.setattr(fedgroup, "KMeans", lambda *args, **kwargs: made.append(kwargs) or KMeans(*args, **kwargs))
    k_means(np.eye(4), 2, 0)
    assert [(kwargs["init"], kwargs["n_init"]) for kwargs in made] == [("k-means++", 10)]


def test_features_are_those_of_scikit_learns_svd() -> None:
    rng = np.random.default_rng(0)
    updates = rng.standard_normal((9, 40)) + 3 * rng.standard_normal(40)
    states = [{"a": torch.tensor(row[:15]).view(3, 5), "b": torch.tensor(row[15:])} for row in updates]
    gram = gram_matrix(states)
    np.testing.assert_allclose(gram, updates @ updates.T)
    directions = TruncatedSVD(3, algorithm="arpack").fit(updates).components_
    cosines = updates @ directions.T / np.linalg.norm(updates, axis=1)[:, None]
    np.testing.assert_allclose(np.abs(cosine_features(gram, 3)), np.abs(cosines), atol=1e-8)


def test_signs_of_singular_vectors_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    features = cosine_features(gram_matrix([{"a": torch.tensor(row)} for row in rng.standard_normal((30, 12))]), 3)
    for signs in ([-1, 1, 1], [1, -1, -1], [-1, -1, -1]):
        assert k_means(features * signs, 3, 0) == k_means(features, 3, 0)


def test_few_and_equal_and_motionless_clients() -> None:
    updates = [{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.0])}, {"a": torch.zeros(2)}]
    features = cosine_features(gram_matrix(updates), 4)
    assert features.shape == (3, 4)
    np.testing.assert_allclose(np.abs(features[:, 0]), [1, 1, 0], atol=1e-9)
    assert not features[:, 1:].any()
    labels = k_means(features, 4, 0)
    assert labels[0] == labels[1] != labels[2]
    for sizes in ((19,), (19, 9)):
        method = group(clusters=4)
        fit(method, blobs(sizes), rounds=2)
        assert set(method.groups) == set(range(len(sizes)))
        empty = set(range(4)) - set(method.groups.values())
        for q in empty:
            assert torch.equal(method.model_state(q)["fc1.weight"], mlp().fc1.weight.double())
    still = group(lr=0.0)
    fit(still, blobs(), rounds=1)
    assert len(set(still.groups.values())) == 1


def test_a_client_that_diverges_in_the_cold_start_has_no_group_then_but_a_model() -> None:
    method, data = group(), planted()
    federation = data.federation
    federation.inputs[federation.train[3]] = float("inf")
    with pytest.warns(UserWarning, match="left out clients 3"):
        fit(method, data, rounds=1, limit_val_batches=0)
    assert 3 not in method.groups
    assert method.cluster_of(3) in (0, 1)


def test_fast_dev_run_and_refusals(tmp_path: Path) -> None:
    method = group()
    fit(method, planted(), rounds=1, fast_dev_run=True)
    assert len(method.groups) == 2
    assert len(method.assignment()) == 8
    with pytest.raises(FederationError, match="cold_steps must be 1 or more"):
        group(cold_steps=0)
