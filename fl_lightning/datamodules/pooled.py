"""A federation's samples as ordinary loaders, for ordinary Lightning projects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fl_lightning.arguments import NamedArguments
from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation, Split
from fl_lightning.ranges import Count

Samples = tuple[Tensor, ...]


class Pooled(NamedArguments, LightningDataModule):
    """All clients' samples, or those of some clients, in batches of (inputs, labels).

    For non-federated training: a central baseline, one client's own model, or a project that needs only the data and
    its partition. Batches are gathered by index and normalised as a batch, so no worker processes are needed.

    Args:
        data: the federated DataModule, with its partition.
        batch_size: number of samples in a batch.
        clients: use these clients' samples; None means all clients.
        owners: add the client number of each sample to every batch.

    Example:
        >>> from fl_lightning.datamodules import Digits
        >>> x, y = next(iter(Pooled(Digits(), batch_size=5).train_dataloader()))
        >>> x.shape, y.shape
        (torch.Size([5, 1, 8, 8]), torch.Size([5]))
    """

    def __init__(
        self,
        data: FederatedDataModule,
        batch_size: Count = 64,
        clients: Sequence[int] | None = None,
        owners: bool = False,
    ) -> None:
        super().__init__()
        self.data, self.batch_size, self.clients, self.owners = data, batch_size, clients, owners

    @property
    def federation(self) -> Federation:
        """The clients' data."""
        return self.data.federation

    def setup(self, stage: str | None = None) -> None:
        """Build the federation; later calls change nothing."""
        self.data.setup(stage)

    def train_dataloader(self) -> DataLoader[Samples]:
        """Return training samples, shuffled."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Samples] | list[DataLoader[Samples]]:
        """Return held-out validation samples, in order; an empty list if there are none."""
        return [] if self.federation.val is None else self._loader("val")

    def test_dataloader(self) -> DataLoader[Samples]:
        """Return test samples, in order."""
        return self._loader("test")

    predict_dataloader = test_dataloader

    def _loader(self, split: Split, shuffle: bool = False) -> DataLoader[Samples]:
        federation = self.federation
        everyone = range(federation.num_clients)
        clients = everyone if self.clients is None else self.clients
        strangers = sorted(set(clients) - set(everyone))
        if strangers or not clients:
            raise FederationError(f"clients must name some of the clients 0 to {everyone[-1]}, not {strangers}.")
        dataset = _Gathered(federation, split, list(clients), self.owners)
        return DataLoader(dataset, self.batch_size, shuffle=shuffle, collate_fn=_as_it_is)


class _Gathered(Dataset[Samples]):
    """Samples of some clients; a whole batch is fetched in one go."""

    def __init__(self, federation: Federation, split: Split, clients: list[int], owners: bool) -> None:
        index = federation.index(split)
        self.federation, self.owners = federation, owners
        self.index = torch.cat([index[client] for client in clients])
        sizes = torch.tensor([len(index[client]) for client in clients])
        self.owner = torch.repeat_interleave(torch.tensor(clients), sizes).to(self.index.device)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Samples:
        return tuple(part[0] for part in self.__getitems__([number]))

    def __getitems__(self, numbers: list[int]) -> Samples:
        federation, chosen = self.federation, torch.tensor(numbers, device=self.index.device)
        rows, owner = self.index[chosen], self.owner[chosen]
        y = federation.targets[rows]
        if federation.label_maps is not None:
            y = federation.label_maps[owner, y]
        x = federation.features(federation.inputs[rows], torch.get_default_dtype())
        return (x, y, owner) if self.owners else (x, y)


def _as_it_is(batch: Any) -> Any:
    """Return the batch unchanged: it is already collated."""
    return batch
