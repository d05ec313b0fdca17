"""Users' own tensors as a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fl_lightning import arguments, seeding
from fl_lightning.datamodules.base import FederatedDataModule, Samples
from fl_lightning.datamodules.partitions.base import Partition, hash_tensors
from fl_lightning.datamodules.partitions.deal import local_split
from fl_lightning.datamodules.partitions.iid import IID
from fl_lightning.datamodules.partitions.users import ByUser
from fl_lightning.datamodules.strata import given_strata, strata_of
from fl_lightning.errors import FederationError
from fl_lightning.federation import Augment, ClientIndex

Array = Tensor | NDArray[Any]
Indices = Sequence[Sequence[int]] | Sequence[Tensor] | Sequence[NDArray[Any]] | ClientIndex


class TensorFederation(FederatedDataModule):
    """Tensors or NumPy arrays, with index lists per client or any partition scheme.

    Args:
        inputs: all samples, shape (n, ...), a tensor or an array.
        targets: classes, integers of shape (n,), or other targets of shape (n, ...).
        train: each client's training indices, disjoint between clients; None uses ``partition``.
        test: each client's test indices; None holds out a fifth of each client's ``train``.
        train_size: number of official training rows, which come first, for ``partition``; None means all.
        users: user of each sample, shape (n,), for the partition ``ByUser``.
        num_classes: number of classes; 0 if targets are numbers. Default: the greatest class plus one, or 0 if the
            targets cannot be classes.
        mean: subtracted from a batch's inputs, broadcast over (B, ...).
        std: divides a batch's inputs.
        global_test: indices of the global test set, with ``train`` only.
        label_maps: each client's label permutation, shape (clients, classes), with ``train`` only.
        meta: properties of the clients, one value per client, with ``train`` only.
        transform: ``transform(inputs, rng)`` augments one client's raw training batch if ``augment`` is on.
        stratify: a column that ``partition`` deals by if targets are not classes, shape (n,). Default: derived from the
            targets.
        **kwargs: as for every DataModule.

    Example:
        >>> x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> data = TensorFederation(x.numpy(), y, train=[[0, 1], [2, 3]], test=[[4], [5]])
        >>> data.federation.num_clients, data.num_classes, data.input_shape
        (2, 2, (3,))
    """

    def __init__(
        self,
        inputs: Array,
        targets: Array,
        train: Indices | None = None,
        test: Indices | None = None,
        train_size: int | None = None,
        users: Sequence[Any] | Array | None = None,
        num_classes: int | None = None,
        mean: Array | None = None,
        std: Array | None = None,
        global_test: Sequence[int] | Array | None = None,
        label_maps: Array | None = None,
        meta: Mapping[str, Sequence[Any]] | None = None,
        transform: Augment | None = None,
        stratify: Sequence[Any] | Tensor | ArrayLike | None = None,
        **kwargs: Any,
    ) -> None:
        self.transform = transform
        super().__init__(**kwargs)
        inputs, targets = arguments.tensor("inputs", inputs), arguments.tensor("targets", targets)
        if train is not None:
            self.partition = None
        given = {"mean": mean, "std": std, "label_maps": label_maps, "global_test": global_test}
        found = {name: None if value is None else arguments.tensor(name, value) for name, value in given.items()}
        if inputs.dim() < 1 or len(inputs) != len(targets) or not len(targets):
            raise FederationError(
                f"There are {len(inputs) if inputs.dim() else 'no'} inputs and {len(targets)} targets: give one target "
                "per input."
            )
        if train is None and not (test is None and global_test is None and label_maps is None and meta is None):
            raise FederationError("test, global_test, label_maps and meta go with train: give train too.")
        if train is not None and (kwargs.get("partition") or kwargs.get("manifest")):
            raise FederationError("Give either index lists or a partition (or manifest), not both.")
        if train is not None and kwargs.get("limit") is not None:
            raise FederationError("limit and index lists exclude each other: leave limit out.")
        whole = not targets.is_floating_point() or (targets.dim() == 1 and bool(num_classes))
        self.inputs, self.targets = inputs, targets.long() if whole else targets
        self.train_size, self.users = train_size, users.tolist() if isinstance(users, np.ndarray) else users
        self.num_classes = _classes(self.targets) if num_classes is None else num_classes
        self._strata = None if stratify is None else given_strata(stratify, len(targets))
        self.input_shape = tuple(inputs.shape[1:])
        self.mean, self.std = found["mean"], found["std"]
        self._train = None if train is None else _index(train)
        self._test = None if test is None else _index(test)
        self._global = None if found["global_test"] is None else found["global_test"].long()
        self._maps = None if found["label_maps"] is None else found["label_maps"].long()
        self._meta = {k: list(v) for k, v in (meta or {}).items()}

    def load(self) -> Samples:
        """Return the given tensors."""
        strata = self._strata
        classes = self.targets.dim() == 1 and self.num_classes and int(self.targets.min()) >= 0
        if strata is None and not classes:
            strata = strata_of(self.targets, self.num_classes)
            if strata is None:
                self._check_unstratified()
                strata = torch.zeros(len(self.targets), dtype=torch.int64)
        return Samples(self.inputs, self.targets, self.train_size, self.users, strata)

    def _check_unstratified(self) -> None:
        """Refuse a partition by classes if the targets are not classes."""
        if self._train is None and self.manifest is None and not isinstance(self.partition, IID | ByUser):
            raise FederationError(
                f"{type(self.partition).__name__} deals samples by their classes, and targets of shape "
                f"{tuple(self.targets.shape)} are not classes: pass a column as stratify=, or use IID or ByUser."
            )

    def augmentation(self) -> Augment | None:
        """Return the given transform."""
        return self.transform

    @property
    def scale(self) -> str:
        """Return the given mean and standard deviation, for the fingerprint."""
        return "" if self.mean is None else hash_tensors(self.mean, self.std)

    def deal(self, samples: Samples) -> Partition:
        """Return the given index lists, checked, or the partition's."""
        if self._train is None:
            return super().deal(samples)
        train, test = self._train, self._test
        if test is None:
            rng = seeding.stream(self.seed, "partition")
            train, test = local_split(train.flat.numpy(), train.sizes.numpy(), 0.2, rng)
        _check(train, test, self._global, len(self.targets))
        return Partition(train, test, self._meta, self._maps, self._global)


def _index(lists: Indices) -> ClientIndex:
    """Build an index from lists, tensors or an index."""
    return lists if isinstance(lists, ClientIndex) else ClientIndex.of(lists)


def _classes(targets: Tensor) -> int:
    """Return the number of classes, which are counted from 0; 0 if targets are numbers."""
    if targets.is_floating_point():
        return 0
    classes = int(targets.max()) + 1
    return 0 if targets.dim() == 1 and classes > len(targets) else classes


def _check(train: ClientIndex, test: ClientIndex, rest: Tensor | None, samples: int) -> None:
    """Refuse indices out of range and overlaps of training and test samples."""
    held = test.flat if rest is None else torch.cat((test.flat, rest))
    both = torch.cat((train.flat, held))
    if len(both) and not 0 <= int(both.min()) <= int(both.max()) < samples:
        raise FederationError(f"Indices must lie between 0 and {samples - 1}, the last of the {samples} samples.")
    rows, counts = np.unique(train.flat.numpy(), return_counts=True)
    if len(twice := rows[counts > 1]):
        raise FederationError(
            f"{len(twice)} samples (the first is {twice[0]}) are in the training lists more than once: give every "
            "sample to one client, once."
        )
    shared = np.intersect1d(train.flat.numpy(), held.numpy())
    if len(shared):
        raise FederationError(
            f"{len(shared)} samples (the first is {shared[0]}) are in training and test lists: remove them from one."
        )
