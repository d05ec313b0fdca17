"""Members of a federation: the client of each node, and its introduction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from fl_lightning import signals
from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation
from fl_lightning.message_checks import layout_of
from fl_lightning.parties import Introduction
from fl_lightning.remote.data import blank, dtype_named
from fl_lightning.remote.envelope import Envelope, seal, unseal
from fl_lightning.remote.sites import JOIN, NOTE
from fl_lightning.remote.transport import Transport

#: Seconds between two checks for present clients.
PAUSE = 0.2
#: Time limit in seconds for a site's introduction.
JOINING = 120.0
#: Seconds after which a rejected node is asked again.
AGAIN = 30.0
#: Properties that all clients of a federation must share.
COMMON = ("shape", "tokens", "targets")


class Members:
    """Binds nodes to clients as they join; a node keeps the number that it joined with.

    Args:
        transport: the connection to the nodes.
        places: number of clients of the federation.
        run: fingerprint of the run, which sites must have approved.
        patience: time limit in seconds for clients that are needed.
        joined: called with the number of a client that joins for the first time.
    """

    def __init__(
        self, transport: Transport, places: int, run: str, patience: float, joined: Callable[[int], None]
    ) -> None:
        self.transport, self.places, self.run, self.patience, self.joined = transport, places, run, patience, joined
        #: The node of each client that has joined, and its introduction.
        self.nodes: dict[int, str] = {}
        self.told: dict[int, Envelope] = {}
        self._refused: dict[str, float] = {}

    def introduction(self, client: int) -> Introduction:
        """Return a client's introduction; a client that has not joined has no samples."""
        some = self._someone()
        shape, dtype = tuple(some["shape"]), None if some["tokens"] is None else dtype_named(some["tokens"])
        if client not in self.told:
            return Introduction(0, shape, dtype)
        header, parts = self.told[client]
        return Introduction(int(header["samples"]["train"]), shape, dtype, parts.get("told", {}))

    def blank(self) -> Federation:
        """Return the federation with blank samples; a client that has not joined counts with a single sample."""
        some = self._someone()
        single = {**some, "samples": {split: min(number, 1) for split, number in some["samples"].items()}}
        return blank([self.told[c].header if c in self.told else single for c in range(self.places)])

    def _someone(self) -> dict[str, Any]:
        if not self.told:
            raise FederationError("No client has joined yet.")
        return next(iter(self.told.values())).header

    def wait(self, number: int, clients: Iterable[int] | None = None) -> list[int]:
        """Wait until at least ``number`` of some clients are present, and return those that are.

        Args:
            number: minimum number of clients.
            clients: the clients to wait for; None means all.
        """
        wanted = list(range(self.places) if clients is None else clients)
        began, said = time.monotonic(), False
        while True:
            signals.check()
            there = self.there(wanted)
            if len(there) >= number:
                return there
            if time.monotonic() - began > self.patience:
                raise FederationError(
                    f"{len(there)} of the {number} clients that are needed were there within {self.patience:g} s "
                    f"(missing: {listed(sorted(set(wanted) - set(there)))}): start them, lower min_clients, or raise "
                    "the patience."
                )
            if not said:
                rank_zero_info(f"Waiting for clients: {len(there)} of {number} are there.")
                said = True
            time.sleep(PAUSE)

    def there(self, clients: Iterable[int]) -> list[int]:
        """Return the clients that can be reached now; new nodes introduce themselves first."""
        present, now = set(self.transport.present()), time.monotonic()
        self._refused = {node: when for node, when in self._refused.items() if node in present and now - when < AGAIN}
        strangers = sorted(present - set(self.nodes.values()) - self._refused.keys())
        if strangers:
            request = seal({"kind": JOIN}, {})
            for node, reply in self.transport.post(dict.fromkeys(strangers, request), min(JOINING, self.patience)):
                self._join(node, reply, present)
        return [client for client in clients if self.nodes.get(client) in present]

    def _join(self, node: str, reply: bytes | str, present: set[str]) -> None:
        """Bind a node to its client, or reject it with a reason."""
        try:
            told = read(reply)
            self._check(told, present)
        except FederationError as error:
            self._refuse(node, str(error))
            return
        client = told.header["client"]
        known = client in self.told
        self.nodes[client], self.told[client] = node, told
        rank_zero_info(f"Client {client} {'is back' if known else 'has joined'}.")
        if not known:
            self.joined(client)

    def _refuse(self, node: str, reason: str) -> None:
        """Reject a node for a while, and send it the reason."""
        self._refused[node] = time.monotonic()
        rank_zero_warn(f"Node {node} was not let in: {reason}")
        note = seal({"kind": NOTE, "note": f"The server did not let this site in: {reason}"}, {})
        for _ in self.transport.post({node: note}, min(JOINING, self.patience)):
            pass

    def _check(self, told: Envelope, present: set[str]) -> None:
        """Raise an error if a node's introduction is not acceptable."""
        header = told.header
        client = header.get("client")
        if type(client) is not int or not 0 <= client < self.places:
            raise FederationError(
                f"it says it is client {client!r}, but clients are numbered from 0 to {self.places - 1}."
            )
        if header.get("run") != self.run:
            raise FederationError(
                f"its operator approved the run {header.get('run')!r}, but this is {self.run}: use the same "
                "configuration on both sides."
            )
        if self.nodes.get(client) in present:
            raise FederationError(f"client {client} is there already, on node {self.nodes[client]}.")
        _check_form(header)
        layout = layout_of(told.parts.get("told", {}))
        for other, known in self.told.items():
            different = [name for name in COMMON if header[name] != known.header[name]]
            if other != client and layout != layout_of(known.parts.get("told", {})):
                raise FederationError(f"its introduction has other entries than that of client {other}.")
            if different and other != client:
                name = different[0]
                raise FederationError(
                    f"its data differs from that of client {other}: {name} {header[name]}, not {known.header[name]}."
                )
        before = self.told.get(client)
        if before is not None and before.header["samples"] != header["samples"]:
            raise FederationError(
                f"client {client} had {before.header['samples']} samples when it joined and has {header['samples']} "
                "now: use the data that it joined with."
            )


def read(reply: bytes | str) -> Envelope:
    """Return a node's reply; raise an error if there is none."""
    if isinstance(reply, str):
        raise FederationError(reply)
    envelope = unseal(reply)
    if "refused" in envelope.header:
        raise FederationError(f"it refused: {envelope.header['refused']}")
    return envelope


def _check_form(header: Mapping[str, Any]) -> None:
    """Reject a malformed introduction."""
    samples, targets, shape = header.get("samples"), header.get("targets"), header.get("shape")
    if type(samples) is not dict or sorted(samples) != ["test", "train", "val"]:
        raise FederationError("it does not say how many samples it has.")
    if any(type(number) is not int or number < 0 for number in samples.values()) or not samples["train"]:
        raise FederationError(f"it reports {samples} samples.")
    known = type(targets) is list and len(targets) == 2 and type(header.get("classes")) is int and "tokens" in header
    if not known or not _is_shape(shape) or not _is_shape(targets[0]):  # type: ignore[index]
        raise FederationError("it does not describe its samples.")
    for name in (targets[1], header["tokens"]):  # type: ignore[index]
        if name is not None:
            dtype_named(name)


def _is_shape(value: Any) -> bool:
    return type(value) is list and all(type(size) is int and size >= 0 for size in value)


def listed(clients: Sequence[int]) -> str:
    """Format client numbers for a message, ten at most."""
    return ", ".join(map(str, clients[:10])) + (" and others" if len(clients) > 10 else "")
