"""A placeholder for data that stays at the sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.sampling import Sampling
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, CountOrZero, PositiveShare


class Elsewhere(FederatedDataModule):
    """Placeholder for the sites' data in the configuration of a server (``fl-lightning serve``).

    Args:
        input_shape: shape of a sample; nets take their number of inputs from it.
        num_classes: number of classes; 0 if targets are not classes.
        num_outputs: number of outputs of the net if targets are not classes.
        fraction: fraction of clients that train in a round.
        seed: seed of the cohorts. Default: the seed of ``seed_everything``, else 0.
        sampling: ``fixed`` for cohorts of a fixed size, ``poisson`` for independent participation of every client.
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
        """Number of outputs of a net for this data."""
        return self.num_classes or self.num_outputs

    def load(self) -> NoReturn:
        """Raise an error: there is nothing to load."""
        raise FederationError("Elsewhere stands for data at sites: use it with fl-lightning serve.")
