"""Views of each adversary of each method, and the models it makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_lightning.callbacks.attacks import ALL_VIEWS
from fl_lightning.distributions import prior_mean
from fl_lightning.engine import make_engine
from fl_lightning.errors import FederationError
from fl_lightning.methods import APFL, SCAFFOLD, FedAvg, FedPer, LGFedAvg, Local, PFedMe, WAFFLe, WAFFLeL1
from fl_lightning.module import FederatedModule
from fl_lightning.parties import Me, Reply
from fl_lightning.privacy import VIEWS, Run, Wire, Wiretap, intercept, make_views
from fl_lightning.privacy.data import as_clients
from fl_lightning.privacy.wiretap import finished
from fl_lightning.wire import State, prefixed
from tests.support import blobs, fit, largest_difference, mlp, weights
from tests.support.engines import METHODS

WAFFLE: dict[str, Any] = {"factors": {"fc1": 6}, "epochs": 2, "lr": 0.1, "vi_lr_mult": 100.0}


def tapped(method: FederatedModule, rounds: int = 2, memory: int = 5) -> Run:
    """A finished run that was listened to."""
    wire = Wire(memory=memory)
    method.engine = make_engine("stacked")  # auto would probe all of them
    fit(method, blobs(), rounds, callbacks=[Wiretap(wire)])
    return finished(method, wire)


def reference(run: Run) -> Any:
    return as_clients(run.module.federation, [torch.arange(30)])


def test_fedavg_is_seen_as_it_was_sent() -> None:
    method, sent = FedAvg(mlp(), lr=0.1), []
    method.on_before_aggregate = lambda messages: sent.append([m.tensors for m in messages])  # type: ignore[attr-defined]
    run = tapped(method)
    outsider, server, other, insider = (VIEWS[name]().observe(run, 1, reference(run)) for name in ALL_VIEWS)
    assert list(outsider) == list(server) == list(other) == ["seen"]
    assert [len(candidates["seen"]) for candidates in (outsider, server, other)] == [1, 2, 1]
    assert largest_difference(outsider["seen"][0], sent[-1][1]) == 0.0
    assert largest_difference(server["seen"][0], sent[0][1]) == 0.0
    assert largest_difference(other["seen"][0], method.server_state()) == 0.0
    assert largest_difference(insider["own"][0], outsider["seen"][0]) == 0.0
    assert largest_difference(insider["personal"][0], method.server_state()) == 0.0


def test_waffle_hides_the_selection_and_nothing_else() -> None:
    method = WAFFLe(mlp(), **WAFFLE)
    run = tapped(method)
    outsider = VIEWS["outsider"]().observe(run, 2, reference(run))
    assert list(outsider) == ["ones", "prior_mean", "guess"]
    (sent,) = (run.wire.sent[2][-1],)
    for (state,) in outsider.values():
        assert all(torch.equal(state[name], sent[name]) for name in sent)
    masks = {name: states[0]["fc1.mask"] for name, states in outsider.items()}
    assert torch.equal(masks["ones"], torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(masks["prior_mean"], prior_mean(6, 0.8 * 6).double(), rtol=1e-6, atol=0)
    assert not torch.equal(masks["guess"], torch.sigmoid(method.initial("fc1", 6)["logits"]))
    own = method.snapshots[2].private
    assert not torch.equal(masks["guess"], torch.sigmoid(own["fc1.logits"]))
    (insider,) = VIEWS["insider"]().observe(run, 2)["own"]
    assert torch.equal(insider["fc1.mask"], torch.sigmoid(own["fc1.logits"]))
    assert torch.equal(insider["fc1.wa"], sent["fc1.wa"])


def test_factors_that_moved_betray_the_selection_by_hand() -> None:
    """Left and right factors that move by 0, half and all of their step have masks of 0, half and 1."""
    method = WAFFLe(mlp(), **{**WAFFLE, "factors": {"fc1": 4}})
    received = {name: value.double() for name, value in weights(method).items() if not name.endswith("mask")}
    left, right = torch.full((16, 4), 2.0).double(), torch.full((4, 20), 0.5).double()
    strength = torch.tensor([1.0, 1.0, -1.0, 2.0]).double()
    received |= {"fc1.wa": left, "fc1.wb": right, "fc1.r": strength}
    used = torch.tensor([0.0, 0.5, 1.0, 1.0]).double()
    message = {**received, "fc1.wa": left + used * strength * 0.1, "fc1.wb": right - (used * strength)[:, None] * 0.3}
    torch.testing.assert_close(method.betrayed(received, message)["fc1.mask"], used)
    assert torch.equal(method.betrayed(received, received)["fc1.mask"], torch.ones(4).double())


def test_the_server_reads_the_selection_off_an_update() -> None:
    """The entries that the client used changed; nobody but the server has both of its messages."""
    method = WAFFLe(mlp(), **{**WAFFLE, "factors": {"fc1": 24}, "epochs": 4, "vi_lr_mult": 3000.0})
    run = tapped(method, rounds=3, memory=1)
    assert all("traces" not in VIEWS[name]().observe(run, 0, reference(run)) for name in VIEWS if name != "server")
    off: dict[str, list[float]] = {}
    agreement: list[float] = []
    for client in run.clients:
        server = VIEWS["server"]().observe(run, client)
        true = torch.sigmoid(run.private[client]["fc1.logits"])
        (traces,) = server["traces"]
        assert torch.equal(traces["fc1.wa"], run.wire.sent[client][-1]["fc1.wa"])
        agreement.append(float(torch.corrcoef(torch.stack([traces["fc1.mask"], true]))[0, 1]))
        for name, states in server.items():
            off.setdefault(name, []).append(float((states[0]["fc1.mask"] - true).abs().mean()))
    assert sum(agreement) / len(agreement) > 0.8
    assert sum(off["traces"]) < 0.7 * min(sum(off["ones"]), sum(off["prior_mean"]))
    again = intercept(method, [1])
    assert "traces" in VIEWS["server"]().observe(again, 1)


def test_the_guess_depends_on_the_adversarys_data_alone() -> None:
    """The true selection plays no part in it: with other private entries the guess is the same."""
    method = WAFFLe(mlp(), **WAFFLE)
    run = tapped(method)
    first = VIEWS["outsider"]().observe(run, 2, reference(run))["guess"][0]
    run.guesses.clear()
    run.private[2] = {name: torch.zeros_like(value) for name, value in run.private[2].items()}
    del method.snapshots[2]
    second = VIEWS["outsider"]().observe(run, 2, reference(run))["guess"][0]
    assert largest_difference(first, second) == 0.0
    run.guesses.clear()
    other = VIEWS["outsider"]().observe(run, 2, as_clients(method.federation, [torch.arange(60, 90)]))["guess"][0]
    assert largest_difference(first, other) > 0


def test_a_guess_that_diverges_is_the_start() -> None:
    method = WAFFLeL1(mlp(), factors={"fc1": 6}, lr=0.1)
    run = tapped(method)
    method.score_lr_mult = float("inf")
    (guess,) = VIEWS["outsider"]().observe(run, 0, reference(run))["guess"]
    assert torch.equal(guess["fc1.mask"], torch.ones(6).double())


@pytest.mark.parametrize(("kind", "private"), [(FedPer, "head.weight"), (LGFedAvg, "fc1.weight")])
def test_private_layers_are_initial_or_guessed(kind: type[FederatedModule], private: str) -> None:
    method = kind(mlp(), lr=0.1)
    start = weights(method)
    run = tapped(method)
    outsider = VIEWS["outsider"]().observe(run, 0, reference(run))
    assert list(outsider) == ["initial", "guess"]
    assert torch.equal(outsider["initial"][0][private], start[private].double())
    assert not torch.equal(outsider["guess"][0][private], start[private].double())
    shared = next(iter(run.wire.sent[0][-1]))
    assert torch.equal(outsider["guess"][0][shared], run.wire.sent[0][-1][shared])
    (insider,) = VIEWS["insider"]().observe(run, 0)["own"]
    assert torch.equal(insider[private], method.snapshots[0].private[private])


@pytest.mark.parametrize("kind", [PFedMe, APFL, SCAFFOLD])
def test_second_models_stay_with_the_client(kind: type[FederatedModule]) -> None:
    method = kind(mlp(), lr=0.05)
    run = tapped(method)
    (seen,) = VIEWS["outsider"]().observe(run, 0)["seen"]
    assert all(torch.equal(seen[name], run.wire.sent[0][-1][name]) for name in seen)
    insider = VIEWS["insider"]().observe(run, 0)
    assert largest_difference(insider["personal"][0], method.personal_state(0)) == 0.0


def test_of_local_only_the_insider_sees_anything() -> None:
    method = Local(mlp(), lr=0.1)
    run = tapped(method)
    for name in ("outsider", "server", "other_client"):
        assert VIEWS[name]().observe(run, 0, reference(run)) == {}
    assert largest_difference(VIEWS["insider"]().observe(run, 0)["own"][0], method.personal_state(0)) == 0.0


def test_only_the_scores_of_the_l1_ablation_are_hidden() -> None:
    run = tapped(WAFFLeL1(mlp(), factors={"fc1": 6}, lr=0.1))
    assert list(VIEWS["outsider"]().observe(run, 0, reference(run))) == ["ones", "guess"]


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_can_be_viewed_and_views_change_nothing(kind: type[FederatedModule]) -> None:
    method = kind(mlp(), lr=0.05, **{"epochs": 2, **METHODS[kind]})
    run = tapped(method, memory=1)
    before, kept = weights(method), {c: dict(method.snapshots[c].private) for c in method.snapshots}
    x = method.federation.inputs[:3].double()
    for name in VIEWS:
        for states in VIEWS[name]().observe(run, 0, reference(run)).values():
            assert method.call(states[0], x, training=False)[0].shape == (3, 4)
    again = intercept(method, [0, 3])
    assert again.clients == [0, 3]
    assert largest_difference(before, weights(method)) == 0.0
    assert all(
        torch.equal(method.snapshots[c].private[n], v) for c, private in kept.items() for n, v in private.items()
    )


def test_the_next_messages_are_what_the_run_would_have_sent() -> None:
    short, long = FedAvg(mlp(), lr=0.1), FedAvg(mlp(), lr=0.1)
    tapped(short, rounds=2)
    expected = tapped(long, rounds=3)
    asked = intercept(short, [1, 2])
    for client in (1, 2):
        assert largest_difference(asked.wire.sent[client][-1], expected.wire.sent[client][-1]) < 1e-12


def test_messages_in_a_language_of_their_own_are_refused() -> None:
    class Renaming(FedAvg):
        def leave(self, state: State, received: State, me: Me) -> Reply:
            up, keep = super().leave(state, received, me)
            return Reply(prefixed("w.", up), keep)

        def aggregate(self, messages: list[Any]) -> State:
            return {name.removeprefix("w."): value for name, value in super().aggregate(messages).items()}

    run = tapped(Renaming(mlp()))
    with pytest.raises(FederationError, match=r"Renaming\.revealed must translate them"):
        VIEWS["outsider"]().observe(run, 0)


def test_unknown_views_are_refused() -> None:
    with pytest.raises(FederationError, match="no view 'spy': choose among outsider, server, other_client, insider"):
        make_views(["outsider", "spy"])


def test_the_wire_keeps_those_heard_last() -> None:
    wire = Wire(clients=2, memory=2)
    for number, client in enumerate((0, 1, 0, 0, 2, 0)):
        if number != 3:
            wire.hand(client, {"w": torch.tensor(number - 1)})
        wire.note(client, {"w": torch.tensor(number)})
    assert {c: [int(m["w"]) for m in messages] for c, messages in wire.sent.items()} == {2: [4], 0: [3, 5]}
    assert {c: [down.get("w") for down, _ in wire.exchanged(c)] for c in wire.sent} == {2: [3], 0: [None, 4]}
