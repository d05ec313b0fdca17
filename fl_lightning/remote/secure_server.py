"""Server side of secure aggregation: relays keys and shares, and unmasks the sum only."""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fl_lightning.callbacks.secure import SecureAggregationCallback
from fl_lightning.errors import FederationError
from fl_lightning.loop import NOT_FINITE
from fl_lightning.privacy.secure import Words, check_cohort, decoded, mean
from fl_lightning.remote import keys
from fl_lightning.remote.data import dtype_named
from fl_lightning.remote.envelope import Envelope
from fl_lightning.remote.replies import is_trained
from fl_lightning.remote.secure_site import COMMON, MASKED, OWN, SETUP, SHARE, UNMASK, check_enough
from fl_lightning.wire import State

#: Numbers at the end of a vector besides values: the weight, the loss times its samples, and these samples.
TAIL = 3


class Ask(Protocol):
    """Sends requests to clients: yields their answers, and records a reason for every client without one."""

    def __call__(
        self, said: Mapping[int, dict[str, Any]], parts: Mapping[int, State], reasons: dict[int, str]
    ) -> Iterator[tuple[int, Envelope]]:
        """Send requests.

        Args:
            said: header of the request by client.
            parts: tensors of the request by client.
            reasons: receives a reason for every client that did not answer.
        """
        ...


class Sum(NamedTuple):
    """Result of a session."""

    mean: State
    loss: float
    """Mean training loss of the clients in the sum, NaN if none took a step."""
    said: dict[int, dict[str, Any]]
    """Replies, without values, of all clients in the sum."""
    unsound: dict[int, dict[str, Any]]
    """Replies of clients that are not in the sum because their updates are not finite."""


class SecureSession:
    """One session of secure aggregation, as seen by the server.

    Args:
        ask: sends requests to clients.
        rules: the options, which clients have approved.
        weigh: returns a client's weight from its number of samples.
        reasons: receives a reason for every missing client.
        needed: minimum number of clients whose messages the round needs.
    """

    def __init__(
        self,
        ask: Ask,
        rules: SecureAggregationCallback,
        weigh: Callable[[int], float],
        reasons: dict[int, str],
        needed: int,
    ) -> None:
        self.rules, self.reasons, self.needed = rules, reasons, max(needed, rules.least)
        self._ask, self._weigh, self._name, self._clients = ask, weigh, secrets.token_hex(8), 0

    def run(self, jobs: Mapping[int, dict[str, Any]], parts: Mapping[int, State]) -> Sum:
        """Make the clients agree on keys, do their jobs and send masked results.

        Args:
            jobs: header of every client's job.
            parts: tensors of every client's job.
        """
        public = self._stage(SETUP, {client: {} for client in jobs}, _public)
        check_cohort(len(public), self.rules.least)
        self._clients = len(public)
        self._check(public)
        written = self._stage(SHARE, {c: {"keys": public} for c in public}, lambda said: _texts(said, "shares"))
        self._keep(written, lambda client, one: one.keys() == public.keys() - {client})
        work = {c: {"shares": {o: written[o][c] for o in written if o != c}, "job": jobs[c]} for c in written}
        said, vectors = self._masked(work, {c: parts[c] for c in written})
        unsound = {client: one for client, one in said.items() if client not in vectors}
        self.reasons |= dict.fromkeys(unsound, f"its update {NOT_FINITE}.")
        if unsound and not vectors:
            return Sum({}, math.nan, {}, unsound)
        like = self._alike(said, vectors)
        sent, dropped = sorted(vectors), sorted(written.keys() - vectors.keys())
        asked = {client: {"sent": sent, "dropped": dropped} for client in sent}
        told = self._stage(UNMASK, asked, lambda said: (_texts(said, "seeds"), _texts(said, "numbers")))
        self._keep(told, lambda _, one: sorted(one[0]) == sent and sorted(one[1]) == dropped, 0)
        total = self._unmasked(vectors, {client: one[1] for client, one in public.items()}, told, dropped)
        weight, loss, samples = decoded(total[-TAIL:]).tolist()
        if weight != sum(self._weigh(int(said[client]["samples"])) for client in sent):
            raise FederationError(
                "The sum of secure aggregation does not add up: a client wrote wrong shares or masks."
            )
        found = mean(total[: len(total) - TAIL + 1], like)
        return Sum(found, loss / samples if samples else math.nan, {c: said[c] for c in sent}, unsound)

    def _stage(
        self, stage: str, more: Mapping[int, dict[str, Any]], form: Callable[[dict[str, Any]], Any]
    ) -> dict[int, Any]:
        """Return the answers of a stage by client, without malformed ones."""
        headers = {client: {"session": self._name, "stage": stage, **one} for client, one in more.items()}
        found = {}
        for client, (header, _) in self._ask(headers, {}, self.reasons):
            try:
                found[client] = form(header["answer"])
            except (KeyError, ValueError, TypeError, AttributeError):
                self.reasons[client] = "its answer is malformed."
        return found

    def _masked(
        self, work: Mapping[int, dict[str, Any]], parts: Mapping[int, State]
    ) -> tuple[dict[int, dict[str, Any]], dict[int, Words]]:
        """Return clients' replies and masked values; clients whose updates are not finite send no values."""
        said, vectors = dict[int, dict[str, Any]](), dict[int, Words]()
        headers = {client: {"session": self._name, "stage": MASKED, **one} for client, one in work.items()}
        for client, (header, tensors) in self._ask(headers, parts, self.reasons):
            answer: Any = header.get("answer")
            vector: Any = tensors.get("0", {}).get("masked")
            if not is_trained(answer) or (answer["sound"] and not _is_vector(vector)):
                self.reasons[client] = "its answer is malformed."
                continue
            said[client] = answer
            if answer["sound"]:
                vectors[client] = vector.numpy().view(np.uint64)
        return said, vectors

    def _alike(self, said: Mapping[int, dict[str, Any]], vectors: dict[int, Words]) -> State:
        """Return an empty message with the most common layout; drop vectors of clients with another one."""
        own = {client: (json.dumps(said[client].get("layout")), len(vectors[client])) for client in vectors}
        if own:
            ((common, _),) = Counter(own.values()).most_common(1)
            for client in [client for client in vectors if own[client] != common]:
                del vectors[client]
                self.reasons[client] = "its message has another layout than most."
        self._check(vectors)
        return _empty(*common)

    def _keep(self, there: dict[int, Any], right: Callable[[int, Any], bool], needed: int | None = None) -> None:
        """Drop answers that do not name the expected clients, and check that enough are left."""
        for client in [client for client, one in there.items() if not right(client, one)]:
            del there[client]
            self.reasons[client] = "it wrote shares of other clients than those that take part."
        self._check(there, needed)

    def _check(self, there: Mapping[int, Any], needed: int | None = None) -> None:
        """Raise an error with fewer clients than the masks or the round need."""
        check_enough(len(there), self._clients, self.rules)
        least = self.needed if needed is None else needed
        if len(there) < least:
            raise FederationError(f"Secure aggregation needs {least} clients in this round, and has {len(there)}.")

    def _unmasked(
        self, vectors: Mapping[int, Words], public: Mapping[int, str], told: Mapping[int, Any], dropped: list[int]
    ) -> Words:
        """Subtract from the sum the clients' own masks, and their common masks with clients that dropped out."""
        tellers = sorted(told)[: self.rules.needed(self._clients)]
        total: Words = np.sum(np.stack([*vectors.values()]), axis=0, dtype=np.uint64)
        for client in vectors:
            seed = _combined(told[teller][0][client] for teller in tellers)
            total = total - keys.mask(seed, OWN, len(total))
        for gone in dropped:
            pair = keys.pair_of(_combined(told[teller][1][gone] for teller in tellers))
            if pair.public != public[gone]:
                raise FederationError(f"The shares of client {gone}'s key do not fit together.")
            for client in vectors:
                common = keys.mask(keys.agreed(pair.private, public[client]), COMMON, len(total))
                total = total - common if client < gone else total + common
        return total


def _public(said: dict[str, Any]) -> list[str]:
    cipher, mask = said["keys"]
    if type(cipher) is not str or type(mask) is not str:
        raise TypeError
    return [cipher, mask]


def _texts(said: dict[str, Any], name: str) -> dict[int, str]:
    """Return texts by client."""
    found = {int(client): text for client, text in said[name].items()}
    if any(type(text) is not str for text in found.values()):
        raise TypeError
    return found


def _combined(shares: Iterable[str]) -> bytes:
    try:
        return keys.combined([bytes.fromhex(share) for share in shares])
    except ValueError as error:
        raise FederationError("Shares of secure aggregation do not fit together.") from error


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 1


def _empty(layout: str, length: int) -> State:
    """Return an empty message of a layout, which must match the length of the vector."""
    try:
        entries = [(str(name), tuple(map(int, shape)), dtype_named(dtype)) for name, shape, dtype in json.loads(layout)]
    except (ValueError, TypeError) as error:
        raise FederationError("The clients' messages have no layout.") from error
    if sum(math.prod(shape) for _, shape, _ in entries) + TAIL != length or any(
        size < 0 for _, shape, _ in entries for size in shape
    ):
        raise FederationError("The clients' messages do not have their stated layout.")
    return {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in entries}
