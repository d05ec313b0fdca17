"""One client of a federation at its data: it answers requests, and stores its private state on its own disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fl_lightning.callbacks.secure import SecureAggregationCallback
from fl_lightning.errors import FederationError
from fl_lightning.exchange import Scores
from fl_lightning.federation import Federation, Split
from fl_lightning.parties import JOINING, LocalData, Me, Memory, Setting
from fl_lightning.privacy.secure import Words, encoded, largest, row
from fl_lightning.remote.envelope import Envelope, seal, unseal
from fl_lightning.remote.run import Guard, RunConfiguration
from fl_lightning.remote.secure_site import MASKED, UNMASK, SecureMember
from fl_lightning.remote.store import PrivateStore
from fl_lightning.simulation import SimulatedClients
from fl_lightning.snapshots import ClientSnapshot
from fl_lightning.wire import Message, State, is_finite, under

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

log = logging.getLogger(__name__)
#: Kinds of requests.
JOIN, WORK, NOTE, SECURE = "join", "work", "note", "secure"
#: Kinds of jobs in a request to work.
TRAIN, EVALUATE, TELL = "train", "evaluate", "tell"
#: Maximum number of characters of a server's note in the log.
MOST = 500


class OwnClient(SimulatedClients):
    """The single client of a site, played by its method object on its own data.

    Args:
        method: the method, without a Trainer.
        client: the client's number in the federation.
        data: its samples, a federation of one.
    """

    def __init__(self, method: FederatedModule, client: int, data: Federation) -> None:
        super().__init__(method)
        self.client, self.data = client, LocalData(data, 0)
        self._memory = Memory()
        #: The client's number in the current request.
        self.number = client

    @property
    def federation(self) -> Federation:
        """The client's own samples."""
        return self.data.source

    def me(self, number: int, setting: Setting) -> Me:
        """Return the client's view of itself."""
        snapshots = self.method.snapshots
        kept = snapshots[number if number in snapshots else self.client]
        rest = (setting.round, setting.rounds, setting.stage, setting.clients, self.method.seed, kept.private)
        return Me(self.client, number, *rest, self.data, memory=self._memory)

    def evaluated(self, client: int) -> int:
        """Return the number that the server named."""
        return self.number


class Site:
    """Answers the requests of a federation's server for one client.

    It accepts only the run that its operator approved, sends only the result of the method's ``leave`` and never a
    private entry, and stores its private state before it answers.

    Args:
        client: the client's number in the federation, from 0.
        method: the method, built from the site's own copy of the run's configuration.
        data: the client's samples, a federation of one.
        store: the store of its private state.
        run: the approved configuration; None means that of the method.
        guards: callbacks of the run that protect clients.
    """

    def __init__(
        self,
        client: int,
        method: FederatedModule,
        data: Federation,
        store: PrivateStore,
        run: RunConfiguration | None = None,
        guards: Sequence[Any] = (),
    ) -> None:
        if data.num_clients != 1:
            raise FederationError(f"A site holds the data of one client, not of {data.num_clients}.")
        self.client, self.method, self.store = client, method, store
        self.run = RunConfiguration.of(method, guards) if run is None else run
        self.guards = [one for one in guards if isinstance(one, Guard) and one.guards]
        for guard in self.guards:
            guard.install(method)
        rules = next((one for one in self.guards if isinstance(one, SecureAggregationCallback)), None)
        #: Its side of secure aggregation; None if it sends plain messages.
        self.member = None if rules is None else SecureMember(client, rules)
        self.own = OwnClient(method, client, data)
        method.exchange = self.own
        self._loaded: dict[int, str] = {}
        #: Round and stage of the running session, and those whose sums the server has received.
        self._under_way, self._told = (-1, ""), set[tuple[int, str]]()
        self._jobs: Mapping[str, Callable[[dict[str, Any], Setting, State], tuple[dict[str, Any], State]]] = {
            TRAIN: self._train,
            EVALUATE: self._evaluate,
            TELL: self._tell,
        }

    def introduction(self) -> Envelope:
        """Return the site's introduction, for its operator to read before it is sent."""
        data, setting = self.own.federation, Setting(stage=JOINING)
        tokens = not data.inputs.is_floating_point() and data.mean is None
        header = {
            "client": self.client,
            "run": self.run.fingerprint,
            "samples": self.own.data.sizes() | ({} if data.val is not None else {"val": 0}),
            "shape": list(data.inputs.shape[1:]),
            "tokens": _name(data.inputs.dtype) if tokens else None,
            "classes": data.num_classes,
            "targets": [list(data.targets.shape[1:]), _name(data.targets.dtype)],
        }
        return Envelope(header, {"told": self.method.introduce(self.own.me(self.client, setting))})

    def answer(self, request: bytes) -> bytes:
        """Return the reply to a request; failures are reported in it, in one sentence."""
        try:
            header, parts = unseal(request)
            if header.get("kind") == JOIN:
                return seal(*self.introduction())
            if header.get("kind") == NOTE:
                log.warning("%s", " ".join(str(header.get("note"))[:MOST].split()))
                return seal({"client": self.client}, {})
            self._check_run(header)
            return self._secure(header, parts) if header.get("kind") == SECURE else self._work(header, parts)
        except FederationError as error:
            reason = " ".join(str(error).split())
        except Exception as error:
            log.exception("A request could not be answered")
            reason = f"the site could not answer ({type(error).__name__}); its log says why"
        log.warning("Refused: %s", reason)
        return seal({"client": self.client, "refused": reason}, {})

    def _check_run(self, header: dict[str, Any]) -> None:
        """Reject all runs except the approved one."""
        if header.get("run") != self.run.fingerprint:
            raise FederationError(
                f"The site's operator approved the run {self.run.fingerprint}, not {header.get('run')!r}: use the same "
                "configuration on both sides."
            )

    def _work(self, header: dict[str, Any], parts: dict[str, State]) -> bytes:
        """Do the jobs of a request in order."""
        replies: list[dict[str, Any]] = []
        sent: dict[str, State] = {}
        if self.member is not None and any(job["kind"] == TRAIN for job in header["jobs"]):
            raise FederationError("This site sends its messages under secure aggregation, and none without.")
        for place, job in enumerate(header["jobs"]):
            self._hold(job)
            said, tensors = self._jobs[job["kind"]](job, Setting(*job["setting"]), parts.get(str(place), {}))
            self._check_private(tensors)
            replies.append(said)
            sent[str(place)] = tensors
        self._prune(header)
        return seal({"client": self.client, "replies": replies}, sent)

    def _secure(self, header: dict[str, Any], parts: dict[str, State]) -> bytes:
        """Answer a stage of secure aggregation; the message of a training is sent masked."""
        if self.member is None:
            raise FederationError("The run that the site's operator approved has no SecureAggregationCallback.")
        answer = self.member.answer(header)
        if header["stage"] == UNMASK:
            self._told.add(self._under_way)
        if header["stage"] != MASKED:
            return seal({"client": self.client, "answer": answer}, {})
        job = header["job"]
        self._hold(job)
        self._under_way = (int(job["setting"][0]), str(job["setting"][2]))
        if self._under_way in self._told:
            log.warning(
                "The server asks for round %d again, whose sum it has: if other clients are in it, the difference of "
                "the two sums may reveal information about single clients.",
                self._under_way[0],
            )
        said, message = self._trained(job, Setting(*job["setting"]), parts.get("0", {}))
        self._check_private(message.tensors)
        self._prune(header)
        said["sound"] = said["sound"] and is_finite(message.tensors)
        del said["loss"]  # it is in the sum
        if not said["sound"]:
            self.member.close()
            return seal({"client": self.client, "answer": said}, {})
        words = self.member.masked(self._words(message))
        said["layout"] = [[name, list(v.shape), _name(v.dtype)] for name, v in message.tensors.items()]
        return seal({"client": self.client, "answer": said}, {"0": {"masked": torch.from_numpy(words.view(np.int64))}})

    def _words(self, message: Message) -> Words:
        """Encode a message, its weight and its loss as integers to be summed."""
        assert self.member is not None
        clients, samples = self.member.clients, message.samples
        plain = row(message.tensors, self.member.rules.weight(self.method, samples), clients)
        known = abs(message.loss * samples) < largest(clients)  # False if not finite
        loss = [message.loss * samples, float(samples)] if known else [0.0, 0.0]
        return np.concatenate((plain, encoded(torch.tensor(loss, dtype=torch.float64), clients)))

    def _prune(self, header: dict[str, Any]) -> None:
        """Remove versions that the server no longer needs."""
        for number, oldest in header.get("oldest", {}).items():
            self.store.prune(int(number), int(oldest))

    def _hold(self, job: dict[str, Any]) -> None:
        """Load the versions that the server refers to, and unload all others."""
        wanted = {int(number): version for number, version in job["versions"].items()}
        snapshots = self.method.snapshots
        for number in set(snapshots) - wanted.keys():
            del snapshots[number]
            self._loaded.pop(number, None)
        for number, version in wanted.items():
            if self._loaded.get(number) != version:
                snapshots[number] = self.store.load(number, version)
                self._loaded[number] = version
        self.method.snapshots.to(self.method.device, self.method.compute_dtype)

    def _train(self, job: dict[str, Any], setting: Setting, received: State) -> tuple[dict[str, Any], State]:
        """Run one local training; return header and message."""
        said, message = self._trained(job, setting, received)
        return said, message.tensors

    def _trained(self, job: dict[str, Any], setting: Setting, received: State) -> tuple[dict[str, Any], Message]:
        """Run one local training; the private state is on the disk before anything is sent."""
        number, own = int(job["number"]), self.own
        (returned,) = own.gather(list(own.train(setting, {number: received}, job.get("max_steps"))))
        version = None
        if number in own.pending and returned.sound:
            version = self.store.save(number, own.pending[number])
        message = returned.message
        for guard in self.guards:
            guard.protect(self.method, received, message)
        said = {
            "number": number,
            "samples": message.samples,
            "loss": message.loss,
            "counts": returned.counts,
            "sound": returned.sound,
            "version": version,
            "counters": None if version is None else _counters(own.pending[number]),
        }
        return said, message

    def _evaluate(self, job: dict[str, Any], setting: Setting, received: State) -> tuple[dict[str, Any], State]:
        """Score the client's model on its own samples of a split."""
        split: Split = job["split"]
        self.own.number = int(job["number"])
        if not self.own.data.sizes()[split]:
            return {"scored": False}, {}
        found: Scores = self.own.evaluate(setting, {self.client: received}, split)
        metrics = {f"metric.{name}": value for name, value in found.metrics.items()}
        return {"scored": True}, {"loss": found.loss, "total": found.total, **metrics}

    def _tell(self, job: dict[str, Any], setting: Setting, received: State) -> tuple[dict[str, Any], State]:
        """Return the report of the method's client besides its scores."""
        self.own.number = int(job["number"])
        return {}, dict(self.own.tell(setting, {self.client: received})[self.client])

    def _check_private(self, sent: State) -> None:
        """Raise an error if a message contains a private entry, whatever the method's ``leave`` returned."""
        kept = {name for number in self.method.snapshots for name in self.method.snapshots[number].private}
        leaked = sorted((set(self.method.private_names) | kept).intersection(sent))
        if leaked:
            raise FederationError(
                f"The client's message would carry {', '.join(leaked)}, which {type(self.method).__name__} says stays "
                "with the client: nothing was sent."
            )


def scores_of(tensors: State, client: int) -> Scores:
    """Return the scores that a site sent."""
    return Scores(torch.tensor([client]), tensors["loss"], tensors["total"], under("metric.", tensors))


def _counters(snapshot: ClientSnapshot) -> list[int]:
    return [snapshot.rounds, snapshot.steps, snapshot.last_round]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
