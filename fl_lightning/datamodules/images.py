"""MNIST, Fashion-MNIST and CIFAR-10, read through torchvision and held in memory as uint8."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_lightning.datamodules.augmentation import CropAndFlip
from fl_lightning.datamodules.base import FederatedDataModule, Samples
from fl_lightning.errors import FederationError
from fl_lightning.federation import Augment


def data_root(root: str | None) -> str:
    """Return the data folder: ``root``, else ``$FL_LIGHTNING_DATA``, else ``data``."""
    return root or os.environ.get("FL_LIGHTNING_DATA") or "data"


def per_channel(*values: float) -> Tensor:
    """Scale statistics of pixels in [0, 1] to pixels in 0..255, shape (channels, 1, 1)."""
    return torch.tensor(values).mul(255).view(-1, 1, 1)


class ImageData(FederatedDataModule):
    """An image data set of torchvision.

    Args:
        root: data folder. Default: the environment variable FL_LIGHTNING_DATA, else ``data``.
        download: download the data if it is missing.
        standardize: standardise each channel; otherwise pixels are scaled to [0, 1].
        **kwargs: as for every DataModule.
    """

    num_classes = 10
    folder: ClassVar[str]
    files: ClassVar[str]

    def __init__(self, root: str | None = None, download: bool = True, standardize: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = data_root(root)
        self.download, self.standardize = download, standardize
        if not standardize:
            assert self.mean is not None
            self.mean, self.std = torch.zeros_like(self.mean), torch.full_like(self.mean, 255)

    @abstractmethod
    def read(self, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        """Read one official split: images as uint8, shape (n, C, H, W), and labels."""

    def prepare_data(self) -> None:
        """Download the data if it is missing and allowed."""
        _ = self.samples

    def load(self) -> Samples:
        """Load both official splits, training rows first; downloads them if needed."""
        try:
            splits = self._splits(download=False)
        except Exception as error:  # torchvision's parsers raise many types on missing or damaged files
            splits = self._fetch(error)
        for (inputs, targets), part in zip(splits, ("training", "test"), strict=True):
            if len(inputs) != len(targets):
                raise FederationError(
                    f"{self._place} holds {len(inputs):,} images and {len(targets):,} labels for the {part} part: "
                    f"remove {self.files} there and download them again."
                )
        inputs, targets = (torch.cat(parts) for parts in zip(*splits, strict=True))
        return Samples(inputs, targets, train_size=len(splits[0][1]))

    def _splits(self, download: bool) -> list[tuple[Tensor, Tensor]]:
        """Read the official training and test splits."""
        return [self.read(train, download) for train in (True, False)]

    @property
    def _place(self) -> str:
        """The folder of the files."""
        return os.path.join(self.root, self.folder)

    def _fetch(self, damage: Exception) -> list[tuple[Tensor, Tensor]]:
        """Download and read, or report the missing or damaged files and their folder."""
        reason = "download is off"
        if self.download:
            try:
                return self._splits(download=True)
            except Exception as error:
                reason = _reason(error)
        found = f": {_reason(damage)}" if os.path.isdir(self._place) else ""
        raise FederationError(
            f"{type(self).__name__} cannot be read from {self._place}{found}, nor downloaded "
            f"({reason}): put {self.files} there, or set root (or FL_LIGHTNING_DATA) to the folder that holds "
            f"{self.folder}."
        )


def _reason(error: Exception) -> str:
    """Shorten an error message."""
    return " ".join(str(error).split())[:200].rstrip(". ") or type(error).__name__


class MNIST(ImageData):
    """70,000 handwritten digits of 28 x 28 pixels.

    Args:
        root: data folder. Default: the environment variable FL_LIGHTNING_DATA, else ``data``.
        download: download the data if it is missing.
        standardize: standardise each channel; otherwise pixels are scaled to [0, 1].
        **kwargs: as for every DataModule.
    """

    input_shape = (1, 28, 28)
    mean = per_channel(0.1307)
    std = per_channel(0.3081)
    source: ClassVar[str] = "MNIST"
    folder = "MNIST/raw"
    files = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"

    def read(self, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        """Read one official split: images as uint8, shape (n, 1, 28, 28), and labels."""
        from torchvision import datasets

        data = getattr(datasets, self.source)(self.root, train=train, download=download)
        return data.data.unsqueeze(1), data.targets.long()


class FashionMNIST(MNIST):
    """70,000 images of clothes, 28 x 28 pixels, in ten classes.

    Args:
        root: data folder. Default: the environment variable FL_LIGHTNING_DATA, else ``data``.
        download: download the data if it is missing.
        standardize: standardise each channel; otherwise pixels are scaled to [0, 1].
        **kwargs: as for every DataModule.
    """

    mean = per_channel(0.2860)
    std = per_channel(0.3530)
    source = "FashionMNIST"
    folder = "FashionMNIST/raw"


class CIFAR10(ImageData):
    """60,000 colour images of 32 x 32 pixels in ten classes; ``augment`` crops and flips.

    Args:
        root: data folder. Default: the environment variable FL_LIGHTNING_DATA, else ``data``.
        download: download the data if it is missing.
        standardize: standardise each channel; otherwise pixels are scaled to [0, 1].
        **kwargs: as for every DataModule.
    """

    input_shape = (3, 32, 32)
    mean = per_channel(0.4914, 0.4822, 0.4465)
    std = per_channel(0.2470, 0.2435, 0.2616)
    folder = "cifar-10-batches-py"
    files = "data_batch_1 to data_batch_5, test_batch and batches.meta"

    def augmentation(self) -> Augment | None:
        """Crop with 4 pixels of padding, and flip horizontally."""
        return CropAndFlip(padding=4)

    def read(self, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        """Read one official split: images as uint8, shape (n, 3, 32, 32), and labels."""
        from torchvision import datasets

        data = datasets.CIFAR10(self.root, train=train, download=download)
        return torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets)
