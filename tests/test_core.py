"""Streams, messages, snapshots and federations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning import seeding
from fl_lightning.engine.schedule import batch_sizes
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex, Federation
from fl_lightning.metrics import ClientAccuracy, client_summary, worst_tenth
from fl_lightning.snapshots import ClientSnapshot, SnapshotStore
from fl_lightning.wire import Message, fast_copy, is_finite, message_weights, nbytes, weighted_mean


def test_streams_differ_in_each_of_their_four_coordinates() -> None:
    base = (1, "batches", 2, 3)
    draws = {
        tuple(seeding.stream(*args).integers(2**60, size=4))
        for args in (
            base,
            (2, *base[1:]),
            (1, "noise", 2, 3),
            (1, "batches", 3, 3),
            (1, "batches", 2, 4),
            (1, "batches", 3, 2),
        )
    }
    assert len(draws) == 6
    assert tuple(seeding.stream(*base).integers(2**60, size=4)) in draws


def test_streams_do_not_collide() -> None:
    """A hundred rounds of a hundred clients: a generator seeded with 32 bits would repeat itself by chance."""
    firsts = {int(seeding.stream(0, "batches", r, c).integers(2**63)) for r in range(100) for c in range(100)}
    assert len(firsts) == 10_000


def test_draws_are_the_same_in_every_precision() -> None:
    for draw in (seeding.uniform, seeding.normal):
        low = draw(seeding.stream(0, "noise"), (5, 2), torch.float32)
        high = draw(seeding.stream(0, "noise"), (5, 2), torch.float64)
        assert torch.equal(low, high.float())


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_weights_sum_to_one(samples: list[int]) -> None:
    messages = [Message(i, {}, n) for i, n in enumerate(samples)]
    for weighting in ("samples", "uniform"):
        weights = message_weights(messages, weighting)
        assert sum(weights) == pytest.approx(1.0)
        assert min(weights) > 0
    assert message_weights(messages, "samples")[0] == pytest.approx(samples[0] / sum(samples))


def test_means_are_accumulated_in_float64() -> None:
    """In float32 the small terms would vanish beside 2**24."""
    values = [2.0**24, *([1.0] * 64)]
    messages = [Message(i, {"w": torch.tensor([v])}, 1) for i, v in enumerate(values)]
    mean = weighted_mean(messages, [1.0] * 65)
    assert mean["w"].dtype == torch.float32
    assert float(mean["w"]) == 2.0**24 + 64


def test_mean_does_not_depend_on_the_order_of_messages() -> None:
    torch.manual_seed(0)
    messages = [Message(i, {"w": torch.randn(50, dtype=torch.float64)}, 1) for i in range(9)]
    weights = torch.rand(9).tolist()
    there = weighted_mean(messages, weights)
    back = weighted_mean(messages[::-1], weights[::-1])
    assert torch.equal(there["w"], back["w"])


def test_counters_take_the_maximum() -> None:
    messages = [Message(i, {"n": torch.tensor(n)}, 1) for i, n in enumerate((3, 7, 5))]
    assert int(weighted_mean(messages, [1 / 3] * 3)["n"]) == 7


def test_bytes_on_the_wire() -> None:
    tensors = {
        "w": torch.zeros(10),
        "d": torch.zeros(3, dtype=torch.float64),
        "mask": torch.zeros(17, dtype=torch.bool),
    }
    assert nbytes(tensors) == 40 + 24 + 3
    assert Message(0, tensors, 1).nbytes == 67


def test_finite() -> None:
    assert is_finite({"a": torch.ones(2), "n": torch.tensor(3)})
    assert not is_finite({"a": torch.tensor([1.0, float("nan")])})
    assert not is_finite({"a": torch.tensor([float("inf")])})


def test_fast_copy_changes_no_value_and_shares_no_memory() -> None:
    state = {"conv": torch.randn(4, 3, 5, 5), "first": torch.randn(4, 1, 5, 5), "fc": torch.randn(4, 3)}
    fast = fast_copy(state)
    assert fast["conv"].is_contiguous(memory_format=torch.channels_last)
    assert fast["first"].stride() == (25, 1, 5, 1)
    assert all(torch.equal(fast[name], state[name]) for name in state)
    assert not any(fast[name].data_ptr() == state[name].data_ptr() for name in state)


def test_store_returns_an_empty_snapshot_for_a_client_that_never_trained() -> None:
    store = SnapshotStore()
    assert store[3] == ClientSnapshot()
    assert 3 not in store
    store[3] = store[3].after({"w": torch.ones(2)}, round=4, steps=5)
    store[1] = store[1].after({}, round=4, steps=2)
    store[3] = store[3].after({"w": torch.zeros(2)}, round=6, steps=5)
    assert (store[3].rounds, store[3].steps, store[3].last_round) == (2, 10, 6)
    assert list(store) == [1, 3]
    del store[1]
    assert len(store) == 1
    again = SnapshotStore()
    again.load_state_dict(store.state_dict())
    assert torch.equal(again[3].private["w"], torch.zeros(2))
    assert again[3].steps == 10


@given(st.lists(st.lists(st.integers(0, 50), max_size=6), min_size=1, max_size=8))
def test_client_index_keeps_every_list(parts: list[list[int]]) -> None:
    index = ClientIndex.of(parts)
    assert [part.tolist() for part in index] == parts
    assert index.sizes.tolist() == [len(part) for part in parts]
    with pytest.raises(IndexError):
        index[len(parts)]


def test_federation_rejects_data_that_cannot_be_trained_on() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])

    def make(train: list[list[int]], test: list[list[int]]) -> Federation:
        return Federation(x, y, ClientIndex.of(train), ClientIndex.of(test), 2)

    for train, test, sentence in (
        ([], [], "no clients"),
        ([[0]], [[1], [2]], "1 clients have training data but 2 have test data"),
        ([[0], []], [[1], [2]], "1 of 2 clients have no train samples .the first is client 1"),
        ([[0], [1]], [[], [2]], "no test samples"),
        ([[0], [9]], [[1], [2]], "past the end"),
    ):
        with pytest.raises(FederationError, match=sentence):
            make(train, test)


def test_gather_normalises_relabels_and_augments() -> None:
    inputs = torch.arange(8, dtype=torch.uint8).view(4, 2)
    federation = Federation(
        inputs,
        torch.tensor([0, 1, 0, 1]),
        ClientIndex.of([[0, 1], [2, 3]]),
        ClientIndex.of([[0], [2]]),
        num_classes=2,
        mean=torch.tensor(2.0),
        std=torch.tensor(4.0),
        label_maps=torch.tensor([[0, 1], [1, 0]]),
        augment=lambda x, rng: x + rng.integers(1, 2),
    )
    x, y = federation.gather([0, 1], torch.tensor([[0, 1], [2, 3]]), torch.float64)
    torch.testing.assert_close(x, (inputs.double().view(2, 2, 2) - 2) / 4)
    assert y.tolist() == [[0, 1], [1, 0]]
    changed, _ = federation.gather([1], torch.tensor([[2, 3]]), torch.float64, [np.random.default_rng(0)])
    torch.testing.assert_close(changed[0], (inputs[2:].double() + 1 - 2) / 4)


@pytest.mark.parametrize(
    ("size", "batch", "statistics", "expected"),
    [
        (20, 8, False, (2, 4)),
        (17, 8, False, (2, 1)),
        (17, 8, True, (2, 0)),
        (18, 8, True, (2, 2)),
        (5, 8, True, (0, 5)),
        (1, 8, True, (0, 0)),
        (5, 1, False, (5, 0)),
        (5, 1, True, (0, 0)),
    ],
)
def test_batch_sizes(size: int, batch: int, statistics: bool, expected: tuple[int, int]) -> None:
    assert batch_sizes(size, batch, statistics) == expected


def test_worst_tenth_is_at_least_one_client() -> None:
    assert worst_tenth(torch.tensor([0.5, 0.1, 0.9])) == pytest.approx(0.1)
    assert worst_tenth(torch.arange(11.0)) == pytest.approx(0.5)
    empty = client_summary(torch.tensor([float("nan")]))
    assert all(value.isnan() for value in empty.values())


def test_client_accuracy_adds_up_over_updates() -> None:
    metric = ClientAccuracy(2)
    for correct in (1, 2):
        metric.update(torch.tensor([1]), torch.tensor([correct]), torch.tensor([1.0]), torch.tensor([4]))
    computed = metric.compute()
    assert float(computed["acc"][1]) == 3 / 8
    assert float(computed["loss"][1]) == 2 / 8
    assert computed["acc"][0].isnan()
