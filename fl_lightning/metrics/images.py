"""Similarity of reconstructed images to the originals, PSNR and SSIM, and total variation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.image import structural_similarity_index_measure


def psnr(images: Tensor, originals: Tensor, data_range: float = 1.0) -> Tensor:
    """Return the peak signal-to-noise ratio of every image in dB, 10 log10(range^2 / MSE); infinite if equal.

    Args:
        images: shape (n, ...).
        originals: same shape.
        data_range: largest minus smallest possible value.

    Returns:
        Shape (n,).

    Example:
        >>> psnr(torch.full((1, 1, 2, 2), 0.6), torch.full((1, 1, 2, 2), 0.5)).round(decimals=3)
        tensor([20.], dtype=torch.float64)
    """
    error = (images.double() - originals.double()).pow(2).flatten(1).mean(1)
    return 10 * torch.log10(data_range**2 / error)


def ssim(images: Tensor, originals: Tensor, data_range: float = 1.0) -> Tensor:
    """Return the structural similarity of every image, 1 if equal; NaN for images smaller than 11 x 11 or others.

    Args:
        images: shape (n, channels, height, width).
        originals: same shape.
        data_range: largest minus smallest possible value.

    Returns:
        Shape (n,).
    """
    if images.dim() != 4 or min(images.shape[2:]) < 11:
        return images.new_full((len(images),), float("nan"))
    found = structural_similarity_index_measure(images, originals, data_range=data_range, reduction="none")
    assert isinstance(found, Tensor)
    return found


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels of every image; 0 for tensors that are not images.

    Args:
        images: shape (n, channels, height, width).

    Returns:
        Shape (n,).

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
        tensor([1.])
    """
    if images.dim() != 4:
        return images.new_zeros(len(images))
    down = (images[:, :, 1:] - images[:, :, :-1]).abs().flatten(1).mean(1)
    return down + (images[..., 1:] - images[..., :-1]).abs().flatten(1).mean(1)


class Reconstruction(Metric):
    """Mean PSNR and SSIM over all images seen.

    Args:
        data_range: largest minus smallest possible value.

    Example:
        >>> metric = Reconstruction()
        >>> metric.update(torch.full((2, 1, 11, 11), 0.6), torch.full((2, 1, 11, 11), 0.5))
        >>> round(float(metric.compute()["psnr"]), 3)
        20.0
    """

    full_state_update = False
    psnr_sum: Tensor
    ssim_sum: Tensor
    total: Tensor

    def __init__(self, data_range: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.data_range = data_range
        for name in ("psnr_sum", "ssim_sum", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, images: Tensor, originals: Tensor) -> None:
        """Add some images with their originals, both of shape (n, ...)."""
        self.psnr_sum += psnr(images, originals, self.data_range).sum()
        self.ssim_sum += ssim(images, originals, self.data_range).double().sum()
        self.total += len(images)

    def compute(self) -> dict[str, Tensor]:
        """Return the means: ``psnr`` in dB, and ``ssim``."""
        return {"psnr": self.psnr_sum / self.total, "ssim": self.ssim_sum / self.total}
