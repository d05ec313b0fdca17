"""The base of every federated DataModule: samples in memory, a partition, a cohort per round."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.datamodules.loaders import ClientChunks, Tick
from fl_lightning.datamodules.manifest import Manifest
from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, hash_tensors
from fl_lightning.datamodules.partitions.deal import local_split
from fl_lightning.datamodules.partitions.iid import IID
from fl_lightning.errors import FederationError
from fl_lightning.federation import Augment, ClientIndex, Federation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Samples:
    """All samples of a data set, official training rows before official test rows.

    Args:
        inputs: as stored, uint8 where possible, shape (n, ...).
        targets: classes, int64, shape (n,), or anything of shape (n, ...).
        train_size: how many rows are official training rows; None means all.
        users: who wrote each sample, shape (n,), where the data says so.
        strata: a whole number for each sample, by which samples are dealt where targets are no classes, shape (n,).
    """

    inputs: Tensor
    targets: Tensor
    train_size: int | None = None
    users: Sequence[Any] | Tensor | None = None
    strata: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        """The classes by which samples are dealt, int64, shape (n,)."""
        return self.targets if self.strata is None else self.strata

    def some(self, number: int, rng: np.random.Generator) -> Samples:
        """About so many of the samples, the same share of every class, in their old order."""
        share, kept = number / len(self.targets), []
        for label in range(int(self.labels.max()) + 1):
            rows = torch.nonzero(self.labels == label).flatten()
            kept.append(rows[torch.from_numpy(rng.permutation(len(rows))[: round(share * len(rows))])])
        index = torch.cat(kept).sort().values
        if not len(index):
            raise FederationError(
                f"limit={number} leaves less than half a sample of every class: use at least {len(kept)}, the number "
                "of classes."
            )
        size = None if self.train_size is None else int((index < self.train_size).sum())
        users = self.users
        if users is not None:
            users = users[index] if isinstance(users, Tensor) else [users[i] for i in index.tolist()]
        strata = None if self.strata is None else self.strata[index]
        return Samples(self.inputs[index], self.targets[index], size, users, strata)


class FederatedDataModule(LightningDataModule, ABC):
    """Samples dealt to clients, for a stock ``Trainer``.

    Subclasses say what the samples are (:meth:`load`) and set ``num_classes``, ``input_shape`` and, for inputs that are
    to be normalised, ``mean`` and ``std`` in the units in which the inputs are stored.

    Args:
        partition: how samples are dealt to clients; ten IID clients unless given.
        fraction: share of the clients that trains in a round, 0 < fraction <= 1.
        val_fraction: part of each client's training samples that is held out for validation.
        seed: decides the partition and who trains when; unless given, the seed of ``seed_everything``, else 0.
        eval_clients: clients evaluated in one batch.
        eval_only: the clients that are evaluated, and nothing else; None means all of them and the global test set.
        augment: whether training batches are augmented, for data that knows how.
        manifest: a manifest written by ``fl-lightning partition``; its partition is used, and data that differs from
            the data it was made with is refused.
        limit: use only about so many samples, the same share of every class, drawn by ``seed``; None uses all.
    """

    num_classes: int
    input_shape: tuple[int, ...]
    mean: Tensor | None = None
    std: Tensor | None = None
    standardize = True

    def __init__(
        self,
        partition: PartitionScheme | None = None,
        fraction: float = 1.0,
        val_fraction: float = 0.0,
        seed: int | None = None,
        eval_clients: int = 100,
        augment: bool = False,
        manifest: str | None = None,
        limit: int | None = None,
        eval_only: list[int] | None = None,
    ) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise FederationError(f"fraction must be greater than 0 and at most 1, not {fraction}: 0.1 is usual.")
        if not 0 <= val_fraction < 1:
            raise FederationError(f"val_fraction must be at least 0 and below 1, not {val_fraction}: 0.1 is usual.")
        if eval_clients < 1:
            raise FederationError(f"eval_clients must be at least 1, not {eval_clients}.")
        self.manifest = None if manifest is None else Manifest.read(manifest)
        self.partition = partition if partition or self.manifest else IID()
        self.fraction = fraction
        self.val_fraction = val_fraction
        self.seed = seeding.default_seed() if seed is None else seed
        self.eval_clients = eval_clients
        self.eval_only = eval_only
        self.augment = augment
        if limit is not None and limit < 1:
            raise FederationError(f"limit must be at least 1, not {limit}: leave it out to use all samples.")
        self.limit = limit
        if augment and self.augmentation() is None:
            raise FederationError(f"{type(self).__name__} has no augmentation: leave augment off.")

    @abstractmethod
    def load(self) -> Samples:
        """All samples; called once."""

    def augmentation(self) -> Augment | None:
        """What ``augment=True`` does to one client's raw training batch; None where nothing is known to help."""
        return None

    def encode(self, samples: Samples, train: ClientIndex) -> Tensor:
        """Inputs as the net sees them, for data (text) whose encoding is learned from the training samples."""
        return samples.inputs

    def client_meta(self, partition: Partition) -> Mapping[str, Sequence[Any]]:
        """What is known of the clients, one value each under every name."""
        return partition.meta

    def deal(self, samples: Samples) -> Partition:
        """The partition of the samples: the manifest's if there is one, else the scheme's."""
        labels, train_size, users = samples.labels, samples.train_size, samples.users
        if self.manifest is not None:
            self.manifest.check(self.data_hash, self.partition)
            return self.manifest.partition(self.partition, labels, train_size, users)
        scheme = self.partition or IID()
        return scheme(labels, self.seed, train_size=train_size, users=users)

    @property
    def outputs(self) -> int:
        """How many outputs a net for this data has: one for each class, or for each number that is predicted."""
        targets = self.samples.targets
        return self.num_classes or (1 if targets.dim() == 1 else int(targets.shape[1]))

    def setup(self, stage: str | None = None) -> None:
        """Build the federation; later calls change nothing."""
        _ = self.federation

    @cached_property
    def samples(self) -> Samples:
        """The samples as stored: all, or as many as ``limit`` says."""
        loaded = self.load()
        if self.limit is None or self.limit >= len(loaded.targets):
            return loaded
        return loaded.some(self.limit, seeding.stream(self.seed, "limit"))

    @cached_property
    def dealt(self) -> Partition:
        """Who owns what, before anything is held out for validation."""
        return self.deal(self.samples)

    @cached_property
    def federation(self) -> Federation:
        """Everything a run needs to know of the data."""
        part = self.dealt
        train, val = part.train, None
        if self.val_fraction:
            rng = seeding.stream(self.seed, "validation")
            train, val = local_split(train.flat.numpy(), train.sizes.numpy(), self.val_fraction, rng)
        return Federation(
            inputs=self.encode(self.samples, train),
            targets=self.samples.targets,
            train=train,
            test=part.test,
            num_classes=self.num_classes,
            val=val,
            global_test=part.global_test if self.eval_only is None else None,
            mean=self.mean,
            std=self.std,
            label_maps=part.label_maps,
            augment=self.augmentation() if self.augment else None,
            meta=self.client_meta(part),
        )

    @cached_property
    def data_hash(self) -> str:
        """Hash of all samples and labels as stored, whatever the partition."""
        return hash_tensors(self.samples.inputs, self.samples.targets)

    def describe(self, indices: bool = False) -> Manifest:
        """The manifest of this partition; ``indices`` adds every index."""
        if self.manifest is not None and self.manifest.indices is not None:
            return self.manifest
        scheme, seed = self.partition, self.seed
        if self.manifest is not None:
            scheme, seed = scheme or self.manifest.build_scheme(), self.manifest.seed
        return Manifest.of(type(self).__name__, self.data_hash, scheme, seed, self.dealt, indices)

    def picture(self) -> Figure:
        """Who has how much of what, as a matplotlib figure."""
        from fl_lightning.datamodules.picture import partition_figure
        from fl_lightning.datamodules.summary import Summary

        labels = self.samples.labels
        summary = Summary.of(self.dealt, labels, self.num_classes or int(labels.max()) + 1)
        manifest = self.describe()
        return partition_figure(summary, f"{manifest.data}, {manifest.scheme_call}, seed {manifest.seed}")

    @cached_property
    def fingerprint(self) -> str:
        """What a checkpoint keeps to refuse other data: samples and their scale, who owns them, label permutations."""
        fed = self.federation
        indices = [t for index in (fed.train, fed.test, fed.index("val")) for t in (index.flat, index.offsets)]
        owners = hash_tensors(*indices, fed.global_test, fed.label_maps)
        return hashlib.sha256(f"{self.data_hash}{owners}{self.scale}".encode()).hexdigest()[:16]

    @property
    def scale(self) -> str:
        """What the net's inputs depend on beside the samples, where it is not as usual."""
        return "" if self.standardize else "not standardised"

    def cohort(self, round: int) -> list[int]:
        """The clients that train in a round: a pure function of seed and round.

        :attr:`cohort_size` clients, uniformly without replacement.
        """
        rng = seeding.stream(self.seed, "sampling", round)
        chosen: list[int] = rng.choice(self.federation.num_clients, self.cohort_size, replace=False).tolist()
        return chosen

    @property
    def cohort_size(self) -> int:
        """Clients that train in a round: ``max(1, round(fraction * N))``."""
        return max(1, round(self.fraction * self.federation.num_clients))

    def train_dataloader(self) -> Tick:
        """One tick: one federated round."""
        return Tick()

    def val_dataloader(self) -> ClientChunks:
        """All clients or ``eval_only``, ``eval_clients`` at a time."""
        everyone = range(self.federation.num_clients)
        strangers = sorted(set(self.eval_only or ()) - set(everyone))
        if strangers or self.eval_only == []:
            raise FederationError(f"eval_only must name some of the clients 0 to {everyone[-1]}, not {strangers}.")
        return ClientChunks(everyone if self.eval_only is None else sorted(set(self.eval_only)), self.eval_clients)

    def test_dataloader(self) -> ClientChunks:
        """As in validation."""
        return self.val_dataloader()

    def predict_dataloader(self) -> ClientChunks:
        """As in validation."""
        return self.val_dataloader()
