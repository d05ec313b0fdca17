"""Secure aggregation between sites: sums that are right, masks that hide, what a hostile server gets."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from fl_lightning.callbacks import SecureAggregationCallback
from fl_lightning.errors import FederationError
from fl_lightning.privacy.secure import Words, encoded, row
from fl_lightning.remote import keys
from fl_lightning.remote.envelope import Envelope
from fl_lightning.remote.secure_server import SecureSession, Sum
from fl_lightning.remote.secure_site import MASKED, SETUP, SHARE, UNMASK, SecureMember
from fl_lightning.wire import State
from tests.support.federations import needs_flower

pytestmark = needs_flower
RULES = SecureAggregationCallback()
#: Sent by every client: as much as it counts, and its values.
VALUES = {client: torch.tensor([client + 0.5, -3.0 * client, 2.0**-20]).double() for client in range(8)}
WEIGHTS = {client: float(10 + client) for client in range(8)}


def words(client: int, clients: int) -> Words:
    """The values of a client, its weight, its loss (the client's number) times its samples, and these."""
    tail = torch.tensor([client * WEIGHTS[client], WEIGHTS[client]]).double()
    return np.concatenate((row({"w": VALUES[client]}, WEIGHTS[client], clients), encoded(tail, clients)))


#: Changes what a client answers at a stage.
Change = Callable[[int, str, Any], Any]


class Members:
    """Clients in this process, some of which are gone from a stage on; ``change`` meddles with their answers."""

    def __init__(
        self, gone: Mapping[int, str] | None = None, change: Callable[[int, str, Any], Any] | None = None
    ) -> None:
        self.members = {client: SecureMember(client, RULES) for client in VALUES}
        self.gone, self.change = dict(gone or {}), change
        self.vectors: dict[int, Words] = {}
        self.asked: list[tuple[str, int, dict[str, Any]]] = []

    def __call__(
        self, said: Mapping[int, dict[str, Any]], parts: Mapping[int, State], reasons: dict[int, str]
    ) -> Iterator[tuple[int, Envelope]]:
        for client, header in said.items():
            stage = header["stage"]
            self.asked.append((stage, client, copy.deepcopy(header)))
            if stage == self.gone.get(client):
                reasons[client] = "it is gone."
                continue
            member, tensors = self.members[client], {}
            plain = _json(header)
            try:
                answer = member.answer(plain)
            except FederationError as error:
                reasons[client] = str(error)
                continue
            if stage == MASKED:
                self.vectors[client] = member.masked(words(client, member.clients))
                tensors = {"0": {"masked": torch.from_numpy(self.vectors[client].view(np.int64))}}
                answer = {"samples": 10 + client, "counts": True, "sound": True, "version": None}
                answer["layout"] = [["w", [3], "float64"]]
            if self.change is not None:
                answer = self.change(client, stage, answer)
            yield client, Envelope({"client": client, "answer": _json(answer)}, tensors)


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def summed(members: Members, clients: int = 6, needed: int = 2) -> tuple[Sum, dict[int, str]]:
    reasons: dict[int, str] = {}
    session = SecureSession(members, RULES, float, reasons, needed)
    chosen = range(clients)
    return session.run({c: {} for c in chosen}, {c: {} for c in chosen}), reasons


def expected(clients: list[int]) -> torch.Tensor:
    """The mean, from exact sums of whole numbers."""
    steps = [torch.round(WEIGHTS[c] * VALUES[c] * 2.0**32).long() for c in clients]
    total = torch.stack(steps).sum(0).double() / 2.0**32
    return total / sum(WEIGHTS[c] for c in clients)


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({1: SETUP}, [0, 2, 3, 4, 5]),
        ({1: SHARE}, [0, 2, 3, 4, 5]),
        ({1: MASKED}, [0, 2, 3, 4, 5]),
        ({0: MASKED}, [1, 2, 3, 4, 5]),
        ({5: MASKED}, [0, 1, 2, 3, 4]),
        ({1: UNMASK}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_sum_is_that_of_all_that_sent_whoever_drops_out_and_when(gone: dict[int, str], left: list[int]) -> None:
    found, reasons = summed(Members(gone))
    assert sorted(found.said) == left
    assert torch.equal(found.mean["w"], expected(left))
    assert found.loss == pytest.approx(sum(c * WEIGHTS[c] for c in left) / sum(WEIGHTS[c] for c in left))
    assert reasons == dict.fromkeys(gone, "it is gone.")


def test_many_drop_out_in_all_stages() -> None:
    rules = SecureAggregationCallback(threshold=0.5)
    members = Members({0: SHARE, 3: MASKED, 7: UNMASK})
    members.members = {client: SecureMember(client, rules) for client in VALUES}
    session = SecureSession(members, rules, float, {}, 2)
    found = session.run({c: {} for c in VALUES}, {c: {} for c in VALUES})
    assert torch.equal(found.mean["w"], expected([1, 2, 4, 5, 6, 7]))


@pytest.mark.parametrize("stage", [SHARE, MASKED, UNMASK])
def test_below_the_threshold_the_round_is_refused(stage: str) -> None:
    members = Members({0: stage, 1: stage})
    with pytest.raises(FederationError, match="Secure aggregation of 6 clients needs 5 of them to its end, and has 4"):
        summed(members)
    if stage != UNMASK:
        assert not [one for one in members.asked if one[0] == UNMASK]  # nothing was revealed


def test_a_round_that_needs_more_clients_than_the_masks_reveals_nothing_either() -> None:
    members = Members({0: MASKED})
    with pytest.raises(FederationError, match="needs 6 clients in this round, and has 5"):
        summed(members, needed=6)
    assert not [one for one in members.asked if one[0] == UNMASK]
    with pytest.raises(FederationError, match="one client hides nothing"):
        summed(Members(dict.fromkeys(range(1, 6), SETUP)))


# ---- what the server receives ----------------------------------------------------------------------------------


def big(seed: int = 0, n: int = 4000) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).double()


def session_of(clients: int, values: Callable[[int], torch.Tensor]) -> dict[int, Words]:
    """Vectors that clients send in a session whose stages are those of an honest server."""
    members = {client: SecureMember(client, RULES) for client in range(clients)}
    public = {c: m.answer({"session": "s", "stage": SETUP})["keys"] for c, m in members.items()}
    written = {c: m.answer({"session": "s", "stage": SHARE, "keys": public})["shares"] for c, m in members.items()}
    sent = {}
    for client, member in members.items():
        own = {other: written[other][str(client)] for other in members if other != client}
        member.answer({"session": "s", "stage": MASKED, "shares": own})
        sent[client] = member.masked(encoded(values(client), clients))
    return sent


def test_what_is_sent_is_uniform_and_new_in_every_session() -> None:
    first, second = session_of(3, lambda client: big(client)), session_of(3, lambda client: big(client))
    for client in range(3):
        plain = encoded(big(client), 3)
        assert kstest(first[client] / 2.0**64, "uniform").pvalue > 1e-5
        assert abs(np.corrcoef(plain.view(np.int64) / 2.0**32, first[client] / 2.0**64)[0, 1]) < 0.08
        assert not (first[client] == second[client]).any()
        assert not (first[client] == plain).any()
        bits = np.unpackbits(first[client].view(np.uint8)).mean()
        assert abs(bits - 0.5) < 5 * 0.5 / np.sqrt(64 * len(plain))
    # Pairwise masks cancel; the own ones are left, so that even the sum is random before it is unmasked.
    assert kstest(sum(first.values(), np.zeros(4000, np.uint64)) / 2.0**64, "uniform").pvalue > 1e-5


def test_known_values_do_not_show_in_the_difference_of_two_sessions() -> None:
    """A server that knows or chose what a client sends: the difference to what it received is random, too."""
    zero, known = session_of(3, lambda client: torch.zeros(4000)), session_of(3, lambda client: big(7))
    for client in range(3):
        for sent, plain in ((zero, torch.zeros(4000)), (known, big(7))):
            assert kstest((sent[client] - encoded(plain, 3)) / 2.0**64, "uniform").pvalue > 1e-5
        difference = known[client] - zero[client]
        assert not (difference == encoded(big(7), 3)).any()
        assert kstest(difference / 2.0**64, "uniform").pvalue > 1e-5


def test_too_few_shares_tell_nothing_of_a_mask() -> None:
    """With one share less than the threshold the server cannot take a mask off."""
    members, reasons = Members(), dict[int, str]()
    session = SecureSession(members, RULES, float, reasons, 2)
    told: dict[int, Any] = {}

    def note(client: int, stage: str, answer: Any) -> Any:
        if stage == UNMASK:
            told[client] = answer
        return answer

    members.change = note
    session.run({c: {} for c in range(6)}, {c: {} for c in range(6)})
    shares = [bytes.fromhex(told[teller]["seeds"]["0"]) for teller in range(6)]
    seed = keys.combined(shares[:5])
    assert keys.combined(shares[1:]) == seed
    own = keys.mask(seed, "own", 6)
    assert not np.array_equal(members.vectors[0] - own, words(0, 6))  # masks in common with others are left
    found = b""
    with suppress(FederationError):
        found = keys.combined(shares[:4])
    assert found != seed


# ---- hostile servers -------------------------------------------------------------------------------------------


class Hostile:
    """A server that plays its part by hand with clients 0 to 3, to deviate where it likes."""

    def __init__(self, rules: SecureAggregationCallback = RULES, clients: int = 4) -> None:
        self.members = {client: SecureMember(client, rules) for client in range(clients)}
        self.public = {c: m.answer({"session": "s", "stage": SETUP})["keys"] for c, m in self.members.items()}
        self.written: dict[int, dict[str, str]] = {}

    def share(self) -> None:
        for client, member in self.members.items():
            self.written[client] = member.answer(self.said(SHARE, keys=self.public))["shares"]

    def to(self, client: int) -> dict[int, str]:
        return {other: self.written[other][str(client)] for other in self.members if other != client}

    def masked(self) -> None:
        self.share()
        for client, member in self.members.items():
            member.answer(self.said(MASKED, shares=self.to(client)))
            member.masked(words(client, member.clients))

    @staticmethod
    def said(stage: str, **more: Any) -> dict[str, Any]:
        return _json({"session": "s", "stage": stage, **more})

    def refused(self, stage: str, match: str, client: int = 0, **more: Any) -> None:
        with pytest.raises(FederationError, match=match):
            self.members[client].answer(self.said(stage, **more))
        with pytest.raises(FederationError, match="no such session"):  # and it has forgotten its secrets
            self.members[client].answer(self.said(UNMASK, sent=[0, 1, 2], dropped=[3]))
        with pytest.raises(FederationError, match="No other site is left"):
            self.members[client].masked(words(client, 4))


def test_nobody_tells_both_shares_of_a_client() -> None:
    server = Hostile()
    server.masked()
    server.refused(UNMASK, "both shares of client 2", sent=[0, 1, 2, 3], dropped=[2])
    server.refused(UNMASK, "both shares of client 1", client=1, sent=[0, 1, 2], dropped=[1, 3])


def test_values_leave_once_under_a_mask_and_before_any_share() -> None:
    server = Hostile()
    server.share()
    server.members[0].answer(server.said(MASKED, shares=server.to(0)))
    server.refused(UNMASK, "other clients than those that take part", sent=[0, 1, 2, 3], dropped=[])
    server = Hostile()
    server.masked()
    with pytest.raises(FederationError, match="No other site is left"):
        server.members[0].masked(words(1, 4))


def test_shares_are_told_once() -> None:
    server = Hostile()
    server.masked()
    told = server.members[0].answer(server.said(UNMASK, sent=[0, 1, 2, 3], dropped=[]))
    assert sorted(told["seeds"]) == ["0", "1", "2", "3"]
    assert told["numbers"] == {}
    server.refused(UNMASK, "no such session", sent=[0, 1, 2], dropped=[3])


@pytest.mark.parametrize(
    ("sent", "dropped", "match"),
    [
        ([0, 1], [2, 3], "needs 3 of them to its end, and has 2"),
        ([0], [1, 2, 3], "one client hides nothing"),
        ([1, 2, 3], [0], "other clients than those that take part"),  # itself
        ([0, 1, 2], [], "other clients than those that take part"),
        ([0, 1, 2, 3, 4], [], "other clients than those that take part"),
        ([0, 0, 1, 2, 3], [], "other clients than those that take part"),
        ("junk", [], "malformed"),
        (None, [], "malformed"),
    ],
)
def test_strange_requests_to_unmask_are_refused(sent: Any, dropped: Any, match: str) -> None:
    server = Hostile()
    server.masked()
    server.refused(UNMASK, match, sent=sent, dropped=dropped)


def test_a_small_cohort_is_refused() -> None:
    server = Hostile()
    server.refused(SHARE, "one client hides nothing", keys={0: server.public[0]})
    strict = Hostile(SecureAggregationCallback(least=5))
    strict.refused(SHARE, "takes 5 clients here, not 4", keys=strict.public)
    server = Hostile()
    server.share()
    server.refused(MASKED, "needs 3 of them to its end, and has 2", shares={1: server.written[1]["0"]})


def test_keys_of_one_server_for_several_clients_are_refused() -> None:
    server = Hostile()
    server.refused(SHARE, "one key twice", keys={**server.public, 3: server.public[2]})
    server.refused(SHARE, "other keys of this site", client=1, keys={**server.public, 1: server.public[2]})
    server.refused(SHARE, "other keys of this site", client=2, keys={c: k for c, k in server.public.items() if c != 2})
    server.refused(SHARE, "is invalid", client=3, keys={**server.public, 1: ["a", "b"]})
    server = Hostile()
    server.refused(SHARE, "malformed", keys={**server.public, 1: "abc"})


def test_shares_that_were_changed_or_are_of_others_are_refused() -> None:
    server = Hostile()
    server.share()
    wrong = server.to(0)
    server.refused(MASKED, "client 1 were changed", shares={**wrong, 1: wrong[1][:-9] + "A" * 9})
    server = Hostile()
    server.share()
    server.refused(MASKED, "client 1 were changed", shares={**server.to(0), 1: server.written[1]["2"]})
    server = Hostile()
    server.share()
    server.refused(MASKED, "clients that take no part", shares={**server.to(0), 9: server.written[1]["0"]})


@pytest.mark.parametrize("stage", [MASKED, UNMASK, "steal", None])
def test_stages_have_an_order(stage: Any) -> None:
    Hostile().refused(
        stage, "'share' of secure aggregation comes next", keys={}, shares={}, sent=[0, 1, 2], dropped=[3]
    )
    server = Hostile()
    server.share()
    server.refused(SHARE, "'masked' of secure aggregation comes next", keys=server.public)
    server = Hostile()
    server.masked()
    server.refused(MASKED, "'unmask' of secure aggregation comes next", shares=server.to(0))


def test_a_new_session_has_new_keys_and_nothing_of_the_one_before() -> None:
    server = Hostile()
    server.masked()
    again = server.members[0].answer({"session": "t", "stage": SETUP})["keys"]
    assert not set(again) & set(server.public[0])
    with pytest.raises(FederationError, match="no such session"):
        server.members[0].answer(server.said(UNMASK, sent=[0, 1, 2], dropped=[3]))
    with pytest.raises(FederationError, match="no such session"):
        SecureMember(0, RULES).answer(server.said(SHARE, keys=server.public))


# ---- hostile clients -------------------------------------------------------------------------------------------


def meddled(stage: str, change: Callable[[Any], Any], needed: int = 2) -> tuple[Sum, dict[int, str]]:
    """A session in which client 1 answers a stage in a way of its own."""

    def meddle(client: int, at: str, answer: Any) -> Any:
        return change(answer) if client == 1 and at == stage else answer

    return summed(Members(change=meddle), needed=needed)


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        (SETUP, lambda answer: {"keys": ["a"]}, "malformed"),
        (SETUP, lambda answer: "junk", "malformed"),
        (SHARE, lambda answer: {"shares": {"x": "y"}}, "malformed"),
        (SHARE, lambda answer: {"shares": {"77": "y"}}, "other clients than those"),
        (MASKED, lambda answer: {**answer, "version": "../x"}, "malformed"),
        (MASKED, lambda answer: {**answer, "layout": [["w", [4], "float64"]]}, "another layout than most"),
        (UNMASK, lambda answer: {**answer, "numbers": {"3": "00"}}, "other clients than those"),
    ],
)
def test_a_client_that_answers_strangely_is_left_out(stage: str, change: Any, said: str) -> None:
    found, reasons = meddled(stage, change)
    assert said in reasons[1]
    assert torch.equal(found.mean["w"], expected([0, 2, 3, 4, 5] if stage != UNMASK else list(range(6))))


def test_wrong_shares_and_wrong_masks_end_the_session() -> None:
    def other_share(answer: Any) -> Any:
        return {**answer, "seeds": {c: share[:-2] + "00" for c, share in answer["seeds"].items()}}

    with pytest.raises(FederationError, match=r"do not fit together|does not add up"):
        meddled(UNMASK, other_share)
    with pytest.raises(FederationError, match="do not fit together"):
        meddled(UNMASK, lambda answer: {**answer, "seeds": dict.fromkeys(answer["seeds"], "xyz")})
    with pytest.raises(FederationError, match="does not add up"):
        meddled(MASKED, lambda answer: {**answer, "samples": 99})


def test_options_are_checked() -> None:
    with pytest.raises(FederationError, match=r"threshold must be at least 0\.5 and below 1"):
        SecureAggregationCallback(threshold=0.4)
    with pytest.raises(FederationError, match="least must be 2 or more"):
        SecureAggregationCallback(least=1)
    for clients in range(2, 40):
        for threshold in (0.5, 2 / 3, 0.9):
            needed = SecureAggregationCallback(threshold=threshold).needed(clients)
            assert 2 * needed > clients  # a server with two stories gets too few shares of one kind
            assert needed <= clients
