"""The data of a federation: all samples as tensors in memory, and the sample indices of each client.

There is no ``DataLoader`` and no object per sample: batches are gathered by index and normalised as a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import FederationError

Split = Literal["train", "val", "test"]
#: ``augment(inputs, rng)`` transforms one client's raw batch, shape (B, ...), using ``rng`` as its only randomness.
Augment = Callable[[Tensor, np.random.Generator], Tensor]


@dataclass(frozen=True)
class ClientIndex:
    """Sample indices of every client: one flat index tensor with offsets.

    Args:
        flat: sample indices of all clients, client after client, int64, shape (total,).
        offsets: client k owns ``flat[offsets[k]:offsets[k + 1]]``, int64, shape (clients + 1,).

    Example:
        >>> index = ClientIndex.of([[3, 1], [2]])
        >>> index[0].tolist(), len(index), index.sizes.tolist()
        ([3, 1], 2, [2, 1])
    """

    flat: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, parts: Iterable[Sequence[int] | np.ndarray[Any, Any] | Tensor]) -> ClientIndex:
        """Build from one sequence of indices per client."""
        arrays = [np.asarray(part) for part in parts]
        for client, array in enumerate(arrays):
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                kind = f"{array.dtype}" if array.ndim == 1 else f"an array of shape {array.shape}"
                raise FederationError(
                    f"Client {client}'s indices must be a list of integers, the positions of its samples, not {kind}."
                )
        arrays = [array.astype(np.int64) for array in arrays]
        flat = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
        offsets = np.cumsum([0, *(len(a) for a in arrays)], dtype=np.int64)
        return cls(torch.from_numpy(flat), torch.from_numpy(offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} is not one of the {len(self)} clients")
        return self.flat[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client] for client in range(len(self)))

    @property
    def sizes(self) -> Tensor:
        """Number of samples of every client, shape (clients,)."""
        return self.offsets.diff()

    def to(self, device: torch.device) -> ClientIndex:
        """Return this index with the sample indices on ``device``; offsets stay on the host."""
        return replace(self, flat=self.flat.to(device))


@dataclass(frozen=True)
class Federation:
    """All data of a federated run, with its preprocessing.

    Args:
        inputs: all samples as stored (uint8 images, float features, int64 tokens), shape (n, ...).
        targets: the targets: classes, int64, shape (n,), or anything of shape (n, ...).
        train: every client's training samples.
        test: every client's test samples.
        num_classes: number of classes; 0 if targets are not one class per sample.
        val: held-out part of each client's training samples, if any; clients are then evaluated on it after each
            round, instead of on ``test``. It is empty for a client with a single sample.
        global_test: indices of a test set that no client owns, if there is one, shape (m,).
        mean: subtracted from the inputs of a batch, broadcast over (B, ...); None leaves inputs as stored.
        std: divides the inputs of a batch, like ``mean``.
        label_maps: label permutation of every client, int64, shape (clients, classes); None means no relabelling.
        augment: transforms a raw training batch of one client, using only that client's RNG stream.
        meta: known properties of the clients, one value each (mode, dominant class, user).
        numbers: every client's number in the whole federation, if this is a part of it (one site's data); selects their
            RNG streams. None numbers them from 0.
    """

    inputs: Tensor
    targets: Tensor
    train: ClientIndex
    test: ClientIndex
    num_classes: int
    val: ClientIndex | None = None
    global_test: Tensor | None = None
    mean: Tensor | None = None
    std: Tensor | None = None
    label_maps: Tensor | None = None
    augment: Augment | None = None
    meta: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    numbers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.train) == 0:
            raise FederationError("The federation has no clients: give the partition at least one.")
        if len(self.train) != len(self.test):
            raise FederationError(f"{len(self.train)} clients have training data but {len(self.test)} have test data.")
        for name, index in (("train", self.train), ("test", self.test)):
            empty = torch.nonzero(index.sizes == 0).flatten().tolist()
            if empty:
                raise FederationError(
                    f"{len(empty)} of {len(index)} clients have no {name} samples (the first is client {empty[0]}): "
                    "use fewer clients or more data."
                )
        if len(self.inputs) != len(self.targets):
            raise FederationError(
                f"There are {len(self.inputs)} inputs but {len(self.targets)} targets: give one target per input."
            )
        if int(self.train.flat.max()) >= len(self.targets):
            raise FederationError("A client's index points past the end of the data.")
        self._check_scale()
        for name, values in self.meta.items():
            if len(values) != len(self.train):
                raise FederationError(
                    f"meta must have one value for each of the {len(self.train)} clients, but {name!r} has "
                    f"{len(values)}."
                )
        self._check_labels()

    def _check_scale(self) -> None:
        """Reject a mean or standard deviation that does not broadcast to a sample."""
        if (self.mean is None) != (self.std is None):
            raise FederationError("Inputs are normalised by mean and std together: give both or neither.")
        batch = (2, *self.inputs.shape[1:])
        for name, value in (("mean", self.mean), ("std", self.std)):
            if value is not None and not _broadcasts(value.shape, batch):
                raise FederationError(
                    f"{name} of shape {tuple(value.shape)} cannot be applied to samples of shape {batch[1:]}: give one "
                    "number, or as many as there are channels or features."
                )
        if self.std is not None and not bool((self.std > 0).all()):
            raise FederationError("std must be greater than 0 everywhere: use 1 for a feature that is constant.")

    def _check_labels(self) -> None:
        """Reject labels out of range, and label permutations that do not cover the labels."""
        if self.targets.dim() != 1 or self.targets.is_floating_point() or not self.num_classes:
            if self.label_maps is not None:
                raise FederationError("label_maps rename classes, but the targets are not one class for each sample.")
            return
        low, high = int(self.targets.min()), int(self.targets.max())
        if not 0 <= low <= high < self.num_classes:  # ignore samples that no client owns
            owned = torch.cat([self.targets[i.flat] for i in (self.train, self.test, self.index("val"))])
            low, high = int(owned.min()), int(owned.max())
        if not 0 <= low <= high < self.num_classes:
            raise FederationError(
                f"Labels must lie between 0 and {self.num_classes - 1}, as num_classes={self.num_classes} says, but "
                f"they run from {low} to {high}."
            )
        maps = self.label_maps
        if maps is None:
            return
        if maps.dim() != 2 or len(maps) != len(self.train) or maps.shape[1] <= high:
            raise FederationError(
                f"label_maps must have a row for each of the {len(self.train)} clients and a column for each of the "
                f"{self.num_classes} classes, not the shape {tuple(maps.shape)}."
            )
        if not 0 <= int(maps.min()) <= int(maps.max()) < self.num_classes:
            raise FederationError(f"label_maps must name classes between 0 and {self.num_classes - 1}.")

    @property
    def validated(self) -> Split:
        """The split on which clients are scored after a round; it also names the metrics."""
        return "test" if self.val is None else "val"

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    def groups(self, key: str) -> tuple[Tensor, list[str]]:
        """Return every client's group by an entry of ``meta`` and the groups' names, both empty if there is none.

        Groups are numbered in the order of their values. The larger of two is the majority; a tie goes to the first.

        Example:
            >>> index, samples = ClientIndex.of([torch.tensor([i]) for i in range(3)]), torch.zeros(3)
            >>> Federation(samples, samples.long(), index, index, 1, meta={"mode": [1, 0, 1]}).groups("mode")
            (tensor([1, 0, 1]), ['minority', 'majority'])
        """
        values = [v if isinstance(v, int | float | str) else str(v) for v in self.meta.get(key, ())]
        distinct = sorted(set(values), key=lambda value: (isinstance(value, str), value))
        groups = torch.tensor([distinct.index(value) for value in values], dtype=torch.int64)
        if len(distinct) != 2:
            return groups, [f"{key}_{value}" for value in distinct]
        first, second = torch.bincount(groups).tolist()
        return groups, ["majority", "minority"] if first >= second else ["minority", "majority"]

    def number_of(self, client: int) -> int:
        """Return a client's number in the whole federation."""
        return client if self.numbers is None else self.numbers[client]

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.inputs.device

    def index(self, split: Split) -> ClientIndex:
        """Return the clients' indices of a split; ``val`` is ``test`` if nothing was held out."""
        if split == "train":
            return self.train
        return self.val if split == "val" and self.val is not None else self.test

    def part(self, clients: Sequence[int], numbers: Sequence[int] | None = None) -> Federation:
        """Return some of the clients as a federation of their own, with their samples only.

        Args:
            clients: the clients to take.
            numbers: their numbers in the whole federation; None keeps the present ones.
        """
        kept = [self.train, self.test, *([] if self.val is None else [self.val])]
        rows = [index[client] for index in kept for client in clients]
        places = iter(torch.split(torch.arange(sum(map(len, rows))), list(map(len, rows))))
        train, test, *val = (ClientIndex.of([next(places) for _ in clients]) for _ in kept)
        whole = torch.cat(rows)
        return replace(
            self,
            inputs=self.inputs[whole],
            targets=self.targets[whole],
            train=train,
            test=test,
            val=val[0] if val else None,
            global_test=None,
            label_maps=None if self.label_maps is None else self.label_maps[list(clients)],
            meta={name: [values[client] for client in clients] for name, values in self.meta.items()},
            numbers=tuple(map(self.number_of, clients)) if numbers is None else tuple(numbers),
        )

    def to(self, device: torch.device) -> Federation:
        """Return this federation with all tensors on ``device``; itself if it is there already."""
        if self.device == device:
            return self
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor | ClientIndex)}
        return replace(self, **moved)

    def shared(self) -> Federation:
        """Move the samples to shared memory, so that other processes can use them without a copy."""
        if self.device.type != "cpu":
            raise FederationError(f"Worker processes share a CPU's memory, not {self.device}: set workers=1.")
        for value in vars(self).values():
            if isinstance(value, Tensor):
                value.share_memory_()  # type: ignore[no-untyped-call]
            elif isinstance(value, ClientIndex):
                value.flat.share_memory_()  # type: ignore[no-untyped-call]
                value.offsets.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def features(self, raw: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Normalise gathered raw inputs and convert them to the net's precision; integer tokens stay unchanged.

        Args:
            raw: the inputs.
            dtype: floating precision of the net.
            out: output tensor, with the shape of ``raw``.
        """
        if self.mean is None or self.std is None:
            result = raw.to(dtype) if raw.is_floating_point() else raw
            return result if out is None else out.copy_(result)
        result = raw.to(dtype) if out is None else out.copy_(raw)
        return result.sub_(self.mean.to(dtype)).div_(self.std.to(dtype))

    def labels(self, clients: Sequence[int], index: Tensor) -> Tensor:
        """Return the targets of samples under their clients' label permutations.

        Args:
            clients: the K clients.
            index: sample indices, shape (K, B).
        """
        found = self.targets.index_select(0, index.reshape(-1))
        targets = found.view(*index.shape, *found.shape[1:])
        if self.label_maps is None:
            return targets
        return self.label_maps[torch.tensor(clients, device=self.device)].gather(1, targets)

    def gather(
        self,
        clients: Sequence[int],
        index: Tensor,
        dtype: torch.dtype,
        rngs: Sequence[np.random.Generator] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gather one batch of every client at once.

        Args:
            clients: the K clients.
            index: sample indices, shape (K, B).
            dtype: floating precision of the net.
            rngs: augmentation streams, one per client; None disables augmentation.

        Returns:
            Inputs of shape (K, B, ...) and targets of shape (K, B, ...).
        """
        flat = index.reshape(-1)
        raw = self.inputs.index_select(0, flat)
        if self.augment is not None and rngs is not None:
            parts = raw.view(*index.shape, *raw.shape[1:])
            raw = torch.stack([self.augment(part, rng) for part, rng in zip(parts, rngs, strict=True)]).flatten(0, 1)
        inputs = self.features(raw, dtype)
        return inputs.view(*index.shape, *inputs.shape[1:]), self.labels(clients, index)


def _broadcasts(shape: Sequence[int], batch: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape broadcasts to a batch without changing the batch's shape."""
    try:
        return np.broadcast_shapes(tuple(shape), batch) == batch
    except ValueError:
        return False
