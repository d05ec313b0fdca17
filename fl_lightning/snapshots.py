"""State of a client between rounds, and the store that keeps it."""

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
    """A client between two rounds: the entries of the module's state that are its own, and its counters.

    Args:
        private: private entries by name (a head, a control variate, a mask); they never cross the wire.
        rounds: number of rounds the client has trained in.
        steps: number of local steps the client has taken.
        last_round: the last round it trained in, -1 if none.
    """

    private: State = field(default_factory=dict)
    rounds: int = 0
    steps: int = 0
    last_round: int = -1

    def after(self, private: State, round: int, steps: int) -> ClientSnapshot:
        """The snapshot after one more round of training."""
        return ClientSnapshot(private, self.rounds + 1, self.steps + steps, round)


class SnapshotStore(MutableMapping[int, ClientSnapshot]):
    """One snapshot per client that has trained; a client that has not yields an empty one.

    Snapshots are immutable: a round replaces them when it commits, so a run that dies within a round leaves the
    store as the round found it.
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
        """Plain dicts of tensors and numbers, loadable with ``torch.load(..., weights_only=True)``."""
        return {
            "private": {c: dict(s.private) for c, s in self._snapshots.items()},
            "counters": {c: [s.rounds, s.steps, s.last_round] for c, s in self._snapshots.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all snapshots by saved ones."""
        private, counters = state["private"], state["counters"]
        self._snapshots = {int(c): ClientSnapshot(dict(private[c]), *counters[c]) for c in private}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move every private entry to where the net is, and to its precision; see :func:`moved`."""
        for client, snapshot in list(self._snapshots.items()):
            private = {name: moved(value, device, dtype) for name, value in snapshot.private.items()}
            if any(value is not snapshot.private[name] for name, value in private.items()):
                self._snapshots[client] = replace(snapshot, private=private)


class DiskSnapshotStore(SnapshotStore):
    """Keeps private entries in files that are mapped into memory, one per entry and one row per client.

    Memory then holds what is in use, however many clients there are. The files are scratch space: they lie in a folder
    of their own for every store and process, which goes when the store does, and checkpoints hold the snapshots
    themselves. A process that is killed leaves its folder behind. All clients must keep the same entries.

    Args:
        folder: where the folder of the files goes; made if need be.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._home: tuple[int, Path] | None = None
        self._rows: dict[int, int] = {}
        self._used = 0
        self._tables: State = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,), self.state_dict()  # a copy has files of its own

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
            used = max(self._used, row + 1)  # never falls: a row is taken once
            self._reserve(snapshot.private, used)
            self._rows[client], self._used = row, used
            for name, value in snapshot.private.items():
                self._tables[name][row].copy_(value)
        super().__setitem__(client, replace(snapshot, private={}))

    def __delitem__(self, client: int) -> None:
        super().__delitem__(client)
        self._rows.pop(client, None)  # its row stays unused

    def state_dict(self) -> dict[str, Any]:
        """Read as from memory; the tensors are views of the files, which are read when they are saved."""
        private = {c: dict(self[c].private) for c in self._snapshots}
        return {**super().state_dict(), "private": private}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all snapshots by saved ones."""
        self._snapshots, self._rows, self._used, self._tables = {}, {}, 0, {}
        for client, private in state["private"].items():
            self[int(client)] = ClientSnapshot(dict(private), *state["counters"][client])

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Let entries have the net's precision; the files are mapped into the memory of a CPU."""
        if device.type != "cpu":
            raise FederationError(f"A store on disk serves runs on a CPU, not on {device}: leave store out.")
        for name, table in list(self._tables.items()):
            like = moved(table[0], device, dtype)
            if like.dtype != table.dtype:
                self._tables[name] = self._grown(name, like, None, len(table)).copy_(table)

    def _reserve(self, private: State, rows: int) -> None:
        """Let every entry's file have at least so many rows; they grow by doubling."""
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
        reserve(path, rows * value.numel() * value.element_size())  # here: torch would overwrite the beginning
        flat = torch.from_file(str(path), shared=True, size=rows * value.numel(), dtype=value.dtype)
        grown = flat.view(rows, *value.shape)
        if table is not None and not begun:  # it lies in the folder of the process that this one was forked from
            grown[: len(table)].copy_(table)
        return grown

    def _own_folder(self) -> Path:
        """The folder of this store in this process, removed with either."""
        if self._home is None or self._home[0] != os.getpid():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._home = os.getpid(), Path(tempfile.mkdtemp(prefix="clients-", dir=self.folder))
            Finalize(self, shutil.rmtree, (self._home[1],), {"ignore_errors": True}, exitpriority=0)  # not by a fork
        return self._home[1]


def moved(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor as a net of some precision can use it: floats of these precisions become one another, all else stays."""
    floats = (torch.bfloat16, torch.float32, torch.float64)
    return value.to(device, dtype if value.dtype in floats and dtype in floats else value.dtype)


_NEVER = ClientSnapshot()
