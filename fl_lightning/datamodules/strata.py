"""Strata: classes to partition by if the targets are not classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.errors import FederationError

#: Number of equal-frequency bins of a numeric target.
BINS = 10


def is_classes(targets: Tensor | NDArray[Any]) -> bool:
    """Whether targets may be classes: one integer per sample, at least 0 and less than the number of samples."""
    whole = not targets.is_floating_point() if isinstance(targets, Tensor) else targets.dtype.kind in "iu"
    return targets.ndim == 1 and whole and 0 <= int(targets.min()) <= int(targets.max()) < len(targets)


def strata_of(targets: Tensor, num_classes: int = 0) -> Tensor | None:
    """Derive a class for every sample from its target; None if there is no obvious one.

    Numbers are assigned to ten equal-frequency bins. A mask has the most frequent class of its pixels, background
    (class 0) excluded.

    Args:
        targets: targets of all samples, shape (n, ...).
        num_classes: number of classes of masks. Default: the greatest class plus one.

    Example:
        >>> strata_of(torch.tensor([0.3, 7.0, 0.1, 2.0])).tolist()
        [1, 3, 0, 2]
        >>> strata_of(torch.tensor([[0, 0, 2], [0, 0, 0], [1, 1, 2]])).tolist()
        [2, 0, 1]
    """
    flat = targets.squeeze(1) if targets.dim() == 2 and targets.shape[1] == 1 else targets
    if flat.is_floating_point():
        return _bins(flat) if flat.dim() == 1 else None
    if flat.dim() == 1:
        return flat.long() if is_classes(flat) else _bins(flat.double())
    if int(flat.min()) < 0 or (int(flat.max()) <= 1 and flat.dim() == 2):  # multi-label targets
        return None
    pixels = flat.flatten(1).long()
    counts = torch.zeros(len(pixels), max(num_classes, int(pixels.max()) + 1), dtype=torch.int64)
    counts.scatter_add_(1, pixels, torch.ones_like(pixels))
    counts[:, 0] = 0
    return counts.argmax(1)


def given_strata(strata: Any, samples: int) -> Tensor:
    """Convert a column to partition by to class numbers.

    Example:
        >>> given_strata(["b", "a", "b"], 3).tolist()
        [1, 0, 1]
    """
    values = strata.cpu().numpy() if isinstance(strata, Tensor) else np.asarray(strata)
    if values.shape != (samples,):
        raise FederationError(
            f"stratify must have one value for each of the {samples} samples, not the shape {values.shape}."
        )
    if values.dtype.kind == "f":
        found = _bins(torch.from_numpy(values.astype(np.float64)))
    else:
        found = torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64))
    return found


def _bins(values: Tensor) -> Tensor:
    """Assign values to bins of about the same number of samples; equal values share a bin."""
    if not bool(torch.isfinite(values).all()):
        raise FederationError("Targets must be finite: drop samples without a target.")
    number = min(BINS, len(values))
    edges = torch.quantile(values.double(), torch.arange(1, number).double() / number)
    return torch.bucketize(values.double(), edges)
