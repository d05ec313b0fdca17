"""The base class of federated DataModules: samples in memory, a partition, a cohort per round."""

from __future__ import annotations

import hashlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from fl_lightning import arguments, seeding
from fl_lightning.datamodules.loaders import ClientChunks, Tick
from fl_lightning.datamodules.manifest import Manifest
from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, check_scheme, hash_tensors
from fl_lightning.datamodules.partitions.deal import by_class
from fl_lightning.datamodules.partitions.iid import IID
from fl_lightning.datamodules.sampling import Sampling, drawn, trained
from fl_lightning.errors import FederationError
from fl_lightning.federation import Augment, ClientIndex, Federation, Split
from fl_lightning.ranges import Count, CountOrZero, PositiveShare, ShareBelowOne
from fl_lightning.secret import new_key

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Default fraction of each client's training samples held out for validation.
HELD_OUT = 0.2


@dataclass(frozen=True)
class Samples:
    """All samples of a data set, official training rows first.

    Args:
        inputs: as stored, uint8 where possible, shape (n, ...).
        targets: classes, int64, shape (n,), or other targets of shape (n, ...).
        train_size: number of official training rows; None means all.
        users: author of each sample, shape (n,), if known.
        strata: integers to partition by if the targets are not classes, shape (n,).
    """

    inputs: Tensor
    targets: Tensor
    train_size: int | None = None
    users: Sequence[Any] | Tensor | None = None
    strata: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        """The classes to partition by, int64, shape (n,)."""
        return self.targets if self.strata is None else self.strata

    def some(self, number: int, rng: np.random.Generator) -> Samples:
        """Draw about ``number`` samples, the same fraction of every class, in their original order."""
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


class FederatedDataModule(arguments.NamedArguments, LightningDataModule, ABC):
    """Samples dealt to clients, for a stock ``Trainer``.

    Subclasses implement :meth:`load` and set ``num_classes``, ``input_shape`` and, to normalise the inputs, ``mean``
    and ``std`` in the units of the stored inputs.

    Args:
        partition: how samples are dealt to clients. Default: ten IID clients.
        fraction: fraction of clients that train in a round, 0 < fraction <= 1.
        val_fraction: fraction of each client's training samples held out for validation, stratified by class; a client
            with one sample keeps it and is not validated. With 0, clients are scored on their test samples after each
            round, so do not tune or stop by these scores. Default: 0.2.
        seed: seed of the partition and the cohorts. Default: the seed of ``seed_everything``, else 0.
        eval_clients: number of clients evaluated in one batch.
        eval_only: evaluate these clients only; None means all clients and the global test set.
        augment: whether to augment training batches, for data sets with an augmentation.
        manifest: a manifest written by ``fl-lightning partition``. Its partition is used; data other than the data it
            was made with is refused.
        limit: use only about this many samples, the same fraction of every class, drawn by ``seed``; None uses all.
        sampling: ``fixed`` for cohorts of a fixed size, ``poisson`` for independent participation of every client.
        secret_cohorts: draw cohorts from the operating system's randomness rather than from ``seed``, as privacy
            amplification by sampling requires; the key is stored in the checkpoints.
    """

    num_classes: int
    input_shape: tuple[int, ...]
    mean: Tensor | None = None
    std: Tensor | None = None
    standardize = True

    def __init__(
        self,
        partition: PartitionScheme | None = None,
        fraction: PositiveShare = 1.0,
        val_fraction: ShareBelowOne | None = None,
        seed: CountOrZero | None = None,
        eval_clients: Count = 100,
        augment: bool = False,
        manifest: str | None = None,
        limit: Count | None = None,
        eval_only: list[int] | None = None,
        sampling: Sampling = "fixed",
        secret_cohorts: bool = False,
    ) -> None:
        super().__init__()
        self.sampling, self.secret_cohorts = sampling, secret_cohorts
        self._key = new_key() if secret_cohorts else None
        check_scheme(partition)
        val_fraction = HELD_OUT if val_fraction is None else val_fraction
        self.manifest = None if manifest is None else Manifest.read(manifest)
        self.partition = partition if partition or self.manifest else IID()
        self.fraction = fraction
        self.val_fraction = val_fraction
        self.seed = seeding.default_seed() if seed is None else seed
        self.eval_clients = eval_clients
        self.eval_only = eval_only
        self.augment = augment
        self.limit = limit
        if augment and self.augmentation() is None:
            raise FederationError(f"{type(self).__name__} has no augmentation: leave augment off.")

    @abstractmethod
    def load(self) -> Samples:
        """Return all samples; called once."""

    def augmentation(self) -> Augment | None:
        """Return the augmentation of a client's raw training batch under ``augment=True``; None if there is none."""
        return None

    def encode(self, samples: Samples, train: ClientIndex) -> Tensor:
        """Encode the inputs for the net; override if the encoding is learned from training samples (text)."""
        return samples.inputs

    def client_meta(self, partition: Partition) -> Mapping[str, Sequence[Any]]:
        """Return properties of the clients by name, one value per client."""
        return partition.meta

    def deal(self, samples: Samples) -> Partition:
        """Partition the samples by the manifest if there is one, else by the scheme."""
        labels, train_size, users = samples.labels, samples.train_size, samples.users
        if self.manifest is not None:
            self.manifest.check(self.data_hash, self.partition)
            return self.manifest.partition(self.partition, labels, train_size, users)
        scheme = self.partition or IID()
        return scheme(labels, self.seed, train_size=train_size, users=users)

    @property
    def outputs(self) -> int:
        """Number of outputs of a net for this data: one per class, or per predicted number."""
        if self.num_classes:
            return self.num_classes
        targets = self.samples.targets
        return 1 if targets.dim() == 1 else int(targets.shape[1])

    def setup(self, stage: str | None = None) -> None:
        """Build the federation and share the key of secret cohorts among processes; later calls change nothing."""
        module = getattr(self.trainer, "lightning_module", None)
        if module is not None and not hasattr(module, "cohort"):
            kind = type(module).__name__
            raise FederationError(
                f"{kind} is not a federated method, and {type(self).__name__} gives it clients rather than batches: "
                f"train federate({kind}(...)), or {kind} on Pooled({type(self).__name__}(...))."
            )
        _ = self.federation
        if self._key is not None and self.trainer is not None and self.trainer.world_size > 1:
            self._key = self.trainer.strategy.broadcast(self._key)

    def __repr__(self) -> str:
        """Data, non-default settings and, once known, the sizes of the clients."""
        dealt = self.manifest.scheme_call if self.manifest and self.partition is None else self.partition
        usual = {"fraction": 1.0, "val_fraction": HELD_OUT, "limit": None, "augment": False}
        settings = [f"partition={dealt or 'own indices'}", f"seed={self.seed}"]
        settings += [f"{name}={getattr(self, name)}" for name in usual if getattr(self, name) != usual[name]]
        text = f"{type(self).__name__}({', '.join(settings)})"
        if "federation" not in vars(self):
            return text
        fed = self.federation
        parts = {"training": fed.train, "validation": fed.val, "test": fed.test}
        sizes = [f"{len(index.flat):,} {name}" for name, index in parts.items() if index is not None]
        return f"{text}: {fed.num_clients:,} clients with {', '.join(sizes)} samples"

    __str__ = __repr__

    @property
    def net_arguments(self) -> dict[str, int]:
        """Arguments that a net may take from this data, by the argument names of the library's nets."""
        shape = self.input_shape
        return {
            "in_features": math.prod(shape),
            "num_classes": self.outputs,
            **({"in_channels": shape[0]} if len(shape) == 3 else {}),
        }

    @cached_property
    def samples(self) -> Samples:
        """The samples as stored: all, or a subset by ``limit``."""
        loaded = self.load()
        _check_samples(loaded, type(self).__name__)
        if self.limit is None or self.limit >= len(loaded.targets):
            return loaded
        return loaded.some(self.limit, seeding.stream(self.seed, "limit"))

    @cached_property
    def dealt(self) -> Partition:
        """The partition, before anything is held out for validation."""
        return self.deal(self.samples)

    @cached_property
    def federation(self) -> Federation:
        """The federated data of a run."""
        part = self.dealt
        train, val = self._hold_out(part.train)
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

    def _hold_out(self, train: ClientIndex) -> tuple[ClientIndex, ClientIndex | None]:
        """Split training samples into kept and held out; the latter are None, with a warning, if there are none."""
        reason = "val_fraction=0 holds nothing out"
        if self.val_fraction:
            rows, sizes, labels = train.flat.numpy(), train.sizes.numpy(), self.samples.labels.numpy()
            seed = self.seed if self.manifest is None else self.manifest.seed
            kept, held = by_class(rows, sizes, labels, self.val_fraction, seeding.stream(seed, "validation"))
            if len(held.flat):
                return kept, held
            reason = "No client has a sample to spare for validation"
        warnings.warn(
            f"{reason}: clients are scored on their test samples after every round; do not choose settings, rounds or "
            "checkpoints by that.",
            stacklevel=2,
        )
        return train, None

    @cached_property
    def data_hash(self) -> str:
        """Hash of all samples and labels as stored; independent of the partition."""
        return hash_tensors(self.samples.inputs, self.samples.targets)

    def describe(self, indices: bool = False) -> Manifest:
        """Return the manifest of this partition; ``indices`` adds every index."""
        if self.manifest is not None and self.manifest.indices is not None:
            return self.manifest
        scheme, seed = self.partition, self.seed
        if self.manifest is not None:
            scheme, seed = scheme or self.manifest.build_scheme(), self.manifest.seed
        return Manifest.of(type(self).__name__, self.data_hash, scheme, seed, self.dealt, indices)

    def picture(self) -> Figure:
        """Draw the clients' class distributions as a matplotlib figure."""
        from fl_lightning.datamodules.picture import partition_figure
        from fl_lightning.datamodules.summary import Summary

        labels = self.samples.labels
        summary = Summary.of(self.dealt, labels, self.num_classes or int(labels.max()) + 1)
        manifest = self.describe()
        return partition_figure(summary, f"{manifest.data}, {manifest.scheme_call}, seed {manifest.seed}")

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint checked on resumption: samples, preprocessing, partition and label permutations."""
        fed = self.federation
        indices = [t for index in (fed.train, fed.test, fed.index("val")) for t in (index.flat, index.offsets)]
        owners = hash_tensors(*indices, fed.global_test, fed.label_maps)
        return hashlib.sha256(f"{self.data_hash}{owners}{self.scale}".encode()).hexdigest()[:16]

    @property
    def scale(self) -> str:
        """Return non-default preprocessing, for the fingerprint."""
        return "" if self.standardize else "not standardised"

    def cohort(self, round: int) -> list[int]:
        """Return the clients that train in a round: a pure function of seed (or secret key) and round.

        ``fixed`` sampling draws :attr:`cohort_size` clients uniformly without replacement. ``poisson`` sampling returns
        at least one client, which does not count if :meth:`drawn` is empty.
        """
        return trained(self.drawn(round), self.federation.num_clients, round)

    def drawn(self, round: int) -> list[int]:
        """Return the clients drawn for a round; may be empty with ``poisson`` sampling."""
        key = None if self._key is None else self._key + f"cohort.{round}".encode()
        clients = self.federation.num_clients
        return drawn(clients, self.fraction, self.sampling, lambda: seeding.stream(self.seed, "sampling", round), key)

    def state_dict(self) -> dict[str, Any]:
        """Return the key of secret cohorts, so that a resumed run draws the same ones."""
        return {} if self._key is None else {"key": self._key.hex()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the key of secret cohorts."""
        self._key = bytes.fromhex(state_dict["key"]) if self.secret_cohorts else None

    @property
    def cohort_size(self) -> int:
        """Number of clients that train in a round: ``max(1, round(fraction * N))``."""
        return max(1, round(self.fraction * self.federation.num_clients))

    def train_dataloader(self) -> Tick:
        """Return the training "loader": one tick, which is one federated round."""
        return Tick()

    def val_dataloader(self) -> ClientChunks:
        """Return clients with validation samples (test samples if nothing is held out), ``eval_clients`` at a time."""
        return self._chunks("val")

    def test_dataloader(self) -> ClientChunks:
        """Return clients with test samples, ``eval_clients`` at a time."""
        return self._chunks("test")

    def predict_dataloader(self) -> ClientChunks:
        """Return the same clients as :meth:`test_dataloader`."""
        return self._chunks("test")

    def _chunks(self, split: Split) -> ClientChunks:
        """Return the clients to evaluate: all, or those of ``eval_only``, with samples in the split."""
        everyone = range(self.federation.num_clients)
        strangers = sorted(set(self.eval_only or ()) - set(everyone))
        if strangers or self.eval_only == []:
            raise FederationError(f"eval_only must name some of the clients 0 to {everyone[-1]}, not {strangers}.")
        chosen = everyone if self.eval_only is None else sorted(set(self.eval_only))
        sizes = self.federation.index(split).sizes
        return ClientChunks([client for client in chosen if sizes[client]], self.eval_clients)


def _check_samples(samples: Samples, name: str) -> None:
    """Refuse inputs and targets of different lengths, and inputs that are not finite."""
    inputs, targets = samples.inputs, samples.targets
    if len(inputs) != len(targets) or not len(targets):
        raise FederationError(f"{name} has {len(inputs)} inputs and {len(targets)} targets: give one target per input.")
    if inputs.is_floating_point():
        bad = torch.nonzero(~torch.isfinite(inputs.flatten(1) if inputs.dim() > 1 else inputs[:, None]).all(1))
        if len(bad):
            raise FederationError(
                f"{len(bad)} of the {len(inputs)} inputs of {name} (the first is sample {int(bad[0])}) hold NaN or "
                "infinity: drop these samples or fill the values in."
            )
