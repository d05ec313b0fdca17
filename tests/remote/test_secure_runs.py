"""Runs between sites with secure aggregation: equal to their simulation, and nothing of a message on the wire."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import methods
from fl_lightning.callbacks import (
    DifferentialPrivacyCallback,
    LedgerCallback,
    PrivateSGDCallback,
    SecureAggregationCallback,
)
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedAvg, FedPer
from fl_lightning.module import FederatedModule
from fl_lightning.remote import PrivateStore, RemoteClients, Site, SiteData
from fl_lightning.remote.envelope import seal, unseal
from fl_lightning.robust import Median
from tests.support import blobs, fit, mlp
from tests.support.federations import needs_flower
from tests.support.privacy import REFUSED
from tests.support.sites import InProcess, kept, network, serve

pytestmark = needs_flower
SIZES = (19, 9, 16, 8, 24)
CLIENTS = len(SIZES)
SECURE = [SecureAggregationCallback()]


def made(kind: type[FederatedModule] = FedPer, **options: Any) -> FederatedModule:
    settings = {"lr": 0.1, "epochs": 1, "batch_size": 8, "engine": "sequential", "seed": 3, **options}
    return kind(mlp(), **settings)


def transport(
    folder: Path,
    kind: type[FederatedModule] = FedPer,
    meddle: Any = None,
    guards: Sequence[Any] = SECURE,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> InProcess:
    whole = blobs(sizes).federation
    return InProcess(network(lambda: made(kind, **options), whole, folder, guards=guards), meddle)


def simulated(
    kind: type[FederatedModule] = FedPer, rounds: int = 3, callbacks: Sequence[Any] = SECURE, **options: Any
) -> FederatedModule:
    method = made(kind, **options)
    torch.manual_seed(0)
    fit(method, blobs(SIZES), rounds, callbacks=copy.deepcopy(list(callbacks)))
    return method


def secured(server: FederatedModule, sites: InProcess, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"callbacks": copy.deepcopy(SECURE), **options}
    return serve(server, sites, CLIENTS, **options)


def same(left: FederatedModule, right: FederatedModule) -> bool:
    state = right.state_dict()
    return all(torch.equal(value, state[name]) for name, value in left.state_dict().items())


OPTIONS: dict[str, Any] = {
    "FedCluster": {"clusters": 2},
    "PFedMe": {"lr": 0.05},
    "WAFFLe": {"factors": {"fc1": 6}, "epochs": 2},
}


@pytest.mark.parametrize("name", [name for name in methods.__all__ if name not in REFUSED])
def test_every_method_that_can_equals_its_simulation_to_the_bit(name: str, tmp_path: Path) -> None:
    kind, options = getattr(methods, name), OPTIONS.get(name, {})
    sites, server = transport(tmp_path, kind, **options), made(kind, **options)
    secured(server, sites, rounds=2)
    expected = simulated(kind, 2, **options)
    assert same(server, expected)
    assert torch.equal(server.evaluator.scores["test"], expected.evaluator.scores["test"])
    found = kept(sites, server)
    for number in server.exchange.versions:  # type: ignore[attr-defined]
        for entry, value in expected.snapshots[number].private.items():
            assert torch.equal(found[f"{number}.{entry}"], value)
    # Losses are in the sum, too: their mean is what the simulation logs, but for rounding.
    assert server.summary["train/loss"] == pytest.approx(expected.summary["train/loss"], abs=1e-8, nan_ok=True)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_weights_are_the_clients_own(weighting: Any, tmp_path: Path) -> None:
    server = made(FedAvg, weighting=weighting)
    secured(server, transport(tmp_path, FedAvg, weighting=weighting))
    assert same(server, simulated(FedAvg, weighting=weighting))
    other = "uniform" if weighting == "samples" else "samples"
    with pytest.raises(FederationError, match="clients that are needed"):  # it would weight in another way
        secured(made(FedAvg, weighting=other), transport(tmp_path / "x", FedAvg, weighting=weighting), patience=0.3)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_others_are_refused_on_both_sides_in_the_words_of_the_simulation(name: str, tmp_path: Path) -> None:
    said = f"The server of {name} needs more than the mean of its clients' messages"
    with pytest.raises(FederationError, match=said):
        transport(tmp_path, getattr(methods, name))
    with pytest.raises(FederationError, match=said):
        secured(made(getattr(methods, name)), transport(tmp_path))


def test_what_cannot_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="A robust rule needs single messages"):
        secured(made(FedAvg, aggregation=Median()), transport(tmp_path, FedAvg))
    central = [DifferentialPrivacyCallback(where="central"), *copy.deepcopy(SECURE)]
    with pytest.raises(FederationError, match="changes single messages at the server, which secure aggregation hides"):
        secured(made(FedAvg), transport(tmp_path, FedAvg), callbacks=central)
    server, sites = made(), transport(tmp_path, guards=())
    server.double()
    server.exchange = RemoteClients(server, sites, CLIENTS)
    with pytest.raises(FederationError, match="pass it the Trainer's callbacks"):
        fit(server, SiteData(server.exchange, seed=0), 1, callbacks=copy.deepcopy(SECURE))


def test_a_sum_of_one_is_refused_and_so_is_one_below_least(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="Secure aggregation of one client hides nothing"):
        secured(made(FedAvg), transport(tmp_path, FedAvg), fraction=0.2)
    strict = [SecureAggregationCallback(least=3)]
    said = "Secure aggregation takes 3 clients here, not 2"
    sites = transport(tmp_path, FedAvg, guards=strict)
    with pytest.raises(FederationError, match=said):
        secured(made(FedAvg), sites, fraction=0.4, callbacks=copy.deepcopy(strict))
    with pytest.raises(FederationError, match=said):
        fit(made(FedAvg), blobs(SIZES, fraction=0.4), 1, callbacks=copy.deepcopy(strict))


def test_updates_that_are_too_large_are_refused_in_the_words_of_the_simulation(tmp_path: Path) -> None:
    class Large(FedAvg):
        def leave(self, state: Any, received: Any, me: Any) -> Any:
            reply = super().leave(state, received, me)
            return reply._replace(up={name: value + 1e9 for name, value in reply.up.items()})

    said = "Secure aggregation of 5 clients takes weighted values below 429496730, and an update is larger"
    with pytest.raises(FederationError, match=said):
        simulated(Large)
    with pytest.raises(FederationError, match=said):
        secured(made(Large), transport(tmp_path, Large))


# ---- what crosses --------------------------------------------------------------------------------------------


def requests(sites: InProcess, stage: str | None) -> list[tuple[str, Any, Any]]:
    """Node, request and reply of a stage; of None, of all else."""
    found = [(node, unseal(request), unseal(reply)) for node, request, reply in sites.sent]
    return [(node, asked, told) for node, asked, told in found if asked.header.get("stage") == stage]


def test_no_message_and_no_loss_is_on_the_wire(tmp_path: Path) -> None:
    messages: list[dict[str, torch.Tensor]] = []

    class Noting(FedAvg):
        def leave(self, state: Any, received: Any, me: Any) -> Any:
            reply = super().leave(state, received, me)
            messages.append({name: value.clone() for name, value in reply.up.items()})
            return reply

    sites = transport(tmp_path, Noting)
    secured(made(Noting), sites, rounds=2)
    wire = b"".join(reply for _, _, reply in sites.sent)
    assert len(messages) == 2 * CLIENTS
    for message in messages:
        for value in message.values():
            assert value.numpy().tobytes()[:64] not in wire
            assert value.float().numpy().tobytes()[:64] not in wire
    assert len(requests(sites, "masked")) == 2 * CLIENTS
    for _, _, (header, parts) in requests(sites, "masked"):
        assert header["answer"].keys() == {"number", "samples", "counts", "sound", "version", "counters", "layout"}
        assert {part: set(tensors) for part, tensors in parts.items()} == {"0": {"masked"}}
        assert parts["0"]["masked"].dtype == torch.int64
    for stage in ("setup", "share", "unmask"):
        assert all(not told.parts for _, _, told in requests(sites, stage))
    assert all(
        job["kind"] == "evaluate" for _, asked, _ in requests(sites, None) for job in asked.header.get("jobs", [])
    )


def test_two_runs_of_one_seed_send_other_bytes_and_come_to_the_same(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        sites, server = transport(tmp_path / name, FedAvg), made(FedAvg)
        secured(server, sites, rounds=1)
        runs.append((server, {node: told.parts["0"]["masked"] for node, _, told in requests(sites, "masked")}))
    assert same(runs[0][0], runs[1][0])
    for node, sent in runs[0][1].items():
        assert not (sent == runs[1][1][node]).any()


def test_the_server_has_the_mean_in_place_of_every_message(tmp_path: Path) -> None:
    seen: list[list[dict[str, torch.Tensor]]] = []

    class Curious(LedgerCallback):
        def on_message_up(self, trainer: Any, pl_module: Any, client: int, message: Any) -> None:
            super().on_message_up(trainer, pl_module, client, message)
            seen[-1].append(message.tensors)

        def on_round_start(self, trainer: Any, pl_module: Any, round: int, cohort: list[int]) -> None:
            super().on_round_start(trainer, pl_module, round, cohort)
            seen.append([])

    server = made(FedAvg)
    secured(server, transport(tmp_path, FedAvg), callbacks=[Curious(folder=str(tmp_path)), *copy.deepcopy(SECURE)])
    for round in seen:
        assert len(round) == CLIENTS
        assert all(torch.equal(one[name], round[0][name]) for one in round for name in one)


def job(site: Site) -> dict[str, Any]:
    return {"kind": "train", "number": 0, "setting": [0, 1, "train", CLIENTS], "versions": {}, "max_steps": None}


def test_a_site_sends_no_plain_message_and_no_masked_one_that_nobody_approved(tmp_path: Path) -> None:
    site = transport(tmp_path).sites["node-0"]
    request = seal({"kind": "work", "run": site.run.fingerprint, "jobs": [job(site)]}, {})
    assert "under secure aggregation, and none without" in unseal(site.answer(request)).header["refused"]
    plain = transport(tmp_path / "x", guards=()).sites["node-0"]
    setup = {"kind": "secure", "session": "s", "stage": "setup"}
    request = seal({**setup, "run": plain.run.fingerprint}, {})
    assert "has no SecureAggregationCallback" in unseal(plain.answer(request)).header["refused"]
    assert "operator approved the run" in unseal(site.answer(request)).header["refused"]
    assert site.run.fingerprint != plain.run.fingerprint
    assert "SecureAggregationCallback: threshold" in "\n".join(site.run.lines())


def test_no_private_entry_leaves_under_masks(tmp_path: Path) -> None:
    class Leaking(FedPer):
        def leave(self, state: Any, received: Any, me: Any) -> Any:
            reply = super().leave(state, received, me)
            return reply._replace(up={**reply.up, **reply.keep})

    with pytest.raises(FederationError, match=r"would carry head\.bias, head\.weight, which Leaking says stays"):
        secured(made(Leaking), transport(tmp_path, Leaking))


def test_noise_of_the_clients_is_under_the_masks(tmp_path: Path) -> None:
    local = lambda noise: [DifferentialPrivacyCallback(0.01, noise, "local"), *copy.deepcopy(SECURE)]  # noqa: E731
    server = made(FedAvg)
    secured(server, transport(tmp_path / "a", FedAvg, guards=local(0.0)), callbacks=local(0.0))
    assert same(server, simulated(FedAvg, callbacks=local(0.0)))
    assert not same(server, simulated(FedAvg))
    noised = made(FedAvg)
    secured(noised, transport(tmp_path / "b", FedAvg, guards=local(1.0)), callbacks=local(1.0))
    assert not same(noised, server)
    assert noised.trainer.callback_metrics["privacy/epsilon"] > 0


def test_private_sgd_goes_with_it(tmp_path: Path) -> None:
    guards = lambda: [PrivateSGDCallback(clip=0.1, noise_multiplier=0.0), *copy.deepcopy(SECURE)]  # noqa: E731
    whole, sites = blobs(SIZES).federation, {}
    whole.inputs.data = whole.inputs.double()
    for client in range(CLIENTS):
        own = PrivateStore(tmp_path / str(client))
        sites[f"node-{client}"] = Site(client, made().double(), whole.part([client]), own, guards=guards())
    server = made()
    secured(server, InProcess(sites), callbacks=guards(), rounds=2)
    assert same(server, simulated(rounds=2, callbacks=guards()))


# ---- who drops out -------------------------------------------------------------------------------------------


def failing(node: str, stage: str, round: int = 1, forget: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """Let a node's answer to a stage of a round be lost, once."""
    count = [0]

    def meddle(at: str, request: bytes, reply: bytes) -> bytes | str:
        if at != node or unseal(request).header.get("stage") != stage:
            return reply
        count[0] += 1
        if count[0] != round + 1:
            return reply
        forget()
        return "its process was killed"

    return meddle


@pytest.mark.parametrize("stage", ["setup", "share", "masked", "unmask"])
def test_a_run_goes_on_without_a_site_that_drops_out(stage: str, tmp_path: Path) -> None:
    sites = transport(tmp_path, SCAFFOLD, failing("node-2", stage))
    server, trained = made(SCAFFOLD), list[list[int]]()

    class Noting(LedgerCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, messages: Any) -> None:
            super().on_round_end(trainer, pl_module, messages)
            trained.append([message.client for message in messages])

    callbacks = [Noting(folder=str(tmp_path)), *copy.deepcopy(SECURE)]
    options = {"least": 4, "callbacks": callbacks}
    if stage == "unmask":  # its values are in the sum
        secured(server, sites, **options)
        assert trained == [[0, 1, 2, 3, 4]] * 3
        assert same(server, simulated(SCAFFOLD))
        return
    with pytest.warns(UserWarning, match="Round 1: went on without client 2: its process was killed"):
        secured(server, sites, **options)
    assert trained == [[0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]
    # The same as a plain run in which the client is missed, but for rounding.
    plain = made(SCAFFOLD)

    def drop(node: str, request: bytes, reply: bytes) -> bytes | str:
        jobs = unseal(request).header.get("jobs", [])
        trains = any(job["kind"] == "train" and job["setting"][0] == 1 for job in jobs)
        return "its process was killed" if node == "node-2" and trains else reply

    with pytest.warns(UserWarning, match="went on without client 2"):
        serve(plain, transport(tmp_path / "plain", SCAFFOLD, drop, guards=()), CLIENTS, least=4)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(server.state_dict()[name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("stage", ["share", "masked", "unmask"])
def test_a_site_that_is_started_anew_is_asked_again(stage: str, tmp_path: Path) -> None:
    """All are needed: another session begins, and the run comes to the same."""
    sites = transport(tmp_path, SCAFFOLD)

    def forget() -> None:
        sites.sites["node-2"].member.close()  # type: ignore[union-attr]

    sites.meddle = failing("node-2", stage, forget=forget)
    server = made(SCAFFOLD)
    secured(server, sites)
    assert same(server, simulated(SCAFFOLD))


def test_below_the_threshold_the_round_is_refused_in_a_sentence(tmp_path: Path) -> None:
    def meddle(node: str, request: bytes, reply: bytes) -> bytes | str:
        lost = node in ("node-1", "node-3") and unseal(request).header.get("stage") == "masked"
        return "its process was killed" if lost else reply

    said = "Secure aggregation of 5 clients needs 4 of them to its end, and has 3.* client 1: its process was killed"
    sites = transport(tmp_path, meddle=meddle)
    with pytest.raises(FederationError, match=said):
        secured(made(), sites, least=2)
    assert not requests(sites, "unmask")


class Diverging(FedAvg):
    """Some clients' updates are not finite in round 1."""

    who: Any = (1,)

    def leave(self, state: Any, received: Any, me: Any) -> Any:
        reply = super().leave(state, received, me)
        bad = me.client in self.who and me.round == 1
        return reply._replace(up={n: v * float("inf") if bad else v for n, v in reply.up.items()})


class AllDiverging(Diverging):
    who = range(CLIENTS)


def test_an_update_that_is_not_finite_is_left_out_and_named(tmp_path: Path) -> None:
    server = made(Diverging)
    with pytest.warns(UserWarning, match="Round 1: left out clients 1, whose updates are not finite"):
        secured(server, transport(tmp_path, Diverging), least=4)
    with pytest.warns(UserWarning, match="Round 1: left out clients 1, whose updates are not finite"):
        expected = simulated(Diverging)
    assert same(server, expected)


def test_if_no_update_is_finite_the_run_says_what_a_simulation_says(tmp_path: Path) -> None:
    said = r"the updates of all 5 clients \(0, 1, 2, 3, 4\) are not finite"
    with pytest.raises(FederationError, match=said):
        simulated(AllDiverging)
    with pytest.raises(FederationError, match=said):
        secured(made(AllDiverging), transport(tmp_path, AllDiverging))


def test_a_checkpoint_goes_on_to_the_same_end(tmp_path: Path) -> None:
    sites = transport(tmp_path, SCAFFOLD)
    secured(made(SCAFFOLD), sites, rounds=1).save_checkpoint(tmp_path / "first.ckpt")
    again = made(SCAFFOLD)
    secured(again, sites, ckpt_path=str(tmp_path / "first.ckpt"))
    assert same(again, simulated(SCAFFOLD))


def test_a_site_warns_of_a_round_whose_sum_the_server_has(tmp_path: Path, caplog: Any) -> None:
    sites = transport(tmp_path)
    secured(made(), sites, rounds=1)
    assert "asks for round 0 again" not in caplog.text
    secured(made(), sites, rounds=1)
    assert caplog.text.count("asks for round 0 again, whose sum it has") == CLIENTS
