"""Impossible requests: one sentence that says what is wrong and what works, and what it names does work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
    PartitionScheme,
    Unimodal,
)
from fl_lightning.errors import FederationError

LABELS = torch.arange(1000) % 10


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(FederationError) as caught:
        make()
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert ". " not in message  # one sentence
    return message


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        (lambda: IID(0), "clients must be 1 or more, not 0"),
        (lambda: DominantClass(50, 1.5), "eta must lie between 0 and 1, not 1.5"),
        (lambda: DominantClass(50, -0.1), "eta must lie between 0 and 1, not -0.1"),
        (lambda: DominantClass(50, 0.5, 0), "shards_per_class must be 1 or more"),
        (lambda: MajorMinor(20, 1.2), "similarity must lie between 0 and 1, not 1.2"),
        (lambda: Dirichlet(10, 0.0), "alpha must be greater than 0"),
        (lambda: Dirichlet(10, 1.0, min_samples=1), "min_samples must be 2 or more"),
        (lambda: ByUser(10, 1), "min_samples must be 2 or more"),
        (lambda: ByUser(0), "clients must be 1 or more"),
        (lambda: LabelSkew("A", samples_per_agent=0), "samples_per_agent must be 1 or more"),
        (lambda: Multimodal([[0, 1], [2]]), "clients each"),
        (lambda: Multimodal([[0, 1], [2]], [2]), "as many client counts"),
        (lambda: Multimodal([[0, 1], [1]], [2, 2]), "one mode only"),
        (lambda: Multimodal("cifar"), "mnist, fashion_mnist"),  # type: ignore[arg-type]
        (lambda: Multimodal([[0], [1]], [2, 0]), "clients[1] must be 1 or more, not 0"),
    ],
)
def test_settings_that_no_data_can_serve(scheme: Callable[[], PartitionScheme], says: str) -> None:
    assert says in refused(scheme)


@pytest.mark.parametrize(
    ("scheme", "says", "works"),
    [
        (IID(501), "at most 500 clients", IID(500)),
        (Unimodal(33, 2), "use 35 clients (a multiple of 5)", Unimodal(35, 2)),
        (Unimodal(2, 2), "use 5 clients", Unimodal(5, 2)),
        (Unimodal(10, 11), "between 1 and the 10 classes", Unimodal(10, 10)),
        (Unimodal(600, 2), "use at most 500 clients", Unimodal(500, 2)),
        (Multimodal([[0, 1], [2, 10]], [2, 2]), "Class 10", Multimodal([[0, 1], [2, 9]], [2, 2])),
        (
            Multimodal([[0, 1, 2], [3, 4]], [4, 2]),
            "classes of mode 0 evenly: use 3",
            Multimodal([[0, 1, 2], [3]], [3, 2], 1),
        ),
        (Multimodal([[0, 1], [3, 4]], [200, 2]), "use at most 100 clients", Multimodal([[0, 1], [3, 4]], [100, 2])),
        (LabelSkew([0.5, 0.5]), "a list of 10", LabelSkew([0.5, 0.5] + [0.0] * 8)),
        (LabelSkew([0.5] * 10), "sum to 1, not 5", LabelSkew([0.1] * 10)),
        (LabelSkew([1.5, -0.5] + [0.0] * 8), "0 or more", LabelSkew([1.0] + [0.0] * 9)),
        (LabelSkew("C", 15), "use 20 agents", LabelSkew("C", 20)),
        (LabelSkew("B", samples_per_agent=81), "use at most 80", LabelSkew("B", samples_per_agent=80)),
        (ConceptShift(IID(4), agent=4), "one of 0 to 3", ConceptShift(IID(4), agent=3)),
        (DominantClass(30, 0.5, 20), "use 25 clients", DominantClass(25, 0.5, 20)),
        (DominantClass(8, 0.9, 20), "use eta=0.8 or a multiple of 10", DominantClass(8, 0.8, 20)),
        (DominantClass(50, 0.5, 200), "shards_per_class=80", DominantClass(50, 0.5, 80)),
        (MajorMinor(12), "use 10 clients (a multiple of 5)", MajorMinor(10)),
        (MajorMinor(20, majors=11), "between 1 and the 10", MajorMinor(20, majors=10)),
        (MajorMinor(500), "use at most 200 clients", MajorMinor(200)),
        (Dirichlet(200, 0.5), "at most 100 clients", Dirichlet(100, 1000.0, min_samples=5)),
        (Dirichlet(200, 0.01, min_samples=5), "greater alpha, fewer clients", Dirichlet(20, 1.0, min_samples=5)),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_settings_that_this_data_cannot_serve(scheme: PartitionScheme, says: str, works: PartitionScheme) -> None:
    assert says in refused(lambda: scheme(LABELS, 0))
    works(LABELS, 0)


@pytest.mark.parametrize("fraction", [0.0, 1.0, 1.5])
def test_a_test_part_that_is_none(fraction: float) -> None:
    assert "test_fraction must be greater than 0 and below 1" in refused(lambda: IID(5, fraction))


def test_a_seed_below_zero() -> None:
    assert "seed must be 0 or more, not -1" in refused(lambda: IID(5)(LABELS, -1))


def test_users_with_too_few_samples() -> None:
    users = torch.cat((torch.arange(100).repeat(6), torch.arange(400) // 40 + 200))  # 100 users with 6, ten with 40
    assert "use Sent140 or another partition" in refused(lambda: ByUser()(LABELS, 0))
    message = refused(lambda: ByUser(20, 10)(LABELS, 0, users=users))
    assert "Only 10 users" in message
    assert "min_samples=6 and at most 110 clients, or 10 clients" in message
    ByUser(110, 6)(LABELS, 0, users=users)
    ByUser(10, 10)(LABELS, 0, users=users)
    assert "No user (the busiest has 40)" in refused(lambda: ByUser(None, 41)(LABELS, 0, users=users))
    assert len(ByUser(None, 6)(LABELS, 0, users=users)) == 110


@pytest.mark.parametrize(
    ("labels", "extra", "says"),
    [
        (torch.zeros(0, dtype=torch.int64), {}, "one-dimensional tensor of integer labels"),
        (torch.zeros(4, 2, dtype=torch.int64), {}, "shape (4, 2)"),
        (torch.zeros(4), {}, "torch.float32"),
        (torch.tensor([0, -1]), {}, "smallest is -1"),
        (LABELS, {"train_size": 0}, "between 1 and the 1000 labels"),
        (LABELS, {"train_size": 1001}, "not 1001"),
        (LABELS, {"users": [1, 2]}, "1000 labels but 2 users"),
    ],
)
def test_labels_that_are_no_labels(labels: Tensor, extra: dict[str, object], says: str) -> None:
    assert says in refused(lambda: IID(2)(labels, 0, **extra))  # type: ignore[arg-type]


def test_a_class_without_samples() -> None:
    labels = torch.tensor([0, 2] * 50)
    assert "Class 1 has 0 samples" in refused(lambda: Unimodal(3, 1)(labels, 0))
    assert refused(lambda: MajorMinor(3)(labels, 0))


def test_clients_that_would_be_empty() -> None:
    labels = torch.arange(30) % 3
    assert "get no training samples" in refused(lambda: LabelSkew("A", 30)(labels, 0))
