"""Conversion between images with pixels in [0, 1], used by attacks, and inputs of a net."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation


@dataclass(frozen=True)
class Pixels:
    """The scale of a federation's inputs.

    Args:
        federation: the data.
        low: the stored value of a pixel of 0.
        high: the stored value of a pixel of 1.
    """

    federation: Federation
    low: float
    high: float

    @classmethod
    def of(cls, federation: Federation) -> Pixels:
        """Return a scale from the smallest to the largest stored value."""
        inputs = federation.inputs
        if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
            raise FederationError("Inputs are token numbers, not images: they cannot be reconstructed pixel by pixel.")
        return cls(federation, float(inputs.min()), float(inputs.max()))

    def of_rows(self, rows: Tensor) -> Tensor:
        """Convert samples to images with pixels in [0, 1], float32."""
        return (self.federation.inputs[rows.to(self.federation.device)].float() - self.low) / (self.high - self.low)

    def to_net(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert images to the net's inputs, differentiably."""
        raw = self.low + (self.high - self.low) * images.to(dtype)
        mean, std = self.federation.mean, self.federation.std
        return raw if mean is None or std is None else (raw - mean.to(dtype)) / std.to(dtype)

    def from_net(self, inputs: Tensor) -> Tensor:
        """Convert the net's inputs to images."""
        mean, std = self.federation.mean, self.federation.std
        raw = inputs if mean is None or std is None else inputs * std.to(inputs) + mean.to(inputs)
        return (raw - self.low) / (self.high - self.low)
