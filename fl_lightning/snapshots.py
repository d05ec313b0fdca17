"""Private state of a client between rounds, and the stores for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.scratch import reserve
from fl_lightning.wire import State


@dataclass(frozen=True)
class ClientSnapshot:
    """A client's state between two rounds: its private entries and its counters.

    Args:
        private: private entries by name (a head, a control variate, a mask); they are never sent.
        rounds: number of rounds the client has trained in.
        steps: number of local steps the client has taken.
        last_round: the last round it trained in, -1 if none.
    """

    private: State = field(default_factory=dict)
    rounds: int = 0
    steps: int = 0
    last_round: int = -1

    def after(self, private: State, round: int, steps: int) -> ClientSnapshot:
        """Return the snapshot after one more round of training."""
        return ClientSnapshot(private, self.rounds + 1, self.steps + steps, round)


class SnapshotStore(MutableMapping[int, ClientSnapshot]):
    """One snapshot per client that has trained; for other clients it returns an empty one.

    Snapshots are immutable and are replaced when a round commits, so a run that stops within a round leaves the store
    unchanged.
    """

    def __init__(self) -> None:
        self._snapshots: dict[int, ClientSnapshot] = {}

    def __getitem__(self, client: int) -> ClientSnapshot:
        return self._snapshots.get(client, _NEVER)

    def __setitem__(self, client: int, snapshot: ClientSnapshot) -> None:
        self._snapshots[client] = snapshot

    def __delitem__(self, client: int) -> None:
        del self._snapshots[client]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._snapshots))

    def __len__(self) -> int:
        return len(self._snapshots)

    def __contains__(self, client: object) -> bool:
        return client in self._snapshots

    def state_dict(self) -> dict[str, Any]:
        """Return plain dicts of tensors and numbers, loadable with ``torch.load(..., weights_only=True)``."""
        return {
            "private": {c: dict(s.private) for c, s in self._snapshots.items()},
            "counters": {c: [s.rounds, s.steps, s.last_round] for c, s in self._snapshots.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all snapshots by saved ones."""
        private, counters = state["private"], state["counters"]
        self._snapshots = {int(c): ClientSnapshot(dict(private[c]), *counters[c]) for c in private}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move every private entry to the net's device and precision; see :func:`moved`."""
        for client, snapshot in list(self._snapshots.items()):
            private = {name: moved(value, device, dtype) for name, value in snapshot.private.items()}
            if any(value is not snapshot.private[name] for name, value in private.items()):
                self._snapshots[client] = replace(snapshot, private=private)


class DiskSnapshotStore(SnapshotStore):
    """Keeps private entries in memory-mapped files, one file per entry and one row per client.

    Only the pages in use are in memory, however many clients there are. The files are scratch space: each store and
    process has a folder of its own, which is removed with the store (but stays behind if the process is killed);
    checkpoints contain the snapshots themselves. All clients must keep the same entries.

    Args:
        folder: parent of the store's folder; created if necessary.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._home: tuple[int, Path] | None = None
        self._rows: dict[int, int] = {}
        self._used = 0
        self._tables: State = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,), self.state_dict()  # a copy gets its own files

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state)

    def __getitem__(self, client: int) -> ClientSnapshot:
        if client not in self._rows:
            return super().__getitem__(client)
        row = self._rows[client]
        private = {name: table[row] for name, table in self._tables.items()}
        return replace(self._snapshots[client], private=private)

    def __setitem__(self, client: int, snapshot: ClientSnapshot) -> None:
        if snapshot.private:
            row = self._rows.get(client, self._used)
            used = max(self._used, row + 1)  # rows are never reused
            self._reserve(snapshot.private, used)
            self._rows[client], self._used = row, used
            for name, value in snapshot.private.items():
                self._tables[name][row].copy_(value)
        super().__setitem__(client, replace(snapshot, private={}))

    def __delitem__(self, client: int) -> None:
        super().__delitem__(client)
        self._rows.pop(client, None)  # its row stays unused

    def state_dict(self) -> dict[str, Any]:
        """Return the same as the store in memory; the tensors are views of the files, read when they are saved."""
        private = {c: dict(self[c].private) for c in self._snapshots}
        return {**super().state_dict(), "private": private}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all snapshots by saved ones."""
        self._snapshots, self._rows, self._used, self._tables = {}, {}, 0, {}
        for client, private in state["private"].items():
            self[int(client)] = ClientSnapshot(dict(private), *state["counters"][client])

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Convert entries to the net's precision; requires a CPU, since the files are memory-mapped."""
        if device.type != "cpu":
            raise FederationError(f"A store on disk works on a CPU, not on {device}: leave store out.")
        for name, table in list(self._tables.items()):
            like = moved(table[0], device, dtype)
            if like.dtype != table.dtype:
                self._tables[name] = self._grown(name, like, None, len(table)).copy_(table)

    def _reserve(self, private: State, rows: int) -> None:
        """Ensure that every entry's file has at least ``rows`` rows; files grow by doubling."""
        if self._tables and private.keys() != self._tables.keys():
            raise FederationError("A store on disk needs clients that all keep the same entries: leave store out.")
        own = self._home is not None and self._home[0] == os.getpid()
        for name, value in private.items():
            table = self._tables.get(name)
            if table is None or len(table) < rows or not own:
                self._tables[name] = self._grown(name, value, table, max(16, 2 * rows))

    def _grown(self, name: str, value: Tensor, table: Tensor | None, rows: int) -> Tensor:
        path = self._own_folder() / name.replace("/", "_")
        if table is None:
            path.unlink(missing_ok=True)
        begun = path.exists()
        reserve(path, rows * value.numel() * value.element_size())  # torch.from_file would overwrite the beginning
        flat = torch.from_file(str(path), shared=True, size=rows * value.numel(), dtype=value.dtype)
        grown = flat.view(rows, *value.shape)
        if table is not None and not begun:  # after a fork, the table is still the parent's
            grown[: len(table)].copy_(table)
        return grown

    def _own_folder(self) -> Path:
        """Return the folder of this store in this process, removed when either ends."""
        if self._home is None or self._home[0] != os.getpid():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._home = os.getpid(), Path(tempfile.mkdtemp(prefix="clients-", dir=self.folder))
            Finalize(self, shutil.rmtree, (self._home[1],), {"ignore_errors": True}, exitpriority=0)  # not in forks
        return self._home[1]


def moved(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Move a tensor to the device of a net; float tensors also get its precision if both are standard ones."""
    floats = (torch.bfloat16, torch.float32, torch.float64)
    return value.to(device, dtype if value.dtype in floats and dtype in floats else value.dtype)


_NEVER = ClientSnapshot()
