"""Samples that are held out of clients' training data, and clients that have nothing to spare."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning.datamodules import IID, Digits, Pooled, TensorFederation, Unimodal
from fl_lightning.datamodules.partitions.deal import by_class
from fl_lightning.methods import FedAvg
from tests.support import CLASSES, FEATURES, fit, mlp, trainer


def cut(labels: list[int], sizes: list[int], fraction: float, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Labels of what is kept and of what is held out, by client."""
    classes = np.array(labels)
    kept, held = by_class(np.arange(len(labels)), np.array(sizes), classes, fraction, np.random.default_rng(seed))
    both = torch.cat((kept.flat, held.flat))
    assert both.sort().values.tolist() == list(range(len(labels)))
    return [classes[part.numpy()].tolist() for part in kept], [classes[part.numpy()].tolist() for part in held]


@pytest.mark.parametrize("seed", range(5))
def test_every_class_gives_its_part(seed: int) -> None:
    """Of 21 + 6 samples two stay first, so each class gives a fifth of 20 and of 5; 27 / 5 rounds to 5."""
    kept, held = cut([0] * 21 + [1] * 6, [27], 0.2, seed)
    assert (len(kept[0]), len(held[0])) == (22, 5)
    assert held[0].count(1) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_class_loses_its_only_sample_where_there_are_others(seed: int) -> None:
    kept, held = cut([0] * 6 + [1, 2, 3], [9], 0.4, seed)
    assert sorted(set(kept[0])) == [0, 1, 2, 3]
    assert held[0] == [0] * 4  # 3.6, rounded
    kept, held = cut([0, 0, 1, 1], [4], 0.9, seed)
    assert (sorted(kept[0]), sorted(held[0])) == ([0, 1], [0, 1])


def test_no_client_is_left_without_training_data() -> None:
    kept, held = cut([0, 0, 1, 2, 1, 1, 1], [1, 2, 1, 3], 0.2)
    assert [len(part) for part in kept] == [1, 1, 1, 2]
    assert [len(part) for part in held] == [0, 1, 0, 1]


def test_a_fifth_is_held_out_unless_another_part_is_asked_for() -> None:
    data = Digits(partition=Unimodal(10, 2), seed=4)
    fed = data.federation
    assert fed.val is not None
    whole = data.dealt.train.sizes
    assert torch.equal(fed.val.sizes, (whole * 0.2 + 0.5).long())
    assert torch.equal(fed.train.sizes + fed.val.sizes, whole)
    assert not set(fed.val.flat.tolist()) & (set(fed.train.flat.tolist()) | set(fed.test.flat.tolist()))
    for client in range(10):
        classes, counts = data.samples.targets[fed.val[client]].unique(return_counts=True)
        shares = data.samples.targets[data.dealt.train[client]].bincount(minlength=10)[classes] * 0.2
        assert float((counts - shares).abs().max()) <= 1.5
    other = Digits(partition=Unimodal(10, 2), seed=5).federation
    assert not torch.equal(other.val.flat, fed.val.flat)  # type: ignore[union-attr]


def small(**kwargs: Any) -> TensorFederation:
    """Three clients with one, eight and two training samples."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(17, FEATURES, generator=generator), torch.arange(17) % CLASSES
    train, test = [[0], list(range(1, 9)), [9, 10]], [[11, 12], [13, 14], [15, 16]]
    return TensorFederation(x, y, train=train, test=test, num_classes=CLASSES, **kwargs)


def test_clients_without_validation_samples_are_left_out_of_it() -> None:
    method, data = FedAvg(mlp(), lr=0.1, engine="stacked"), small()
    run = fit(method, data, rounds=1)
    scores = method.evaluator.scores["val"]
    assert [math.isnan(value) for value in scores.tolist()] == [True, False, False]
    by_hand = []
    for client in (1, 2):
        rows = data.federation.index("val")[client]
        found = method.net(data.federation.inputs[rows].double()).argmax(1)
        by_hand.append(float((found == data.federation.targets[rows]).double().mean()))
    assert scores[1:].tolist() == pytest.approx(by_hand)
    assert float(run.callback_metrics["val/acc"]) == pytest.approx(sum(by_hand) / 2)
    assert torch.cat(list(data.test_dataloader())).tolist() == [0, 1, 2]
    trainer().test(method, datamodule=data, verbose=False)
    assert not method.evaluator.scores["test"].isnan().any()


def test_nothing_to_spare_is_as_nothing_held_out() -> None:
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    data = TensorFederation(x, y, train=[[0], [1]], test=[[2], [3]])
    with pytest.warns(UserWarning, match="No client has a sample to spare for validation"):
        assert data.federation.val is None
    assert data.federation.validated == "test"
    assert torch.cat(list(data.val_dataloader())).tolist() == [0, 1]


def test_held_out_by_default_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert small().federation.validated == "val"


def test_pooled_validation_is_never_the_test_set() -> None:
    held = Pooled(Digits(partition=IID(3)), batch_size=500)
    assert sum(len(y) for _, y in held.val_dataloader()) == len(held.federation.val.flat)  # type: ignore[union-attr]
    assert Pooled(Digits(partition=IID(3), val_fraction=0)).val_dataloader() == []


def test_an_evaluation_of_clients_that_have_nothing_held_out_is_empty() -> None:
    data = small(eval_only=[0])
    assert list(data.val_dataloader()) == []
    assert torch.cat(list(data.test_dataloader())).tolist() == [0]


def test_the_same_manifest_holds_the_same_out(tmp_path: Any) -> None:
    first = Digits(partition=IID(4), seed=5)
    first.describe().write(tmp_path / "m.json")
    again = Digits(manifest=str(tmp_path / "m.json"), seed=99)
    assert torch.equal(first.federation.val.flat, again.federation.val.flat)  # type: ignore[union-attr]


def test_repr_says_what_the_data_is() -> None:
    data = Digits(partition=IID(4), fraction=0.5)
    text = "Digits(partition=IID(clients=4, test_fraction=0.2, train_samples=None), seed=0, fraction=0.5)"
    assert repr(data) == str(data) == text
    data.setup()
    assert repr(data) == f"{text}: 4 clients with 1,149 training, 288 validation, 360 test samples"
    assert repr(small(val_fraction=0.5)).startswith("TensorFederation(partition=own indices, seed=0, val_fraction=0.5)")


def test_data_says_what_a_net_may_take_from_it() -> None:
    assert Digits().net_arguments == {"in_features": 64, "num_classes": 10, "in_channels": 1}
    assert small().net_arguments == {"in_features": FEATURES, "num_classes": CLASSES}
