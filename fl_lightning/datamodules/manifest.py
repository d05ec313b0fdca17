"""A partition on paper: scheme, settings, seed, and hashes that tell whether data and indices are the same."""

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
    """Identity of a partition, in JSON's types.

    Args:
        data: name of the data set.
        data_hash: hash of its samples and labels.
        scheme: the scheme's name and settings, as :meth:`PartitionScheme.describe` gives them.
        seed: the seed it was drawn with.
        index_hash: hash of all clients' indices.
        clients: number of clients.
        meta: what is known of the clients, one value each.
        label_maps: each client's label permutation, where labels are permuted.
        indices: each client's training and test indices and the global test set, if they were asked for.
        format: version of this layout.
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
        """Describe a partition; ``indices`` writes every index too, which own index lists (no scheme) need."""
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
        """Read a manifest; anything that is not one is refused."""
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
        """Scheme and settings as one would write them."""
        return _short(self.scheme) if self.scheme else "own indices"

    def build_scheme(self) -> PartitionScheme | None:
        """The scheme with its settings; None for own indices or a scheme that is not one of the library's."""
        return _build(self.scheme) if self.scheme else None

    def check(self, data_hash: str, scheme: PartitionScheme | None) -> None:
        """Refuse other data, and a partition scheme other than the manifest's."""
        if data_hash != self.data_hash:
            raise FederationError(
                f"The manifest was made with other data ({self.data}, hash {self.data_hash}; this data has "
                f"{data_hash}): use the data it names or write a new manifest."
            )
        # As JSON has it, where a tuple is a list.
        if scheme is not None and json.loads(json.dumps(scheme.describe())) != self.scheme:
            raise FederationError(
                f"The manifest holds {self.scheme_call} but the DataModule asks for {scheme!r}: leave the partition "
                "out or write a new manifest."
            )

    def partition(
        self,
        scheme: PartitionScheme | None,
        labels: Tensor,
        train_size: int | None = None,
        users: Sequence[Any] | Tensor | None = None,
    ) -> Partition:
        """The partition that the manifest describes: its indices, or the scheme run again and compared."""
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
        """The partition from the stored indices."""
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
    """All indices as lists."""
    rest = partition.global_test
    return {
        "train": [rows.tolist() for rows in partition.train],
        "test": [rows.tolist() for rows in partition.test],
        "global_test": None if rest is None else rest.tolist(),
    }


def _build(description: Mapping[str, Any]) -> PartitionScheme | None:
    """A library scheme from its description, schemes within schemes included."""
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
    """A scheme's description as a call."""
    settings = description.get("settings", {})
    inner = (f"{k}={_short(v) if isinstance(v, dict) else repr(v)}" for k, v in settings.items())
    return f"{description.get('scheme')}({', '.join(inner)})"
