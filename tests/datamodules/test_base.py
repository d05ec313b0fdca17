"""The DataModule: federation, cohorts, loaders, validation part, fingerprint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fl_lightning.datamodules import IID, ConceptShift, Digits, Pooled, TensorFederation, Unimodal
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex


def digits(**kwargs: Any) -> Digits:
    return Digits(**{"partition": Unimodal(20, 2), **kwargs})


def test_digits_are_raw_and_normalised_in_a_batch() -> None:
    data = Digits()
    federation = data.federation
    assert federation.inputs.shape == (1797, *data.input_shape)
    assert federation.inputs.dtype == torch.uint8
    assert federation.num_classes == data.num_classes == 10
    assert federation.num_clients == 10
    x, y = federation.gather([0], torch.arange(1797)[None], torch.float64)
    assert abs(float(x.mean())) < 1e-4
    assert abs(float(x.std()) - 1) < 1e-4
    assert y.tolist()[0] == federation.targets.tolist()


def test_setup_builds_once() -> None:
    data = digits()
    data.setup("fit")
    first = data.federation
    data.setup("test")
    assert data.federation is first


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_fraction_outside_its_range(fraction: float) -> None:
    with pytest.raises(FederationError, match=r"fraction must be (greater than 0 and at most 1|a number)"):
        digits(fraction=fraction)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"val_fraction": 1.0}, "below 1"),
        ({"eval_clients": 0}, "must be 1 or more"),
        ({"augment": True}, "no augmentation"),
    ],
)
def test_other_settings_outside_their_range(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(FederationError, match=says):
        digits(**wrong)


@pytest.mark.parametrize(("fraction", "size"), [(1.0, 20), (0.1, 2), (0.01, 1), (0.27, 5), (0.29, 6)])
def test_cohort_size(fraction: float, size: int) -> None:
    cohort = digits(fraction=fraction).cohort(3)
    assert len(cohort) == len(set(cohort)) == size
    assert all(type(client) is int and 0 <= client < 20 for client in cohort)


def test_cohort_is_a_function_of_seed_and_round() -> None:
    a, b, other = digits(fraction=0.2, seed=1), digits(fraction=0.2, seed=1), digits(fraction=0.2, seed=2)
    rounds = [a.cohort(r) for r in range(50)]
    torch.manual_seed(5)
    assert [b.cohort(r) for r in reversed(range(50))] == rounds[::-1]
    assert len({tuple(sorted(c)) for c in rounds}) > 40
    assert [other.cohort(r) for r in range(50)] != rounds


def test_every_client_is_sampled_equally_often() -> None:
    data = digits(fraction=0.2)
    seen = np.bincount([c for r in range(2000) for c in data.cohort(r)], minlength=20)
    assert np.abs(seen - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


def test_seed_defaults_to_the_one_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert digits().seed == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert digits().seed == 7
    assert digits(seed=3).seed == 3
    assert digits().dealt.index_hash == digits(seed=7).dealt.index_hash != digits(seed=3).dealt.index_hash


def test_validation_part_is_cut_from_training_alone() -> None:
    with pytest.warns(UserWarning, match="do not choose settings, rounds or checkpoints") as said:
        plain = digits(val_fraction=0).federation
    assert len(said) == 1
    assert plain.val is None
    assert plain.validated == "test"
    held = digits(val_fraction=0.25).federation
    assert held.validated == "val"
    assert held.val is not None
    assert torch.equal(held.test.flat, plain.test.flat)
    for client in range(20):
        both = torch.cat((held.train[client], held.val[client]))
        assert both.sort().values.tolist() == plain.train[client].sort().values.tolist()
        assert len(held.val[client]) == int(len(both) * 0.25 + 0.5)


def test_loaders_are_a_tick_and_chunks_of_clients() -> None:
    data = digits(eval_clients=8)
    assert list(data.train_dataloader()) == [0]
    assert len(data.train_dataloader()) == 1
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        chunks = list(loader)
        assert len(loader) == len(chunks) == 3
        assert torch.equal(torch.cat(chunks), torch.arange(20))
        assert chunks[0].dtype == torch.int64
        assert not isinstance(loader, list | torch.utils.data.DataLoader)


def test_only_some_clients_are_evaluated() -> None:
    data = digits(eval_clients=2, eval_only=[7, 3, 3, 0])
    assert [chunk.tolist() for chunk in data.val_dataloader()] == [[0, 3], [7]]
    assert data.federation.global_test is None
    for wrong in ([], [20], [-1, 2]):
        with pytest.raises(FederationError, match="eval_only must name some of the clients 0 to 19"):
            digits(eval_only=wrong).val_dataloader()


class Recorder(LightningModule):
    """Notes what a stock Trainer hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[Any] = []

    def cohort(self, round: int) -> list[int]:
        return []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("train", int(batch)))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(("val", batch.tolist()))

    def configure_optimizers(self) -> None:
        return None


def test_a_stock_trainer_takes_the_datamodule() -> None:
    module = Recorder()
    Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        accelerator="cpu",
    ).fit(module, datamodule=Digits(partition=IID(3), eval_clients=2))
    assert module.seen == [("train", 0), ("val", [0, 1]), ("val", [2])] * 2


@pytest.mark.parametrize("clients", [[3], [-1, 0], []])
def test_pooled_clients_that_are_not_there(clients: list[int]) -> None:
    pooled = Pooled(Digits(partition=IID(3)), clients=clients)
    with pytest.raises(FederationError, match="some of the clients 0 to 2, not"):
        pooled.train_dataloader()


def test_fingerprint_is_of_data_and_owners_not_of_the_seed() -> None:
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    lists = {"train": [[0, 1, 2], [3, 4]], "test": [[5], [6]], "val_fraction": 0}

    def print_of(inputs: Tensor = x, targets: Tensor = y, **kwargs: Any) -> str:
        return TensorFederation(inputs, targets, **{**lists, **kwargs}).fingerprint

    first = print_of()
    assert first == print_of(seed=9)
    changed = x.clone()
    changed[19, 2] += 1e-3
    others = [
        print_of(inputs=changed),
        print_of(targets=1 - y),
        print_of(train=[[0, 1, 2], [3, 7]]),
        print_of(train=[[0, 1], [2, 3, 4]]),
        print_of(test=[[5], [7]]),
        print_of(label_maps=torch.tensor([[0, 1], [1, 0]])),
        print_of(val_fraction=0.3),
        print_of(mean=torch.zeros(3), std=torch.ones(3)),
        print_of(mean=torch.ones(3), std=torch.ones(3)),
        print_of(inputs=x.bfloat16()),
    ]
    assert len({first, *others}) == 1 + len(others)


def test_concept_shift_reaches_the_batches() -> None:
    plain = digits(partition=IID(4), seed=2).federation
    shifted = digits(partition=ConceptShift(IID(4)), seed=2).federation
    assert shifted.label_maps is not None
    for client in range(4):
        index = plain.train[client][None]
        _, before = plain.gather([client], index, torch.float32)
        _, after = shifted.gather([client], index, torch.float32)
        assert torch.equal(after, shifted.label_maps[client][before])
        assert torch.equal(after, before) == (client == 0)


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor]:
    return torch.randn(60, 4), torch.arange(60) % 3


def test_own_tensors_with_a_partition(tensors: tuple[Tensor, Tensor]) -> None:
    data = TensorFederation(*tensors, partition=Unimodal(6, 1))
    assert data.num_classes == 3
    assert data.input_shape == (4,)
    assert data.federation.num_clients == 6
    assert data.federation.inputs is tensors[0]


def test_own_lists_as_lists_tensors_or_index(tensors: tuple[Tensor, Tensor]) -> None:
    lists = [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    forms = (lists, [torch.tensor(part) for part in lists], ClientIndex.of(lists))
    built = [TensorFederation(*tensors, train=form, test=[[5], [6]], val_fraction=0).federation for form in forms]
    assert all(torch.equal(f.train.flat, torch.tensor(lists).flatten()) for f in built)
    split = TensorFederation(*tensors, train=lists, meta={"site": ["a", "b"]}, val_fraction=0).federation
    assert split.train.sizes.tolist() == [4, 4]
    assert split.test.sizes.tolist() == [1, 1]
    assert sorted(split.train[1].tolist() + split.test[1].tolist()) == lists[1]
    assert split.meta == {"site": ["a", "b"]}


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"train": [[0], [1]], "test": [[2], [60]]}, "between 0 and 59"),
        ({"train": [[0], [1]], "test": [[2], [-1]]}, "between 0 and 59"),
        ({"train": [[0], [1]], "test": [[2], [0]]}, "in training and test lists"),
        ({"train": [[0], [1]], "test": [[2], [3]], "global_test": [1]}, "in training and test lists"),
        ({"train": [[0], [1]], "test": [[2]]}, "2 clients have training data but 1"),
        ({"train": [[0], []], "test": [[2], [3]]}, "no train samples"),
        ({"train": [[0, 1]], "partition": IID(2)}, "not both"),
        ({"test": [[0, 1]]}, "give train too"),
    ],
)
def test_own_lists_that_cannot_be(tensors: tuple[Tensor, Tensor], kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(FederationError, match=says):
        TensorFederation(*tensors, **kwargs).setup()


def test_own_tensors_that_do_not_fit(tensors: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(FederationError, match="59 inputs and 60 targets"):
        TensorFederation(tensors[0][:59], tensors[1])
    x, y = tensors
    for targets in (y + 0.5, torch.nn.functional.one_hot(y).float()):  # numbers are no classes
        assert TensorFederation(x, targets).num_classes == 0
    assert torch.equal(TensorFederation(x, y.float(), num_classes=3).federation.targets, y)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"num_classes": 1}, "between 0 and 0, as num_classes=1 says, but they run from 0 to"),
        ({"targets": torch.arange(60) % 3 - 1}, "run from -1 to 1"),
        ({"label_maps": torch.tensor([[0], [0]])}, "a row for each of the 2 clients"),
        ({"label_maps": torch.arange(3).repeat(3, 1)}, "a row for each of the 2 clients"),
        ({"label_maps": torch.arange(1, 4).repeat(2, 1)}, "must name classes between 0 and"),
        ({"mean": torch.ones(1)}, "give both or neither"),
        ({"std": torch.ones(1)}, "give both or neither"),
        ({"meta": {"mode": [0, 1, 1]}}, "each of the 2 clients, but 'mode' has 3"),
    ],
)
def test_labels_and_scales_that_cannot_be(kwargs: dict[str, Any], says: str) -> None:
    given = {"targets": torch.arange(60) % 3, "train": [[0, 1, 2], [3, 4, 5]], "test": [[6, 7, 8], [9, 10, 11]]}
    with pytest.raises(FederationError, match=says):
        TensorFederation(torch.zeros(60, 4), **{**given, **kwargs}).setup()


def test_labels_of_samples_that_nobody_owns_do_not_matter() -> None:
    data = TensorFederation(torch.zeros(4, 2), torch.tensor([0, 1, -1, 7]), train=[[0]], test=[[1]], num_classes=2)
    assert data.federation.num_classes == 2


def test_limit_takes_the_same_share_of_every_class_and_keeps_official_rows_apart() -> None:
    y = torch.tensor([0] * 60 + [1] * 30 + [0] * 20 + [1] * 10)
    data = TensorFederation(
        torch.arange(120.0)[:, None], y, train_size=90, users=[str(i) for i in range(120)], limit=40, seed=1
    )
    samples = data.samples
    rows = samples.inputs[:, 0].long()
    assert samples.targets.bincount().tolist() == [27, 13]
    assert torch.equal(rows, rows.sort().values)
    assert torch.equal(samples.targets, y[rows])
    assert samples.train_size == int((rows < 90).sum())
    assert samples.users == [str(int(i)) for i in rows]
    again = TensorFederation(torch.arange(120.0)[:, None], y, limit=40, seed=1).samples
    other = TensorFederation(torch.arange(120.0)[:, None], y, limit=40, seed=2).samples
    assert torch.equal(again.inputs, samples.inputs)
    assert not torch.equal(other.inputs, samples.inputs)
    assert len(TensorFederation(y[:, None].float(), y, limit=500).samples.targets) == 120
    with pytest.raises(FederationError, match="limit must be 1 or more"):
        TensorFederation(y[:, None].float(), y, limit=0)
    with pytest.raises(FederationError, match="limit=1 leaves less than half a sample of every class: use at least 3"):
        _ = TensorFederation(torch.zeros(90, 1), torch.arange(90) % 3, limit=1).samples
    with pytest.raises(FederationError, match="index lists exclude each other"):
        TensorFederation(y[:, None].float(), y, train=[[0, 1]], test=[[2]], limit=5)
