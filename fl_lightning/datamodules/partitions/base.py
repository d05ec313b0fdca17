"""Partitions and the base class of partition schemes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fl_lightning import arguments
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex
from fl_lightning.seeding import stream

Rows = NDArray[np.int64]

#: Above this number, clients are counted before the scheme runs, which would take long to fail.
MANY = 100_000


@dataclass(frozen=True)
class Partition:
    """Assignment of samples to clients.

    Args:
        train: each client's training indices.
        test: each client's test indices, disjoint from all training indices.
        meta: properties of the clients by name, a list with one value per client
            (``mode``, ``dominant_class``, ``major_classes``, ``user``).
        label_maps: each client's label permutation, int64, shape (clients, classes); None means none.
        global_test: indices of the global test set, int64, shape (m,).
    """

    train: ClientIndex
    test: ClientIndex
    meta: Mapping[str, list[Any]] = field(default_factory=dict)
    label_maps: Tensor | None = None
    global_test: Tensor | None = None

    def __len__(self) -> int:
        return len(self.train)

    @property
    def index_hash(self) -> str:
        """Hash of all indices, to compare partitions."""
        parts = (self.train.flat, self.train.offsets, self.test.flat, self.test.offsets, self.global_test)
        return hash_tensors(*parts)


def hash_tensors(*tensors: Tensor | None) -> str:
    """Hash the tensors' types, shapes and bytes to 32 hex digits (BLAKE2b, about 1 GB/s)."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        plain = tensor.detach().cpu()
        if plain.dtype == torch.bfloat16:  # not supported by NumPy
            plain = plain.view(torch.int16)
        array = np.ascontiguousarray(plain.numpy())
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Pool:
    """Labelled samples to partition: official training rows, then official test rows.

    Args:
        labels: class of every sample, int64, shape (n,).
        train_size: number of official training rows, which come first.
        users: author of each sample, shape (n,), if known.
    """

    labels: Rows
    train_size: int
    users: NDArray[Any] | None = None

    @classmethod
    def of(cls, labels: Tensor | ArrayLike, train_size: int | None, users: Sequence[Any] | Tensor | None) -> Pool:
        """Check the arguments and build a pool."""
        labels = torch.as_tensor(labels)
        if labels.dim() != 1 or labels.is_floating_point() or len(labels) == 0:
            raise FederationError(
                f"A partition needs a one-dimensional tensor of integer labels, not {labels.dtype} of shape "
                f"{tuple(labels.shape)}."
            )
        array = labels.cpu().numpy().astype(np.int64, copy=False)
        if array.min() < 0:
            raise FederationError(f"Labels must be 0 or greater, but the smallest is {array.min()}.")
        size = len(array) if train_size is None else train_size
        if not 0 < size <= len(array):
            raise FederationError(f"train_size must lie between 1 and the {len(array)} labels, not {size}.")
        owners = None if users is None else np.asarray(users)
        if owners is not None and len(owners) != len(array):
            raise FederationError(f"There are {len(array)} labels but {len(owners)} users.")
        if owners is not None and owners.dtype.kind == "O" and len({type(one) for one in owners.tolist()}) > 1:
            raise FederationError(
                "users must be all names or all numbers, one for each sample: fill in missing values."
            )
        return cls(array, size, owners)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1

    @property
    def train_rows(self) -> Rows:
        """The official training rows."""
        return np.arange(self.train_size)

    @property
    def test_rows(self) -> Rows:
        """The official test rows; empty if there is no such split."""
        return np.arange(self.train_size, len(self.labels))

    @property
    def global_test(self) -> Tensor | None:
        """The official test rows as a tensor, or None."""
        return torch.from_numpy(self.test_rows) if self.train_size < len(self.labels) else None


def check_scheme(partition: Any) -> None:
    """Refuse anything but a partition scheme, such as its name or class."""
    if partition is None or isinstance(partition, PartitionScheme):
        return
    made = getattr(partition, "__name__", partition)
    hint = f"{made}(clients=10, ...)" if isinstance(made, str) else "Unimodal(clients=10, classes_per_client=2)"
    raise FederationError(f"partition must be a scheme with its settings, such as {hint}, not {partition!r}.")


class PartitionScheme(arguments.NamedArguments, ABC):
    """Base class of partition schemes, which deal samples to clients.

    The constructor arguments of a scheme are its settings (and command-line options). A call is a pure function of
    labels, settings and seed: it uses no global randomness. Subclasses store their constructor arguments under the same
    names and implement :meth:`split`.
    """

    def __call__(
        self,
        labels: Tensor | ArrayLike,
        seed: int,
        *,
        train_size: int | None = None,
        users: Sequence[Any] | Tensor | None = None,
    ) -> Partition:
        """Deal the samples to clients.

        Args:
            labels: class of every sample, integers of shape (n,), as a tensor, array or list: official training rows,
                then official test rows.
            seed: the run's seed.
            train_size: number of official training rows; None means all.
            users: author of each sample, shape (n,), for schemes that deal by user.
        """
        pool, clients = Pool.of(labels, train_size, users), self.settings.get("clients")
        if isinstance(clients, int) and clients > max(len(pool.labels), MANY):  # else leave it to the scheme
            raise FederationError(f"{clients:,} clients cannot share {len(pool.labels):,} samples: use fewer clients.")
        partition = self.split(pool, stream(seed, "partition"))
        for name, index in (("training", partition.train), ("test", partition.test)):
            empty = int((index.sizes == 0).sum())
            if empty:
                raise FederationError(
                    f"{empty} of {len(index)} clients get no {name} samples: use fewer clients or more data."
                )
        return partition

    @abstractmethod
    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows; ``rng`` is the only source of randomness."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments by name."""
        return {name: getattr(self, name) for name in arguments.parameters(type(self))}

    def describe(self) -> dict[str, Any]:
        """Return scheme and settings in plain types, for the manifest."""
        plain = {k: v.describe() if isinstance(v, PartitionScheme) else v for k, v in self.settings.items()}
        return {"scheme": type(self).__name__, "settings": plain}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionScheme) and self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings.items())})"
