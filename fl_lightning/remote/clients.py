"""``RemoteClients``: real clients on other machines, behind the same protocol as simulated ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning.callbacks.secure import SecureAggregationCallback
from fl_lightning.errors import FederationError
from fl_lightning.exchange import Scores
from fl_lightning.federation import Federation, Split
from fl_lightning.parties import Introduction, Messages, Returned, Setting
from fl_lightning.privacy.secure import check_cohort
from fl_lightning.remote.envelope import Envelope, checksum, seal
from fl_lightning.remote.members import Members
from fl_lightning.remote.replies import alike, answered, check_reply, named
from fl_lightning.remote.run import RunConfiguration
from fl_lightning.remote.secure_server import SecureSession
from fl_lightning.remote.sites import EVALUATE, SECURE, TELL, TRAIN, WORK, scores_of
from fl_lightning.remote.transport import Transport
from fl_lightning.snapshots import ClientSnapshot
from fl_lightning.wire import Message, State

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

#: Version of a client's private state, and its counters.
Kept = tuple[str, ClientSnapshot]
#: Number of the training, the client's headers, and its tensors.
Answer = tuple[int, list[dict[str, Any]], list[State]]


class RemoteClients:
    """Clients on other machines: sends messages, collects replies, and tracks absent, late and failed clients.

    A client is bound to its node when it joins. Its private state is stored at its site in versions; the server refers
    to one of them by name, which is saved in checkpoints. The training of the next round is requested together with the
    evaluation of the current one, so a client gets one message per round.

    Args:
        method: the server's untrained method.
        transport: the connection to the sites.
        places: number of clients of the federation.
        least: minimum number of clients to start the run; in a round as many may be missing as at the start. None means
            all.
        patience: time limit in seconds for the clients' answers in a stage.
        attempts: number of times that clients needed in a round are asked before the run ends.
        callbacks: the run's callbacks; those that protect clients must be at the sites, too.
    """

    simulated = False

    def __init__(
        self,
        method: FederatedModule,
        transport: Transport,
        places: int,
        least: int | None = None,
        patience: float = 600.0,
        attempts: int = 3,
        callbacks: Sequence[Any] = (),
    ) -> None:
        if not 1 <= (places if least is None else least) <= places:
            raise FederationError(f"min_clients must lie between 1 and the {places} clients, not at {least}.")
        self.method, self.transport, self.places = method, transport, places
        self.least = places if least is None else least
        self.patience, self.attempts = patience, attempts
        self.run = RunConfiguration.of(method, callbacks)
        #: Options of secure aggregation; None if messages are sent in plain text.
        self.secure = next((one for one in callbacks if isinstance(one, SecureAggregationCallback)), None)
        if self.secure is not None:
            self.secure.install(method)
        self.members = Members(transport, places, self.run.fingerprint, patience, self._joined)
        #: The current version of every number's private state, and those of the running stage.
        self.versions: dict[int, str] = {}
        self.pending: dict[int, Kept] = {}
        self._saved: dict[int, str] = {}
        self._ahead: dict[int, tuple[Any, Returned, Kept | None]] = {}

    # ---- membership -------------------------------------------------------------------------------------------

    def introduce(self) -> Sequence[Introduction]:
        """Return the clients' introductions; a client that has not joined has no samples."""
        alone = [one for one in self.method.trainer.callbacks if getattr(one, "simulations_only", False)]  # type: ignore[attr-defined]
        if alone:
            raise FederationError(
                f"{type(alone[0]).__name__} reads private state of clients, which are elsewhere: use it in a "
                "simulation."
            )
        self.wait()
        return [self.members.introduction(client) for client in range(self.places)]

    def blank(self) -> Federation:
        """Return the federation with blank samples."""
        return self.members.blank()

    def wait(self) -> None:
        """Wait for the clients that are needed to start."""
        self.members.wait(self.least)

    def _joined(self, client: int) -> None:
        """Update the roster when a client joins late."""
        if client < len(self.method.roster):
            self.method.roster[client] = self.members.introduction(client)
            self.method.datamodule.forget()

    # ---- training ---------------------------------------------------------------------------------------------

    def train(self, setting: Setting, messages: Messages, max_steps: int | None = None) -> Iterator[Returned]:
        """Train clients; those that were asked ahead and have answered are not asked again."""
        self.pending = {}
        asked, cohort = (
            {self.method.client_of(n) for n in some} for some in (messages, self.method.cohort(setting.round))
        )
        needed = max(self._needed(len(asked)), int(asked == set(cohort)))
        if self.secure is not None:
            yield from self._train_securely(self.secure, setting, messages, max_steps, needed)
            return
        ahead, self._ahead = self._ahead, {}
        left: dict[int, State] = {}
        for number, message in messages.items():
            known = ahead.get(number)
            if known is None or max_steps is not None or known[0] != self._asked(number, setting, message):
                left[number] = message
                continue
            yield self._took(known[1], known[2])
        jobs = {n: [self._job(TRAIN, n, setting, {"max_steps": max_steps})] for n in left}
        needed -= len({self.method.client_of(number) for number in messages.keys() - left.keys()})
        for number, said, sent in self._work(jobs, {n: [m] for n, m in left.items()}, needed):
            yield self._took(*self._trained(number, said[0], sent[0]))

    def _train_securely(
        self,
        rules: SecureAggregationCallback,
        setting: Setting,
        messages: Messages,
        max_steps: int | None,
        needed: int,
    ) -> Iterator[Returned]:
        """Train clients and add up their messages; each returned message is the mean.

        A session that too few clients complete reveals nothing; another one starts with those that are present.
        """
        owners = {self.method.client_of(number): number for number in messages}
        if len(owners) < len(messages):
            raise FederationError("Secure aggregation takes one training of each client in a stage.")
        check_cohort(len(owners), rules.least)
        jobs = {c: self._job(TRAIN, number, setting, {"max_steps": max_steps}) for c, number in owners.items()}
        reasons, said = dict[int, str](), ""
        for _ in range(self.attempts):
            there = self.members.wait(max(needed, rules.least), sorted(owners))
            reasons |= {client: "it is absent" for client in owners if client not in there}
            session = SecureSession(self._ask, rules, lambda n: rules.weight(self.method, n), reasons, needed)
            try:
                found = session.run({c: jobs[c] for c in there}, {c: messages[owners[c]] for c in there})
                break
            except FederationError as error:
                said = str(error)
        else:
            raise FederationError(f"{said} {named(sorted(reasons), reasons)}".rstrip())
        for client, reply in {**found.said, **found.unsound}.items():
            yield self._took(*self._trained(owners[client], {**reply, "loss": found.loss}, dict(found.mean)))
        self._tell_left([c for c in sorted(owners) if c not in found.said and c not in found.unsound], reasons)

    def _ask(
        self, said: Mapping[int, dict[str, Any]], parts: Mapping[int, State], reasons: dict[int, str]
    ) -> Iterator[tuple[int, Envelope]]:
        """Send a stage of secure aggregation to clients and yield their answers."""
        at = {self.members.nodes[client]: client for client in said}
        requests = {}
        for node, client in at.items():
            jobs = [said[client]["job"]] if "job" in said[client] else []
            header = {"kind": SECURE, "run": self.run.fingerprint, "oldest": self._oldest(jobs), **said[client]}
            requests[node] = seal(header, {"0": parts[client]} if client in parts else {})
        for node, reply in self.transport.post(requests, self.patience):
            client = at[node]
            try:
                yield client, answered(client, reply)
            except FederationError as error:
                reasons[client] = str(error)

    def _needed(self, asked: int) -> int:
        """Return the minimum number of answers of ``asked`` clients, if as many may be missing as of all."""
        return max(0, asked - (self.places - self.least))

    def _took(self, returned: Returned, kept: Kept | None) -> Returned:
        if kept is not None:
            self.pending[returned.message.client] = kept
        return returned

    def _trained(self, number: int, said: dict[str, Any], sent: State) -> tuple[Returned, Kept | None]:
        """Return a client's result and the version of its private state."""
        loss = float(said["loss"])
        message = Message(number, sent, said["samples"], loss)
        counters = said["counters"]
        kept = None if said["version"] is None else (str(said["version"]), ClientSnapshot({}, *map(int, counters)))
        return Returned(message, bool(said["counts"]), bool(said["sound"])), kept

    def gather(self, returned: list[Returned]) -> list[Returned]:
        """Sort the results by the clients' numbers."""
        return sorted(returned, key=lambda one: one.message.client)

    def commit(self, numbers: Iterable[int], round: int) -> None:
        """Accept the versions that these clients stored."""
        for number in numbers:
            if number in self.pending:
                self.versions[number], self.method.snapshots[number] = self.pending[number]
        self.pending = {}

    def reset(self) -> None:
        """Drop replies to a round that did not start."""
        self.pending, self._ahead = {}, {}

    # ---- evaluation -------------------------------------------------------------------------------------------

    def evaluate(self, setting: Setting, messages: Messages, split: Split) -> Scores:
        """Let clients score their models and, in the same request, train for the next round."""
        module = self.method
        coming = self._coming(split)
        jobs: dict[int, list[dict[str, Any]]] = {}
        parts: dict[int, list[State]] = {}
        for client, message in messages.items():
            jobs[client] = [self._job(EVALUATE, module.evaluated_as(client), setting, {"split": split}, client)]
            parts[client] = [message]
            for number, (following, sent) in coming.items():
                if module.client_of(number) == client:
                    jobs[client].append(self._job(TRAIN, number, following, {"max_steps": None}))
                    parts[client].append(sent)
        asked = {number: self._asked(number, *one) for number, one in coming.items()}
        found = []
        for client, said, answers in self._work(jobs, parts, self._needed(len(messages))):
            if said[0].get("scored"):
                found.append(scores_of(answers[0], client))
            for job, one, tensors in zip(jobs[client][1:], said[1:], answers[1:], strict=True):
                number = job["number"]
                self._ahead[number] = (asked[number], *self._trained(number, one, tensors))
        if not found:
            return Scores(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0), {})
        return Scores.joined(sorted(alike(found), key=lambda scores: int(scores.clients)))

    def tell(self, setting: Setting, messages: Messages) -> Mapping[int, State]:
        """Return the reports of the clients that are present."""
        number = self.method.evaluated_as
        jobs = {client: [self._job(TELL, number(client), setting, {}, client)] for client in messages}
        answers = self._work(
            jobs, {client: [message] for client, message in messages.items()}, self._needed(len(messages))
        )
        return {client: sent[0] for client, _, sent in answers}

    def _coming(self, split: Split) -> dict[int, tuple[Setting, State]]:
        """Return the messages of the next round's first stage, by number; none if there may be no next round."""
        module = self.method
        trainer = module.trainer
        last = trainer.max_epochs is not None and 0 < trainer.max_epochs <= module.completed_rounds
        if (not trainer.training and not trainer.validating) or trainer.state.fn != "fit":
            return {}
        if self.secure is not None:  # training starts with an exchange of keys
            return {}
        if last or trainer.sanity_checking or trainer.fast_dev_run or module.completed_stages:  # type: ignore[attr-defined]
            return {}
        return module.loop.coming()

    # ---- requests ---------------------------------------------------------------------------------------------

    def _job(
        self, kind: str, number: int, setting: Setting, more: Mapping[str, Any], client: int | None = None
    ) -> dict[str, Any]:
        """Return a request to a client, with the versions of private state that it refers to."""
        owner = self.method.client_of(number) if client is None else client
        base = number if number in self.versions else owner
        versions = {base: self.versions[base]} if base in self.versions else {}
        return {"kind": kind, "number": number, "setting": astuple(setting), "versions": versions, **more}

    def _asked(self, number: int, setting: Setting, message: State) -> tuple[Any, ...]:
        """Return a key of everything that a client's training depends on, to compare requests."""
        return astuple(setting), self._job(TRAIN, number, setting, {})["versions"], checksum(message)

    def _work(
        self, jobs: Mapping[int, list[dict[str, Any]]], parts: Mapping[int, list[State]], needed: int
    ) -> Iterator[Answer]:
        """Send jobs, one request per client, and yield the clients' answers by the keys of the jobs.

        Args:
            jobs: by number of the training, or by client.
            parts: the messages of the jobs.
            needed: minimum number of clients that must answer.
        """
        own: dict[int, list[int]] = {}
        for key in jobs:
            own.setdefault(self.method.client_of(key), []).append(key)
        left, reasons = sorted(own), dict[int, str]()
        for _ in range(self.attempts):
            there = self.members.wait(needed, left) if needed > 0 else self.members.there(left)
            reasons |= {client: "it is absent" for client in left if client not in there}
            at = {self.members.nodes[client]: client for client in there}
            requests = {
                node: self._request([j for k in own[c] for j in jobs[k]], [p for k in own[c] for p in parts[k]])
                for node, c in at.items()
            }
            for node, reply in self.transport.post(requests, self.patience):
                client = at[node]
                try:
                    answers = list(self._answers(client, reply, {key: jobs[key] for key in own[client]}))
                except FederationError as error:
                    reasons[client] = str(error)
                    continue
                left.remove(client)
                needed -= 1
                yield from answers
            if not left or needed <= 0:
                break
        if left and needed > 0:
            raise FederationError(f"A round needs {needed} more of its clients: {named(left, reasons)}")
        self._tell_left(left, reasons)

    def _tell_left(self, left: Sequence[int], reasons: Mapping[int, str]) -> None:
        """Warn of clients that a round went on without."""
        if left:
            rank_zero_warn(f"Round {self.method.completed_rounds}: went on without {named(left, reasons)}")

    def _oldest(self, jobs: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Return the rounds of the oldest version still needed of every number in some jobs."""
        numbers = {number for job in jobs for number in job["versions"]}
        return {n: min(_rounds(self.versions[n]), _rounds(self._saved.get(n, self.versions[n]))) for n in numbers}

    def _request(self, jobs: list[dict[str, Any]], parts: list[State]) -> bytes:
        header = {"kind": WORK, "run": self.run.fingerprint, "jobs": jobs, "oldest": self._oldest(jobs)}
        return seal(header, {str(place): part for place, part in enumerate(parts)})

    def _answers(self, client: int, reply: bytes | str, asked: Mapping[int, list[dict[str, Any]]]) -> Iterator[Answer]:
        """Yield the parts of a client's reply; raise an error if it is invalid.

        Args:
            client: the client.
            reply: its node's reply.
            asked: the jobs by key.
        """
        header, parts = answered(client, reply)
        replies = header.get("replies")
        if type(replies) is not list or len(replies) != sum(map(len, asked.values())):
            raise FederationError("its answers do not match the request.")
        place = 0
        for key, jobs in asked.items():
            places = range(place, place + len(jobs))
            said, sent = [replies[i] for i in places], [parts.get(str(i), {}) for i in places]
            for job, one, tensors in zip(jobs, said, sent, strict=True):
                check_reply(job, one, tensors)
            yield key, said, sent
            place += len(jobs)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the current versions, for a checkpoint."""
        self._saved = dict(self.versions)
        return {**self.method.snapshots.state_dict(), "versions": dict(self.versions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the versions of a checkpoint."""
        if "versions" not in state:
            raise FederationError(
                "The checkpoint's clients were simulated, and their private state is in it: real sites lack it."
            )
        self.versions = {int(number): str(version) for number, version in state["versions"].items()}
        self._saved = dict(self.versions)
        self.method.snapshots.load_state_dict(state)


def _rounds(version: str) -> int:
    return int(version.split("-")[0])
