"""Partitions, and the base of every partition scheme: a pure function of (labels, settings, seed)."""

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

#: So many clients that a scheme would take long to find out that there are too many.
MANY = 100_000


@dataclass(frozen=True)
class Partition:
    """Who owns which samples.

    Args:
        train: each client's training indices.
        test: each client's test indices; none of them is in anybody's training indices.
        meta: what is known of the clients, a list with one value per client under each name
            (``mode``, ``dominant_class``, ``major_classes``, ``user``).
        label_maps: own label permutation of every client, int64, shape (clients, classes); None means none.
        global_test: indices of a global test set, int64, shape (m,).
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
        """Hash of every index, to tell whether two partitions are the same."""
        parts = (self.train.flat, self.train.offsets, self.test.flat, self.test.offsets, self.global_test)
        return hash_tensors(*parts)


def hash_tensors(*tensors: Tensor | None) -> str:
    """Hash of the tensors' types, shapes and bytes, as 32 hex digits (BLAKE2b, about 1 GB/s)."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        plain = tensor.detach().cpu()
        if plain.dtype == torch.bfloat16:  # which NumPy does not have
            plain = plain.view(torch.int16)
        array = np.ascontiguousarray(plain.numpy())
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Pool:
    """The labelled samples that a scheme may deal out: official training rows, then official test rows.

    Args:
        labels: class of every sample, int64, shape (n,).
        train_size: how many of them, from the first, are official training rows.
        users: who wrote each sample, shape (n,), where the data says so.
    """

    labels: Rows
    train_size: int
    users: NDArray[Any] | None = None

    @classmethod
    def of(cls, labels: Tensor | ArrayLike, train_size: int | None, users: Sequence[Any] | Tensor | None) -> Pool:
        """Check what a caller passed."""
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
                "users must be all names or all numbers, one for each sample: fill in what is missing."
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
        """The official test rows; none where the data has no such split."""
        return np.arange(self.train_size, len(self.labels))

    @property
    def global_test(self) -> Tensor | None:
        """The official test rows as a tensor, or None."""
        return torch.from_numpy(self.test_rows) if self.train_size < len(self.labels) else None


def check_scheme(partition: Any) -> None:
    """Refuse what is no partition scheme, above all the name or the class of one."""
    if partition is None or isinstance(partition, PartitionScheme):
        return
    made = getattr(partition, "__name__", partition)
    hint = f"{made}(clients=10, ...)" if isinstance(made, str) else "Unimodal(clients=10, classes_per_client=2)"
    raise FederationError(f"partition must be a scheme with its settings, such as {hint}, not {partition!r}.")


class PartitionScheme(arguments.NamedArguments, ABC):
    """A way to deal samples to clients.

    A scheme is a small object whose constructor arguments are its settings (and the command line's options). Calling
    it is a pure function of labels, settings and seed: no global randomness, the same result every time. A new scheme
    stores its constructor arguments under their own names and fills in :meth:`split`.
    """

    def __call__(
        self,
        labels: Tensor | ArrayLike,
        seed: int,
        *,
        train_size: int | None = None,
        users: Sequence[Any] | Tensor | None = None,
    ) -> Partition:
        """Deal the samples out.

        Args:
            labels: class of every sample, integers of shape (n,), a tensor, an array or a list: official training rows,
                then official test rows.
            seed: the run's seed.
            train_size: how many rows are official training rows; None means all.
            users: who wrote each sample, shape (n,), for schemes that go by user.
        """
        pool, clients = Pool.of(labels, train_size, users), self.settings.get("clients")
        if isinstance(clients, int) and clients > max(len(pool.labels), MANY):  # schemes say how many there may be
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
        """Deal the pool's rows out, drawing from ``rng`` alone."""

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor arguments by name."""
        return {name: getattr(self, name) for name in arguments.parameters(type(self))}

    def describe(self) -> dict[str, Any]:
        """Scheme and settings in plain types, as a manifest keeps them."""
        plain = {k: v.describe() if isinstance(v, PartitionScheme) else v for k, v in self.settings.items()}
        return {"scheme": type(self).__name__, "settings": plain}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionScheme) and self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings.items())})"
