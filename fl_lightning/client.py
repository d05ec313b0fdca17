"""What is kept of a client between rounds, and the store that keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

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

    def to(self, device: torch.device) -> None:
        """Move every private entry to ``device``; those that are there stay as they are."""
        for client, snapshot in list(self._snapshots.items()):
            if any(value.device != device for value in snapshot.private.values()):
                moved = {name: value.to(device) for name, value in snapshot.private.items()}
                self._snapshots[client] = replace(snapshot, private=moved)


_NEVER = ClientSnapshot()
