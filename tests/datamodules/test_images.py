"""Image sets through torchvision, held as uint8; augmentation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from fl_lightning.datamodules import CIFAR10, IID, MNIST, FashionMNIST, TensorFederation
from fl_lightning.datamodules.augmentation import CropAndFlip, Seeded
from fl_lightning.errors import FederationError
from fl_lightning.seeding import stream

STATISTICS: dict[Any, tuple[list[float], list[float]]] = {
    MNIST: ([0.1307], [0.3081]),
    FashionMNIST: ([0.2860], [0.3530]),
    CIFAR10: ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
}


@pytest.mark.parametrize("kind", STATISTICS, ids=lambda kind: kind.__name__)
def test_images_are_uint8_and_normalised_by_the_published_statistics(real_data: Path, kind: Any) -> None:
    data = kind(root=str(real_data), download=False)
    if not (real_data / data.folder).is_dir():
        pytest.skip(f"{kind.__name__} is not in {real_data}")
    federation = data.federation
    train_size = data.samples.train_size
    assert federation.inputs.dtype == torch.uint8
    assert federation.inputs.shape == (train_size + 10_000, *data.input_shape)
    assert federation.global_test.tolist() == list(range(train_size, train_size + 10_000))
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in STATISTICS[kind])
    x, _ = federation.gather([0], torch.arange(500)[None], torch.float32)
    assert torch.allclose(x[0], (federation.inputs[:500] / 255 - mean) / std, atol=1e-5)
    parts = [part.div(255) for part in federation.inputs[:train_size].split(5000)]
    first, second = (torch.stack([(p**k).mean(dim=(0, 2, 3)) for p in parts]).mean(dim=0) for k in (1, 2))
    assert torch.allclose(first, mean.flatten(), atol=2e-4)
    assert torch.allclose((second - first**2).sqrt(), std.flatten(), atol=2e-4)
    assert data.fingerprint == kind(root=str(real_data)).fingerprint


def test_images_that_are_not_standardised_lie_between_0_and_1(real_data: Path) -> None:
    data = MNIST(root=str(real_data), standardize=False)
    x, _ = data.federation.gather([0], torch.arange(500)[None], torch.float32)
    assert torch.allclose(x[0], data.federation.inputs[:500] / 255)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert data.fingerprint != MNIST(root=str(real_data)).fingerprint  # a checkpoint of one is refused by the other


def test_root_comes_from_the_environment(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_LIGHTNING_DATA", str(real_data))
    assert MNIST().root == str(real_data)
    assert MNIST(root="elsewhere").root == "elsewhere"
    monkeypatch.delenv("FL_LIGHTNING_DATA")
    assert MNIST().root == "data"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (MNIST, ["MNIST/raw", "train-images-idx3-ubyte"]),
        (CIFAR10, ["cifar-10-batches-py", "data_batch_1", "test_batch"]),
    ],
)
def test_missing_data_names_folder_and_files(tmp_path: Path, kind: Any, names: list[str]) -> None:
    with pytest.raises(FederationError) as caught:
        kind(root=str(tmp_path), download=False).setup()
    assert all(name in str(caught.value) for name in [str(tmp_path), "download is off", *names])


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    def offline(self: Any) -> None:
        raise RuntimeError("Error downloading train-images:\nname not known\n")

    monkeypatch.setattr(datasets.MNIST, "download", offline)
    with pytest.raises(FederationError) as caught:
        MNIST(root=str(tmp_path)).prepare_data()
    assert "Error downloading train-images: name not known" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_file_is_one_sentence(real_data: Path, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in (real_data / "MNIST" / "raw").glob("*-ubyte"):
        shutil.copy(file, raw)
    images = raw / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:1000])
    with pytest.raises(FederationError, match="MNIST cannot be read"):
        MNIST(root=str(tmp_path), download=False).setup()


def test_crop_and_flip_is_torchvisions_crop_and_flip() -> None:
    """Every image is one of the 2 x 81 pictures that torchvision's own functions make of it."""
    images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8)
    changed = CropAndFlip(4)(images, stream(0, "augment"))
    assert changed.shape == images.shape
    assert changed.dtype == torch.uint8
    padded = v2.functional.pad(images, [4])
    flips, corners = 0, set()
    for before, after in zip(padded, changed, strict=True):
        found = [
            (top, left, flip)
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
            if torch.equal(_crop(before, top, left, flip), after)
        ]
        assert found
        flips += found[0][2]
        corners.add(found[0][:2])
    assert 16 < flips < 48
    assert len(corners) > 30


def _crop(image: torch.Tensor, top: int, left: int, flip: bool) -> torch.Tensor:
    part = v2.functional.crop(image, top, left, 8, 8)
    return v2.functional.horizontal_flip(part) if flip else part


@pytest.mark.parametrize("augment", [CropAndFlip(2), Seeded(v2.RandomHorizontalFlip()), Seeded(v2.RandomCrop(8, 2))])
def test_augmentation_depends_on_the_stream_alone(augment: Any) -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)

    def run(client: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        rng = stream(0, "augment", 0, client)
        changed = torch.stack([augment(images, rng) for _ in range(8)])
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(seed)))
        return changed

    assert torch.equal(run(1, 1), run(1, 2))
    assert not torch.equal(run(1, 1), run(2, 1))


def test_augmentation_is_off_by_default_and_reaches_training_batches_only() -> None:
    x, y = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8), torch.arange(40) % 2
    plain = TensorFederation(x, y, partition=IID(2), transform=CropAndFlip(2)).federation
    assert plain.augment is None
    changed = TensorFederation(x, y, partition=IID(2), transform=CropAndFlip(2), augment=True).federation
    index = torch.stack([changed.train[0][:4], changed.train[1][:4]])
    rngs = [stream(0, "augment", 0, client) for client in (0, 1)]
    batch, _ = changed.gather([0, 1], index, torch.float32, rngs)
    untouched, _ = changed.gather([0, 1], index, torch.float32)
    assert torch.equal(untouched, x[index])
    alone = CropAndFlip(2)(x[index[1]], np.random.Generator(stream(0, "augment", 0, 1).bit_generator))
    assert torch.equal(batch[1], alone)
    assert CIFAR10(augment=True).augmentation() is not None
