"""The numbers of the papers' partitions on the real labels (docs/partitions.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning.datamodules import (
    CIFAR10,
    IID,
    MNIST,
    ConceptShift,
    DominantClass,
    FashionMNIST,
    LabelSkew,
    MajorMinor,
    Multimodal,
    Partition,
    Unimodal,
)
from fl_lightning.datamodules.partitions.dominant import DominantClass as Dominant
from fl_lightning.datamodules.summary import class_counts
from fl_lightning.errors import FederationError

SETS = {"mnist": MNIST, "fashion_mnist": FashionMNIST, "cifar10": CIFAR10}


@pytest.fixture(scope="session")
def labels(real_data: Path) -> dict[str, tuple[Tensor, int]]:
    """Labels and training size of the three image sets."""
    found = {}
    for name, data in SETS.items():
        try:
            samples = data(root=str(real_data), download=False).samples
        except ValueError as error:
            pytest.skip(str(error))
        assert samples.train_size is not None
        found[name] = samples.targets, samples.train_size
    return found


def whole(part: Partition, labels: Tensor) -> np.ndarray:
    return class_counts(part.train, labels, 10) + class_counts(part.test, labels, 10)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("mnist", 271, 337), ("fashion_mnist", 300, 300), ("cifar10", 250, 250)]
)
def test_unimodal_shard_sizes(labels: dict[str, tuple[Tensor, int]], name: str, low: int, high: int) -> None:
    y, size = labels[name]
    part = Unimodal(100, 2)(y, 1, train_size=size)
    held = whole(part, y)
    shard = np.bincount(y[:size]) // 20
    assert (shard.min(), shard.max()) == (low, high)
    assert (held % shard == 0).all()
    assert (held.sum(axis=0) == 20 * shard).all()
    assert ((held // shard).sum(axis=1) == 2).all()
    assert (part.test.sizes.numpy() == np.floor(held.sum(axis=1) * 0.2 + 0.5)).all()


@pytest.mark.parametrize(
    ("name", "modes", "clients", "shards", "size"),
    [
        ("mnist", "mnist", (100, 20), (40, 8), 135),
        ("fashion_mnist", "fashion_mnist", (90, 20), (30, 10), 200),
        ("cifar10", "cifar10", (90, 20), (30, 10), 166),
        ("fashion_mnist", "fashion_mnist_tops", (90, 20), (36, 8), 166),
    ],
)
def test_multimodal(
    labels: dict[str, tuple[Tensor, int]],
    name: str,
    modes: str,
    clients: tuple[int, int],
    shards: tuple[int, int],
    size: int,
) -> None:
    y, train_size = labels[name]
    part = Multimodal(modes)(y, 2, train_size=train_size)  # type: ignore[arg-type]
    held, mode = whole(part, y), np.array(part.meta["mode"])
    majority = {
        "mnist": [1, 3, 5, 7, 9],
        "fashion_mnist": [0, 1, 2, 3, 4, 8],
        "fashion_mnist_tops": [1, 2, 3, 4, 8],
        "cifar10": [2, 3, 4, 5, 6, 7],
    }[modes]
    assert np.bincount(mode).tolist() == list(clients)
    assert set(np.flatnonzero(held[mode == 0].any(axis=0))) == set(majority)
    assert set(np.flatnonzero(held[mode == 1].any(axis=0))) == set(range(10)) - set(majority)
    assert set(held.sum(axis=0)[majority]) == {shards[0] * size}
    assert set(np.delete(held.sum(axis=0), majority)) == {shards[1] * size}
    assert set(held.sum(axis=1)) == {2 * size}
    assert set(part.test.sizes.tolist()) == {round(2 * size * 0.2)}


@pytest.mark.parametrize(
    ("base", "shares"),
    [
        ("A", [0.1] * 10),
        ("B", [0.25] * 4 + [0] * 6),
        ("C", [0, 0, 0, 0.1, 0.2, 0.4, 0.2, 0.1, 0, 0]),
    ],
)
def test_label_skew(labels: dict[str, tuple[Tensor, int]], base: str, shares: list[float]) -> None:
    y, size = labels["mnist"]
    part = LabelSkew(base)(y, 3, train_size=size)  # type: ignore[arg-type]
    train, test = class_counts(part.train, y, 10), class_counts(part.test, y, 10)
    n, m = np.bincount(y[:size]), np.bincount(y[size:])
    p = np.array(shares)
    assert (train[0] == np.floor(p * n + 1e-9)).all()
    assert (train[1] == np.floor(np.roll(p, 1) * n + 1e-9)).all()
    assert (test[0] == np.floor(p / p.max() * m + 1e-9)).all()
    assert (n - train.sum(axis=0) < 10).all()
    if base == "B":
        assert set(np.flatnonzero(train[1])) == {1, 2, 3, 4}
        assert test[0].tolist() == [*m[:4], 0, 0, 0, 0, 0, 0]


def test_label_skew_on_balanced_data_uses_everything(labels: dict[str, tuple[Tensor, int]]) -> None:
    y, size = labels["fashion_mnist"]
    for base in ("A", "B", "C"):
        part = LabelSkew(base)(y, 3, train_size=size)
        assert len(part.train.flat.unique()) == 60_000


def test_concept_shift_relabels_everyone_but_alice(labels: dict[str, tuple[Tensor, int]]) -> None:
    y, size = labels["mnist"]
    plain, part = (s(y, 4, train_size=size) for s in (LabelSkew("B"), ConceptShift(LabelSkew("B"))))
    assert part.index_hash == plain.index_hash
    assert part.label_maps is not None
    assert part.label_maps[0].tolist() == list(range(10))
    assert len({tuple(row) for row in part.label_maps.tolist()}) == 10


@pytest.mark.parametrize("clients", [20, 50, 100])
@pytest.mark.parametrize("eta", [0.3, 0.5, 1.0])
def test_dominant_class_uses_every_shard_once(labels: dict[str, tuple[Tensor, int]], clients: int, eta: float) -> None:
    y, size = labels["cifar10"]
    part = DominantClass(clients, eta)(y, 5, train_size=size)
    held = class_counts(part.train, y, 10)
    shards = held // 24  # 80% of 6,000 in 200 shards
    assert (held % 24 == 0).all()
    assert len(part.train.flat.unique()) == 48_000
    assert (shards.sum(axis=0) == 200).all()
    assert (shards.sum(axis=1) == 2000 // clients).all()
    dominant = shards[np.arange(clients), np.arange(clients) % 10]
    reserved = int(eta * 2000 / clients + 0.5)
    assert dominant.min() >= reserved
    assert (dominant - reserved).sum() <= 100
    assert eta < 1 or (np.count_nonzero(shards, axis=1) == 1).all()
    assert part.global_test is not None
    assert np.bincount(y[part.global_test]).tolist() == [1200] * 10
    assert (class_counts(part.test, y, 10) == shards * 6).all()


def test_dominant_class_draws_the_rest_by_clipped_normal_weights() -> None:
    """Half of a client's other classes have about the weight zero: P(N(0.5, 1) <= 0) is 0.31."""
    from fl_lightning.seeding import stream

    absent = [
        (np.delete(row, k % 10) == 0).mean()
        for seed in range(20)
        for k, row in enumerate(Dominant(20, 0.1, 2000).assign(10, stream(seed, "x"))[:5])
    ]
    assert 0.2 < np.mean(absent) < 0.4


def test_two_classes_as_in_sentiment140() -> None:
    y = torch.arange(63_000) % 2
    part = DominantClass(50, 0.8)(y, 0)
    held = class_counts(part.train, y, 2)
    assert set(held.sum(axis=1)) == {8 * 126}
    assert all(held[k, k % 2] >= 6 * 126 for k in range(50))


@pytest.mark.parametrize(
    ("name", "train", "test"), [("mnist", 2710, 446), ("fashion_mnist", 3000, 500), ("cifar10", 2500, 500)]
)
def test_major_minor(labels: dict[str, tuple[Tensor, int]], name: str, train: int, test: int) -> None:
    y, size = labels[name]
    part = MajorMinor(20, 0.2)(y, 6, train_size=size)
    assert set(part.train.sizes.tolist()) == {train}
    assert set(part.test.sizes.tolist()) == {test}
    for index, n in ((part.train, train), (part.test, test)):
        held = class_counts(index, y, 10)
        majors = np.array(part.meta["major_classes"])
        minor = np.ones_like(held, dtype=bool)
        np.put_along_axis(minor, majors, False, axis=1)
        assert np.abs(held[~minor] / n - 0.42).max() < 0.001
        assert np.abs(held[minor] / n - 0.02).max() < 0.0003
    assert np.bincount(np.array(part.meta["major_classes"]).ravel()).tolist() == [4] * 10
    if name != "mnist":
        assert len(part.train.flat.unique()) == size
        assert len(part.test.flat.unique()) == 10_000


def test_iid_with_so_many_samples_to_train_on_leaves_the_rest_to_nobody() -> None:
    labels = torch.arange(1000) % 10
    part = IID(4, train_samples=80)(labels, seed=0, train_size=900)
    assert part.train.sizes.tolist() == [80] * 4
    assert part.test.sizes.tolist() == [20] * 4
    assert len(torch.cat((part.train.flat, part.test.flat)).unique()) == 400
    with pytest.raises(FederationError, match="9 clients with 80 samples to train on need 900 rows, and there are 800"):
        IID(9, train_samples=80)(labels, seed=0, train_size=800)
    with pytest.raises(FederationError, match="train_samples must be 1 or more, not 0"):
        IID(4, train_samples=0)
