"""Properties of every partition, over sizes, clients and seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.datamodules import (
    IID,
    ByUser,
    ConceptShift,
    Dirichlet,
    DominantClass,
    LabelSkew,
    MajorMinor,
    Multimodal,
    Partition,
    PartitionScheme,
    Unimodal,
)
from fl_lightning.datamodules.summary import class_counts

seeds = st.integers(0, 2**32 - 1)
several = settings(max_examples=50, deadline=None, derandomize=True)


@st.composite
def pools(draw: st.DrawFn, least: int = 40, most: int = 90, classes: int | None = None) -> tuple[Tensor, int]:
    """Labels of a random pool, every class with ``least`` to ``most`` training rows, and the training size."""
    number = classes or draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(seeds))
    parts = []
    for low, high in ((least, most), (least // 2, most // 2)):
        parts.append(rng.permutation(np.repeat(np.arange(number), rng.integers(low, high, number))))
    return torch.from_numpy(np.concatenate(parts)), len(parts[0])


def counts(index: object, labels: Tensor) -> np.ndarray:
    return class_counts(index, labels, int(labels.max()) + 1)  # type: ignore[arg-type]


def check(part: Partition, labels: Tensor, overlapping_tests: bool = False) -> None:
    """Disjoint clients, no test row in anybody's training rows, indices of the data, nobody empty."""
    train, test = part.train.flat, part.test.flat
    assert len(part.train) == len(part.test) == len(part)
    assert len(train.unique()) == len(train)
    assert overlapping_tests or len(test.unique()) == len(test)
    assert all(len(t.unique()) == len(t) for t in part.test)
    held = test if part.global_test is None else torch.cat((test, part.global_test))
    assert not np.intersect1d(train.numpy(), held.numpy()).size
    assert int(torch.cat((train, held)).min()) >= 0
    assert int(torch.cat((train, held)).max()) < len(labels)
    assert int(part.train.sizes.min()) > 0
    assert int(part.test.sizes.min()) > 0
    assert all(len(values) == len(part) for values in part.meta.values())


def rows(part: Partition) -> Tensor:
    """All rows of all clients, sorted."""
    return torch.cat((part.train.flat, part.test.flat)).sort().values


@several
@given(pools(), seeds, st.integers(1, 12))
def test_iid_uses_every_training_row_and_differs_by_one_at_most(pool: tuple[Tensor, int], seed: int, n: int) -> None:
    labels, size = pool
    part = IID(n)(labels, seed, train_size=size)
    check(part, labels)
    assert rows(part).tolist() == list(range(size))
    total = part.train.sizes + part.test.sizes
    assert int(total.max() - total.min()) <= 1
    assert part.global_test is not None
    assert part.global_test.tolist() == list(range(size, len(labels)))


@several
@given(pools(), seeds, st.integers(1, 3), st.integers(1, 6), st.booleans())
def test_unimodal_gives_whole_shards_of_few_classes(
    pool: tuple[Tensor, int], seed: int, times: int, per_client: int, distinct: bool
) -> None:
    labels, size = pool
    classes = int(labels.max()) + 1
    per_client = min(per_client, classes)
    clients = classes * times
    part = Unimodal(clients, per_client, distinct)(labels, seed, train_size=size)
    check(part, labels)
    assert int(rows(part).max()) < size
    held = counts(part.train, labels) + counts(part.test, labels)
    shards, rest = np.divmod(held, np.bincount(labels[:size]) // (times * per_client))
    assert not rest.any()
    assert (shards.sum(axis=0) == times * per_client).all()
    assert (shards.sum(axis=1) == per_client).all()
    assert not distinct or shards.max() == 1


@several
@given(pools(least=60, classes=6), seeds, st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_multimodal_keeps_to_its_classes_and_to_one_size(
    pool: tuple[Tensor, int], seed: int, first: int, second: int, distinct: bool
) -> None:
    labels, size = pool
    modes, clients = [[0, 4], [1, 2, 5]], [2 * first, 3 * second]
    part = Multimodal(modes, clients, 2, distinct)(labels, seed, train_size=size)
    check(part, labels)
    held = counts(part.train, labels) + counts(part.test, labels)
    n = np.bincount(labels[:size], minlength=6)
    shard = min(*(n[[0, 4]] // (2 * first)), *(n[[1, 2, 5]] // (2 * second)))
    assert (held.sum(axis=1) == 2 * shard).all()
    assert part.meta["mode"] == [0] * clients[0] + [1] * clients[1]
    for mode, group in enumerate(modes):
        mine = held[np.array(part.meta["mode"]) == mode]
        assert not np.delete(mine, group, axis=1).any()
        assert set(np.unique(mine)) <= ({0, shard} if distinct else {0, shard, 2 * shard})


@several
@given(pools(), seeds, st.integers(1, 3), st.data())
def test_label_skew_takes_the_floor_of_each_share(
    pool: tuple[Tensor, int], seed: int, times: int, data: st.DataObject
) -> None:
    labels, size = pool
    classes = int(labels.max()) + 1
    base = data.draw(st.lists(st.integers(0, 3), min_size=classes, max_size=classes).filter(any))
    p = np.array(base) / sum(base)
    clients = classes * times
    part = LabelSkew(p.tolist(), clients)(labels, seed, train_size=size)
    check(part, labels, overlapping_tests=True)
    train, test = counts(part.train, labels), counts(part.test, labels)
    official = np.bincount(labels[:size]), np.bincount(labels[size:])
    for agent in range(clients):
        mine = np.roll(p, agent)
        assert (train[agent] == np.floor(mine * classes / clients * official[0] + 1e-9)).all()
        assert (test[agent] == np.floor(mine / mine.max() * official[1] + 1e-9)).all()
    assert (train.sum(axis=0) > official[0] - clients).all()
    assert int(part.train.flat.max()) < size <= int(part.test.flat.min())


@several
@given(pools(), seeds, st.integers(4, 30))
def test_label_skew_gives_exactly_the_samples_asked_for(pool: tuple[Tensor, int], seed: int, n: int) -> None:
    labels, size = pool
    clients = int(labels.max()) + 1
    part = LabelSkew("A", clients, samples_per_agent=n, test_samples=5)(labels, seed, train_size=size)
    check(part, labels, overlapping_tests=True)
    assert part.train.sizes.tolist() == [n] * clients
    assert part.test.sizes.tolist() == [5] * clients


@several
@given(pools(least=60, most=120), seeds, st.sampled_from([1, 2, 4]), st.floats(0, 1))
def test_dominant_class_uses_every_row_once(pool: tuple[Tensor, int], seed: int, times: int, eta: float) -> None:
    labels, size = pool
    classes = int(labels.max()) + 1
    clients, shards = classes * times, 20
    part = DominantClass(clients, eta, shards)(labels, seed, train_size=size)
    check(part, labels)
    assert rows(part).tolist() == list(range(len(labels)))
    assert part.global_test is not None
    assert part.global_test.tolist() == part.test.flat.sort().values.tolist()
    pooled = np.bincount(labels)
    assert (np.bincount(labels[part.global_test]) == np.floor(pooled * 0.2 + 0.5)).all()
    train, test = counts(part.train, labels), counts(part.test, labels)
    dominant = np.array(part.meta["dominant_class"])
    assert (dominant == np.arange(clients) % classes).all()
    own = train[np.arange(clients), dominant] / (train.sum(axis=0)[dominant] / shards)  # in shards
    assert (own > int(eta * shards / times + 0.5) - 1).all()
    # A client's test rows are cut where its training rows are: the same share of the class, up to one row an end.
    expected = train / train.sum(axis=0) * test.sum(axis=0)
    assert np.abs(test - expected).max() < 2


@several
@given(pools(), seeds, st.integers(1, 2), st.floats(0, 1), st.integers(1, 2))
def test_major_minor_has_equal_clients(
    pool: tuple[Tensor, int], seed: int, times: int, similarity: float, majors: int
) -> None:
    labels, size = pool
    classes = int(labels.max()) + 1
    clients = classes * times
    part = MajorMinor(clients, similarity, majors)(labels, seed, train_size=size)
    check(part, labels)
    assert len(set(part.train.sizes.tolist())) == len(set(part.test.sizes.tolist())) == 1
    assert int(part.train.flat.max()) < size <= int(part.test.flat.min())
    slots = np.bincount(np.array(part.meta["major_classes"]).ravel(), minlength=classes)
    assert (slots == times * majors).all()
    n = int(part.train.sizes[0])
    assert n >= classes * np.bincount(labels[:size]).min() // clients - 4
    for mine, chosen in zip(counts(part.train, labels), part.meta["major_classes"], strict=True):
        share = np.full(classes, similarity / classes)
        share[chosen] += (1 - similarity) / majors
        assert np.abs(mine - share * n).max() <= classes


@several
@given(pools(), seeds, st.integers(1, 8), st.floats(0.2, 50), st.integers(2, 6))
def test_dirichlet_uses_every_training_row(
    pool: tuple[Tensor, int], seed: int, n: int, alpha: float, least: int
) -> None:
    labels, size = pool
    part = Dirichlet(n, alpha, min_samples=least)(labels, seed, train_size=size)
    check(part, labels)
    assert rows(part).tolist() == list(range(size))
    assert int((part.train.sizes + part.test.sizes).min()) >= least


@several
@given(pools(), seeds, st.integers(2, 9))
def test_by_user_gives_a_user_to_each_client(pool: tuple[Tensor, int], seed: int, people: int) -> None:
    labels, size = pool
    users = np.random.default_rng(seed).integers(0, people, len(labels)) * 7
    least = 2
    eligible = [u for u, n in zip(*np.unique(users[:size], return_counts=True), strict=True) if n >= least]
    part = ByUser(max(1, len(eligible) - 1), least)(labels, seed, train_size=size, users=users)
    check(part, labels)
    assert len(set(part.meta["user"])) == len(part)
    for client, user in enumerate(part.meta["user"]):
        mine = torch.cat((part.train[client], part.test[client])).sort().values
        assert mine.tolist() == np.flatnonzero(users[:size] == user).tolist()


@several
@given(pools(), seeds, st.integers(2, 9), st.data())
def test_concept_shift_changes_labels_only(pool: tuple[Tensor, int], seed: int, n: int, data: st.DataObject) -> None:
    labels, size = pool
    agent = data.draw(st.integers(0, n - 1))
    plain = IID(n)(labels, seed, train_size=size)
    part = ConceptShift(IID(n), agent)(labels, seed, train_size=size)
    assert part.index_hash == plain.index_hash
    assert plain.label_maps is None
    assert part.label_maps is not None
    maps, same = part.label_maps, torch.arange(int(labels.max()) + 1)
    assert maps.shape == (n, len(same))
    assert torch.equal(maps.sort(dim=1).values, same.expand_as(maps))
    assert [bool((row == same).all()) for row in maps] == [client == agent for client in range(n)]


SCHEMES: list[PartitionScheme] = [
    IID(8),
    Unimodal(10, 2),
    Unimodal(10, 2, distinct=True),
    Multimodal([[0, 1], [2, 3]], [4, 4]),
    LabelSkew([0.4, 0.3, 0.2, 0.1, 0.0], 10),
    ConceptShift(LabelSkew("A", 5)),
    DominantClass(10, 0.5, 20),
    MajorMinor(5),
    Dirichlet(6, 0.5),
    ByUser(5, 10),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_same_seed_same_result_and_another_seed_another(scheme: PartitionScheme) -> None:
    labels = torch.arange(1000) % 5
    users = torch.arange(1000) // 50

    def run(seed: int) -> tuple[str, object]:
        np.random.seed(seed + 1)
        torch.manual_seed(seed + 1)
        part = scheme(labels, seed % 10, train_size=800, users=users)
        return part.index_hash, None if part.label_maps is None else part.label_maps.tolist()

    assert run(1) == run(11)
    assert run(1)[0] != run(2)[0]
    if run(1)[1] is not None:
        assert run(1)[1] != run(2)[1]


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_data_without_official_test_rows_can_be_dealt(scheme: PartitionScheme) -> None:
    labels = torch.arange(1000) % 5
    part = scheme(labels, 3, users=torch.arange(1000) // 50)
    check(part, labels, overlapping_tests=isinstance(scheme, LabelSkew | ConceptShift))


@pytest.mark.parametrize("scheme", [Unimodal(200, 2), Dirichlet(200, 0.3), IID(200)], ids=repr)
def test_train_and_test_of_a_client_have_one_distribution(scheme: PartitionScheme) -> None:
    """The sum of squared deviations from each client's own mix is what a random split gives (within 6 sigma)."""
    labels = torch.arange(60_000) % 10
    part = scheme(labels, 5)
    train, test = counts(part.train, labels), counts(part.test, labels)
    n, m, whole = train.sum(axis=1), test.sum(axis=1), train + test
    share = whole / whole.sum(axis=1, keepdims=True)
    variance = (m * n / (m + n - 1))[:, None] * share * (1 - share)  # hypergeometric
    z2 = ((test - m[:, None] * share) ** 2)[variance > 0.5] / variance[variance > 0.5]
    assert abs(z2.mean() - 1) < 6 * np.sqrt(2 / len(z2))


def test_distinct_shards_are_uniform_over_all_ways_to_deal_them() -> None:
    """Four clients with two of four classes each: 90 ways, all about equally often (chi-squared within 5 sigma)."""
    from fl_lightning.datamodules.partitions.shards import deal_shards

    rng = np.random.default_rng(0)
    draws = np.stack([deal_shards(4, 2, 4, True, rng).ravel() for _ in range(900)])
    _, times = np.unique(draws, axis=0, return_counts=True)
    expected = 900 / 90
    chi2 = ((times - expected) ** 2 / expected).sum() + (90 - len(times)) * expected
    assert abs(chi2 - 89) < 5 * np.sqrt(2 * 89)


def test_labels_may_be_a_tensor_an_array_or_a_list() -> None:
    labels = torch.arange(200) % 10
    parts = [ConceptShift(Unimodal(10))(given, 0) for given in (labels, labels.numpy(), labels.tolist())]
    assert all(torch.equal(part.train.flat, parts[0].train.flat) for part in parts[1:])
