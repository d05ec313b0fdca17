"""Data of which a server knows no more than what its samples are like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.sampling import Sampling
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, CountOrZero, PositiveShare


class Elsewhere(FederatedDataModule):
    """Stands for the sites' data in the configuration of a server that has none: ``fl-lightning serve``.

    Args:
        input_shape: shape of a sample; nets take their number of inputs from it.
        num_classes: number of classes; 0 where targets are no classes.
        num_outputs: how many numbers a net predicts where targets are no classes.
        fraction: share of the clients that trains in a round.
        seed: decides who trains when; unless given, the seed of ``seed_everything``, else 0.
        sampling: a round's cohort has a ``fixed`` size, or every client takes part for itself (``poisson``).
    """

    def __init__(
        self,
        input_shape: Sequence[Count],
        num_classes: CountOrZero = 0,
        num_outputs: Count = 1,
        fraction: PositiveShare = 1.0,
        seed: int | None = None,
        sampling: Sampling = "fixed",
    ) -> None:
        super().__init__(fraction=fraction, seed=seed, sampling=sampling)
        self.input_shape, self.num_classes, self.num_outputs = tuple(input_shape), num_classes, num_outputs

    @property
    def outputs(self) -> int:
        """How many outputs a net for this data has."""
        return self.num_classes or self.num_outputs

    def load(self) -> NoReturn:
        """Say that there is nothing to load."""
        raise FederationError("Elsewhere stands for data at sites: use it with fl-lightning serve.")
