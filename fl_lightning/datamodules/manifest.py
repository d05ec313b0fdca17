"""Partition manifests: scheme, settings, seed, and hashes of data and indices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning import arguments
from fl_lightning.datamodules import partitions
from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """Identity of a partition, in JSON types.

    Args:
        data: name of the data set.
        data_hash: hash of its samples and labels.
        scheme: the scheme's name and settings, as returned by :meth:`PartitionScheme.describe`.
        seed: the seed of the partition.
        index_hash: hash of all clients' indices.
        clients: number of clients.
        meta: properties of the clients, one value per client.
        label_maps: each client's label permutation, if any.
        indices: each client's training and test indices and the global test set, if stored.
        format: version of the format.
    """

    data: str
    data_hash: str
    scheme: dict[str, Any]
    seed: int
    index_hash: str
    clients: int
    meta: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    label_maps: list[list[int]] | None = None
    indices: dict[str, Any] | None = None
    format: int = FORMAT

    @classmethod
    def of(
        cls,
        data: str,
        data_hash: str,
        scheme: PartitionScheme | None,
        seed: int,
        partition: Partition,
        indices: bool = False,
    ) -> Manifest:
        """Describe a partition; ``indices`` adds every index, as needed without a scheme."""
        maps = partition.label_maps
        return cls(
            data=data,
            data_hash=data_hash,
            scheme={} if scheme is None else scheme.describe(),
            seed=seed,
            index_hash=partition.index_hash,
            clients=len(partition),
            meta=partition.meta,
            label_maps=None if maps is None else maps.tolist(),
            indices=_indices(partition) if indices or scheme is None else None,
        )

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read a manifest; refuse other files."""
        try:
            fields = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise FederationError(
                f"There is no manifest {path}: `fl-lightning partition --out DIR` writes one."
            ) from None
        except (OSError, ValueError) as error:
            raise FederationError(f"The manifest {path} cannot be read ({error}): write it again.") from None
        try:
            manifest = cls(**fields)
            arguments.check_types(cls, (), fields)
        except TypeError:
            raise FederationError(f"{path} is not a manifest: `fl-lightning partition --out DIR` writes one.") from None
        except FederationError as error:
            raise FederationError(f"The manifest {path} was changed: {error}") from None
        if manifest.format != FORMAT:
            raise FederationError(f"The manifest {path} has format {manifest.format}, but only {FORMAT} is known.")
        return manifest

    def write(self, path: str | Path) -> None:
        """Write the manifest as JSON."""
        Path(path).write_text(json.dumps(asdict(self), separators=(",", ":") if self.indices else None) + "\n")

    @property
    def scheme_call(self) -> str:
        """Scheme and settings as a Python call."""
        return _short(self.scheme) if self.scheme else "own indices"

    def build_scheme(self) -> PartitionScheme | None:
        """Build the scheme; None for own index lists or a scheme from outside the library."""
        return _build(self.scheme) if self.scheme else None

    def check(self, data_hash: str, scheme: PartitionScheme | None) -> None:
        """Refuse other data, and a partition scheme other than the manifest's."""
        if data_hash != self.data_hash:
            raise FederationError(
                f"The manifest was made with other data ({self.data}, hash {self.data_hash}; this data has "
                f"{data_hash}): use the data it names or write a new manifest."
            )
        # Round trip through JSON, which turns tuples into lists.
        if scheme is not None and json.loads(json.dumps(scheme.describe())) != self.scheme:
            raise FederationError(
                f"The manifest holds {self.scheme_call} but the DataModule has {scheme!r}: leave the partition "
                "out or write a new manifest."
            )

    def partition(
        self,
        scheme: PartitionScheme | None,
        labels: Tensor,
        train_size: int | None = None,
        users: Sequence[Any] | Tensor | None = None,
    ) -> Partition:
        """Return the partition: from the stored indices, or by running the scheme again and checking its hash."""
        if self.indices is not None:
            part = self._stored()
        else:
            scheme = scheme or self.build_scheme()
            if scheme is None:
                raise FederationError(
                    f"The manifest's scheme {self.scheme.get('scheme')} is not the library's: give the DataModule that "
                    "partition, or write the manifest with --indices."
                )
            part = scheme(labels, self.seed, train_size=train_size, users=users)
        maps = None if part.label_maps is None else part.label_maps.tolist()
        if part.index_hash != self.index_hash or maps != self.label_maps:
            raise FederationError("The manifest's indices do not match its hash: write it again.")
        return part

    def _stored(self) -> Partition:
        """Return the partition from the stored indices."""
        try:
            assert self.indices is not None
            train, test = (ClientIndex.of(self.indices[name]) for name in ("train", "test"))
            rest = self.indices["global_test"]
        except (KeyError, TypeError, ValueError):
            raise FederationError("The manifest's indices are damaged: write it again.") from None
        maps = None if self.label_maps is None else torch.tensor(self.label_maps)
        return Partition(
            train,
            test,
            {name: list(values) for name, values in self.meta.items()},
            maps,
            None if rest is None else torch.tensor(rest, dtype=torch.int64),
        )


def _indices(partition: Partition) -> dict[str, Any]:
    """Return all indices as lists."""
    rest = partition.global_test
    return {
        "train": [rows.tolist() for rows in partition.train],
        "test": [rows.tolist() for rows in partition.test],
        "global_test": None if rest is None else rest.tolist(),
    }


def _build(description: Mapping[str, Any]) -> PartitionScheme | None:
    """Build a library scheme from its description, including nested schemes."""
    try:
        name, settings = description["scheme"], description["settings"]
        kind = getattr(partitions, name, None) if name in partitions.__all__ else None
        if kind is None:
            return None
        nested = {k: _build(v) if isinstance(v, dict) and "scheme" in v else v for k, v in settings.items()}
        scheme = kind(**nested)
    except (KeyError, TypeError, AttributeError, FederationError) as error:
        reason = f" ({str(error).rstrip('.')})" if isinstance(error, FederationError) else ""
        raise FederationError(f"The manifest's scheme is damaged{reason}: write it again.") from None
    assert isinstance(scheme, PartitionScheme)
    return scheme


def _short(description: Mapping[str, Any]) -> str:
    """Format a scheme's description as a Python call."""
    settings = description.get("settings", {})
    inner = (f"{k}={_short(v) if isinstance(v, dict) else repr(v)}" for k, v in settings.items())
    return f"{description.get('scheme')}({', '.join(inner)})"
