"""The DataModule of a server whose clients are elsewhere: clients and cohorts without samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule

from fl_lightning import seeding
from fl_lightning.arguments import NamedArguments
from fl_lightning.datamodules.loaders import ClientChunks, Tick
from fl_lightning.datamodules.sampling import Sampling, drawn, trained
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex, Federation, Split
from fl_lightning.ranges import PositiveShare

if TYPE_CHECKING:
    from fl_lightning.remote.clients import RemoteClients


class SiteData(NamedArguments, LightningDataModule):
    """Numbers of clients instead of data: rounds, cohorts and groups to evaluate, for a stock ``Trainer``.

    Its federation has as many samples as the sites report, all of them blank.

    Args:
        clients: the clients.
        fraction: share of the clients that train in a round, 0 < fraction <= 1.
        seed: seed of the sampling of cohorts; unless given, the seed of ``seed_everything``, else 0.
        sampling: cohorts of a ``fixed`` size, or independent participation of every client (``poisson``).
    """

    def __init__(
        self,
        clients: RemoteClients,
        fraction: PositiveShare = 1.0,
        seed: int | None = None,
        sampling: Sampling = "fixed",
    ) -> None:
        super().__init__()
        self.clients, self.fraction, self.sampling = clients, fraction, sampling
        self.seed = seeding.default_seed() if seed is None else seed
        self._federation: Federation | None = None

    def setup(self, stage: str | None = None) -> None:
        """Wait for the sites that are needed to start."""
        self.clients.wait()
        self.forget()

    def forget(self) -> None:
        """Rebuild the federation on next use, after a client has joined."""
        self._federation = None

    @property
    def federation(self) -> Federation:
        """Blank samples, as many as the sites reported."""
        if self._federation is None:
            self._federation = self.clients.blank()
        return self._federation

    @federation.setter
    def federation(self, federation: Federation) -> None:
        self._federation = federation

    @property
    def fingerprint(self) -> str:
        """Fingerprint in checkpoints, to reject another federation."""
        return f"{self.clients.places} sites"

    def cohort(self, round: int) -> list[int]:
        """Return the clients that train in a round: a pure function of seed and round, present or not."""
        return trained(self.drawn(round), self.clients.places, round)

    def drawn(self, round: int) -> list[int]:
        """Return the clients drawn for a round, possibly none with ``poisson`` sampling."""
        stream = lambda: seeding.stream(self.seed, "sampling", round)  # noqa: E731
        return drawn(self.clients.places, self.fraction, self.sampling, stream, None)

    def train_dataloader(self) -> Tick:
        """Return one tick: one federated round."""
        return Tick()

    def val_dataloader(self) -> ClientChunks:
        """Return clients with validation samples, or with test samples if nothing is held out."""
        return self._chunks("val")

    def test_dataloader(self) -> ClientChunks:
        """Return all clients."""
        return self._chunks("test")

    def predict_dataloader(self) -> Any:
        """Raise an error: predictions stay at the sites."""
        raise FederationError("The samples are at the sites, so predictions are made there: use predict at a site.")

    def _chunks(self, split: Split) -> ClientChunks:
        sizes = self.federation.index(split).sizes
        return ClientChunks([client for client, size in enumerate(sizes.tolist()) if size], self.clients.places)


def blank(told: list[dict[str, Any]]) -> Federation:
    """Build a federation of blank samples.

    Args:
        told: every client's description of its data when it joined.
    """
    one = told[0]
    floating = one["tokens"] is None
    held_out = any(client["samples"]["val"] for client in told)
    splits = ("train", "val", "test") if held_out else ("train", "test")
    sizes = [client["samples"][split] for split in splits for client in told]
    rows = iter(torch.split(torch.arange(sum(sizes)), sizes))
    index = {split: ClientIndex.of([next(rows) for _ in told]) for split in splits}
    shape, dtype = one["targets"]
    inputs = torch.zeros(1, *one["shape"], dtype=torch.get_default_dtype() if floating else dtype_named(one["tokens"]))
    return Federation(
        inputs=inputs.expand(sum(sizes), *one["shape"]),
        targets=torch.zeros(1, *shape, dtype=dtype_named(dtype)).expand(sum(sizes), *shape),
        train=index["train"],
        test=index["test"],
        num_classes=max(client["classes"] for client in told),
        val=index.get("val"),
    )


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that a site named."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise FederationError(f"A site's data cannot be of type {name!r}.")
    return found
