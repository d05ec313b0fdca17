"""Sites and their server in this process: what goes wrong on the way, who is absent, who may do what."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from fl_lightning import methods
from fl_lightning.callbacks import (
    AgentWeightsCallback,
    ClustersCallback,
    Dashboard,
    DifferentialPrivacyCallback,
    FairnessCallback,
    FederatedCheckpoint,
    LedgerCallback,
    MembershipInferenceCallback,
    PrivateSGDCallback,
    RunRecord,
)
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedAvg, FedPer
from fl_lightning.module import FederatedModule
from fl_lightning.remote import PrivateStore, RemoteClients, Site, envelope
from fl_lightning.remote.envelope import seal, unseal
from fl_lightning.robust import Median
from fl_lightning.snapshots import ClientSnapshot
from tests.support import blobs, fit, mlp
from tests.support.sites import InProcess, network, serve

CLIENTS = 3
DATA = {"sizes": (19, 9, 16)}


def made(kind: type[FederatedModule] = FedPer, **options: Any) -> FederatedModule:
    settings = {"lr": 0.1, "epochs": 1, "batch_size": 8, "engine": "sequential", "seed": 3, **options}
    return kind(mlp(), **settings)


def transport(folder: Path, kind: type[FederatedModule] = FedPer, meddle: Any = None, **options: Any) -> InProcess:
    return InProcess(network(lambda: made(kind, **options), blobs(**DATA).federation, folder), meddle)


def simulated(kind: type[FederatedModule] = FedPer, rounds: int = 3, **options: Any) -> FederatedModule:
    method = made(kind, **options)
    fit(method, blobs(**DATA), rounds)
    return method


def same(left: FederatedModule, right: FederatedModule) -> bool:
    state = right.state_dict()
    return all(torch.equal(value, state[name]) for name, value in left.state_dict().items())


def changed(reply: bytes, change: Any) -> bytes:
    """A reply with another content."""
    header, parts = unseal(reply)
    change(header, parts)
    return seal(header, parts)


# ---- messages ------------------------------------------------------------------------------------------------


def test_a_tensor_in_two_parts_is_sent_once() -> None:
    value = torch.randn(100, 100)
    once = len(seal({}, {"a": {"w": value}}))
    twice = seal({}, {"a": {"w": value}, "b": {"v": value, "u": value[:50]}})
    assert len(twice) < once + 50 * 100 * 4 + 300
    _, parts = unseal(twice)
    assert torch.equal(parts["b"]["v"], value)
    assert torch.equal(parts["b"]["u"], value[:50])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_messages_keep_types_shapes_and_bits(dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.randn(3, 4).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "none": torch.zeros(0, 2).to(dtype),
    }
    tensors["strided"] = torch.randn(4, 6).to(dtype).t()
    header, parts = unseal(seal({"x": [1, None, "é"], "loss": float("nan")}, {"p": tensors}))
    assert header["x"] == [1, None, "é"]
    for name, value in tensors.items():
        assert parts["p"][name].dtype == dtype
        assert torch.equal(parts["p"][name], value)


@pytest.mark.parametrize("data", [b"", b"x", b"\x00" * 100, seal({}, {})[:-3], b"\xff" * 8 + b"{}", b"[" * 10**5])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(FederationError, match="not a message of fl_lightning"):
        unseal(data)


def test_a_message_of_another_format_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "FORMAT", 2)
    data = seal({"x": 1}, {"p": {"w": torch.ones(1)}})
    monkeypatch.undo()
    with pytest.raises(FederationError, match=r"format 2, this one reads 1: use the same version of fl_lightning"):
        unseal(data)


# ---- what is kept --------------------------------------------------------------------------------------------


def test_versions_are_written_whole_checked_and_pruned(tmp_path: Path) -> None:
    store = PrivateStore(tmp_path / "own", kept=2)
    shot, names = ClientSnapshot(), []
    for round in range(6):
        shot = shot.after({"w": torch.full((3,), float(round))}, round, 5)
        names.append(store.save(1, shot))
    found = store.load(1, names[3])
    assert (found.rounds, found.steps, found.last_round) == (4, 20, 3)
    assert torch.equal(found.private["w"], torch.full((3,), 3.0))
    store.prune(1, 5)
    assert store.versions(1) == names[2:]
    assert not list((tmp_path / "own").glob("*.part"))
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0
    with pytest.raises(FederationError, match="refers to version"):
        store.load(1, names[0])
    path = next((tmp_path / "own").glob(f"1.{names[4]}.*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(FederationError, match="was damaged"):
        store.load(1, names[4])
    next((tmp_path / "own").glob(f"1.{names[3]}.*")).rename(next((tmp_path / "own").glob(f"1.{names[5]}.*")))
    with pytest.raises(FederationError, match="holds another version"):
        store.load(1, names[5])
    with pytest.raises(FederationError, match="is not a version"):
        store.load(1, "../../etc")


def test_version_names_tell_nothing_of_the_content(tmp_path: Path) -> None:
    shot = ClientSnapshot().after({"w": torch.ones(2)}, 0, 1)
    assert PrivateStore(tmp_path / "a").save(0, shot) != PrivateStore(tmp_path / "b").save(0, shot)


def test_a_server_set_back_a_round_goes_on_to_the_same_end(tmp_path: Path) -> None:
    sites = transport(tmp_path, SCAFFOLD)
    server = made(SCAFFOLD)
    early = serve(server, sites, CLIENTS, rounds=1)
    early.save_checkpoint(tmp_path / "first.ckpt")
    serve(made(SCAFFOLD), sites, CLIENTS, rounds=3, ckpt_path=str(tmp_path / "first.ckpt"))
    again = made(SCAFFOLD)  # two rounds behind its clients
    serve(again, sites, CLIENTS, rounds=3, ckpt_path=str(tmp_path / "first.ckpt"))
    assert same(again, simulated(SCAFFOLD))


def test_a_site_that_is_started_anew_goes_on_to_the_same_end(tmp_path: Path) -> None:
    sites = transport(tmp_path, SCAFFOLD)
    server, count = made(SCAFFOLD), [0]
    others = [network(lambda: made(SCAFFOLD), blobs(**DATA).federation, tmp_path) for _ in range(10)]

    def restart(node: str, request: bytes, reply: bytes) -> bytes | str:
        count[0] += 1
        if count[0] % 4 == 0:
            sites.sites[node] = others.pop()[node]
        return "its process was killed" if count[0] % 5 == 0 and count[0] > 5 else reply

    sites.meddle = restart
    serve(server, sites, CLIENTS)
    assert same(server, simulated(SCAFFOLD))


def test_a_checkpoint_of_sites_is_not_taken_for_one_of_simulated_clients_nor_the_other_way(tmp_path: Path) -> None:
    serve(made(), transport(tmp_path), CLIENTS, rounds=1).save_checkpoint(tmp_path / "sites.ckpt")
    with pytest.raises(FederationError, match="real sites, which keep their own state"):
        fit(made(), blobs(**DATA), 2, str(tmp_path / "sites.ckpt"))
    fit(made(), blobs(**DATA), 1).save_checkpoint(tmp_path / "simulated.ckpt")
    with pytest.raises(FederationError, match="were simulated"):
        serve(made(), transport(tmp_path), CLIENTS, 2, ckpt_path=str(tmp_path / "simulated.ckpt"))


def test_the_next_round_travels_with_the_evaluation(tmp_path: Path) -> None:
    sites = transport(tmp_path)
    serve(made(), sites, CLIENTS, rounds=4)
    kinds = [
        [job["kind"] for job in unseal(request).header.get("jobs", ["join"]) if job != "join"]
        for _, request, _ in sites.sent
    ]
    messages = [one for one in kinds if one]
    assert messages == [["train"]] * 3 + [["evaluate", "train"]] * 9 + [["evaluate"]] * 3


def test_what_was_trained_ahead_is_not_used_when_the_server_has_changed(tmp_path: Path) -> None:
    class Changing(FedAvg):
        def on_train_epoch_start(self) -> None:
            if self.completed_rounds == 1:
                with torch.no_grad():
                    self.net.fc1.weight.add_(1.0)  # type: ignore[union-attr, operator]

    def make() -> FederatedModule:
        return made(Changing)

    server = make()
    serve(server, InProcess(network(make, blobs(**DATA).federation, tmp_path)), CLIENTS)
    expected = make()
    fit(expected, blobs(**DATA), 3)
    assert same(server, expected)


# ---- replies that are not what was asked for -----------------------------------------------------------------


def other_client(header: Any, parts: Any) -> None:
    header["client"] = 2


def shape(header: Any, parts: Any) -> None:
    parts["0"] = {name: value[None] for name, value in parts["0"].items()}


def not_finite(header: Any, parts: Any) -> None:
    next(iter(parts["0"].values())).fill_(float("nan"))


def extra(header: Any, parts: Any) -> None:
    parts["0"]["more"] = torch.zeros(3)


def lacking(header: Any, parts: Any) -> None:
    parts["0"].popitem()


def samples(header: Any, parts: Any) -> None:
    header["replies"][0]["samples"] = 10**6


def no_replies(header: Any, parts: Any) -> None:
    header["replies"] = []


def no_counters(header: Any, parts: Any) -> None:
    header["replies"][0]["counters"] = "many"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (other_client, "answered as client 2"),
        (shape, "has shape"),
        (not_finite, "not finite"),
        (extra, "was not requested"),
        (lacking, "it lacks"),
        (samples, "but joined with"),
        (no_replies, "do not match the request"),
        (no_counters, "malformed"),
        (b"garbage", "not a message"),
        ("the node is offline", "offline"),
    ],
)
def test_a_wrong_reply_is_left_out_and_named(wrong: Any, said: str, tmp_path: Path) -> None:
    def meddle(node: str, request: bytes, reply: bytes) -> bytes | str:
        jobs = unseal(request).header.get("jobs")
        if node != "node-1" or not jobs or jobs[0]["kind"] != "train":
            return reply
        return wrong if isinstance(wrong, bytes | str) else changed(reply, wrong)

    server = made()
    with pytest.warns(UserWarning, match=rf"client(s)? 1.*{said}"):
        serve(server, transport(tmp_path, meddle=meddle), CLIENTS, rounds=1, least=2)
    assert server.summary["clients/trained"] == 2
    assert 1 not in server.exchange.versions  # type: ignore[attr-defined]
    assert server.state_dict()["net.fc1.weight"].isfinite().all()


def version(header: Any, parts: Any) -> None:
    header["replies"][0]["version"] = "../../x"


def flag(header: Any, parts: Any) -> None:
    header["replies"][0]["sound"] = "yes"


@pytest.mark.parametrize("wrong", [version, flag, no_counters])
def test_a_reply_of_another_form_is_left_out_in_every_round(wrong: Any, tmp_path: Path) -> None:
    def meddle(node: str, request: bytes, reply: bytes) -> bytes:
        jobs = unseal(request).header.get("jobs")
        return changed(reply, wrong) if node == "node-1" and jobs and jobs[0]["kind"] == "train" else reply

    server = made()
    with pytest.warns(UserWarning, match="client 1.*malformed"):
        serve(server, transport(tmp_path, meddle=meddle), CLIENTS, rounds=2, least=2)
    assert server.state_dict()["net.fc1.weight"].isfinite().all()


def other_metrics(header: Any, parts: Any) -> None:
    parts["0"]["metric.more"] = torch.ones(1)


def long_scores(header: Any, parts: Any) -> None:
    parts["0"]["loss"] = torch.ones(3)


@pytest.mark.parametrize(("wrong", "said"), [(other_metrics, "other metrics than most"), (long_scores, "malformed")])
def test_wrong_scores_are_left_out(wrong: Any, said: str, tmp_path: Path) -> None:
    def meddle(node: str, request: bytes, reply: bytes) -> bytes:
        jobs = unseal(request).header.get("jobs")
        return changed(reply, wrong) if node == "node-1" and jobs and jobs[0]["kind"] == "evaluate" else reply

    server = made()
    with pytest.warns(UserWarning, match=said):
        serve(server, transport(tmp_path, meddle=meddle), CLIENTS, rounds=1, least=2)
    assert server.evaluator.scores["test"].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("told", [99, -1, float("nan")])
def test_a_cluster_that_there_is_not_is_no_choice(told: float, tmp_path: Path) -> None:
    def meddle(node: str, request: bytes, reply: bytes) -> bytes:
        jobs = unseal(request).header.get("jobs")
        hostile = node == "node-1" and jobs and jobs[0]["kind"] == "tell"
        return changed(reply, lambda header, parts: parts["0"].update(cluster=torch.tensor(told))) if hostile else reply

    server = made(methods.IFCA, clusters=2)
    sites = transport(tmp_path, methods.IFCA, meddle, clusters=2)
    serve(server, sites, CLIENTS, rounds=1)
    assert server.assignment()[1] in (0, 1)


def test_a_client_that_is_needed_and_never_answers_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    def meddle(node: str, request: bytes, reply: bytes) -> bytes | str:
        return "its ClientApp crashed" if node == "node-2" and "jobs" in unseal(request).header else reply

    with pytest.raises(FederationError, match="needs 1 more of its clients: client 2: its ClientApp crashed"):
        serve(made(), transport(tmp_path, meddle=meddle), CLIENTS)


# ---- who is there --------------------------------------------------------------------------------------------


def test_a_run_waits_for_clients_that_it_needs(tmp_path: Path) -> None:
    sites = transport(tmp_path)
    sites.absent = {"node-1"}
    with pytest.raises(FederationError, match=r"2 of the 3 clients that are needed .*missing: 1"):
        serve(made(), sites, CLIENTS, patience=0.5)


def test_clients_come_late_and_leave(tmp_path: Path) -> None:
    sites, server, trained = transport(tmp_path), made(SCAFFOLD), []
    sites.sites = network(lambda: made(SCAFFOLD), blobs(**DATA).federation, tmp_path)
    sites.absent = {"node-1"}

    class Coming(LedgerCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int, cohort: list[int]) -> None:
            super().on_round_start(trainer, pl_module, round, cohort)
            sites.absent = {"node-1"} if round < 2 else {"node-2"} if round == 3 else set()

        def on_round_end(self, trainer: Any, pl_module: Any, messages: Any) -> None:
            super().on_round_end(trainer, pl_module, messages)
            trained.append([message.client for message in messages])

    with pytest.warns(UserWarning, match="client 1: it is absent"):
        serve(server, sites, CLIENTS, 5, least=2, callbacks=[Coming(folder=str(tmp_path))])
    # A round that had been trained ahead of a change of who is there is what it was.
    assert trained[0] == [0, 2]
    assert trained[-1] == [0, 1, 2]
    assert server.roster[1].samples == 9
    joined = (tmp_path / "ledger_joined.csv").read_text().splitlines()
    assert joined[0] == "client,samples,shape,told"
    assert joined[2].startswith("1,9,20,")


def test_nobody_joins_twice_nor_under_a_number_that_is_taken(tmp_path: Path) -> None:
    sites = transport(tmp_path)
    whole = blobs(**DATA).federation
    whole.inputs.data = whole.inputs.double()
    own = whole.part([1])
    sites.sites["stranger"] = Site(1, made().double(), own, PrivateStore(tmp_path / "x"))
    sites.sites["outside"] = Site(7, made().double(), own, PrivateStore(tmp_path / "y"))
    with pytest.warns(UserWarning, match="stranger was not let in: client 1 is there already"):
        serve(made(), sites, CLIENTS, rounds=1)


def test_another_configuration_is_refused_on_both_sides(tmp_path: Path, caplog: Any) -> None:
    sites = InProcess(network(lambda: made(lr=0.2), blobs(**DATA).federation, tmp_path))
    with (
        pytest.warns(UserWarning, match="approved the run"),
        pytest.raises(FederationError, match="clients that are needed"),
    ):
        serve(made(), sites, CLIENTS, patience=0.5)
    assert "The server did not let this site in: its operator approved the run" in caplog.text
    site = sites.sites["node-0"]
    request = seal({"kind": "work", "run": RemoteClients(made().double(), sites, 3).run.fingerprint, "jobs": []}, {})
    assert "operator approved the run" in unseal(site.answer(request)).header["refused"]


def test_other_data_is_refused(tmp_path: Path) -> None:
    sites = transport(tmp_path)
    other = blobs((19, 9, 16), shape=(4, 5)).federation
    sites.sites["node-2"] = Site(2, made().double(), other.part([2]), PrivateStore(tmp_path / "z"))
    with pytest.warns(UserWarning, match="its data differs from that of client 0: shape"):
        serve(made(), sites, CLIENTS, rounds=1, least=2)


def test_errors_at_a_site_say_no_more_than_their_kind(tmp_path: Path) -> None:
    site = transport(tmp_path).sites["node-0"]
    request = seal({"kind": "work", "run": site.run.fingerprint, "jobs": [{"kind": "steal"}]}, {})
    assert unseal(site.answer(request)).header["refused"] == "the site could not answer (KeyError); its log says why"
    assert "not a message" in unseal(site.answer(b"x")).header["refused"]


# ---- what leaves ---------------------------------------------------------------------------------------------


class Leaking(FedPer):
    """Sends its head, whatever it says."""

    def leave(self, state: Any, received: Any, me: Any) -> Any:
        reply = super().leave(state, received, me)
        return reply._replace(up={**reply.up, **reply.keep})


def test_no_private_entry_leaves_a_site(tmp_path: Path) -> None:
    sites = transport(tmp_path, Leaking)
    with pytest.raises(FederationError, match=r"would carry head\.bias, head\.weight, which Leaking says stays"):
        serve(made(Leaking), sites, CLIENTS)
    assert all("head.weight" not in part for _, _, reply in sites.sent for part in unseal(reply).parts.values())


def test_nothing_leaves_but_what_the_ledger_says(tmp_path: Path) -> None:
    sites, ledger = transport(tmp_path), LedgerCallback(folder=str(tmp_path))
    serve(made(), sites, CLIENTS, callbacks=[ledger])
    up = {"fc1.weight", "fc1.bias"}
    for _, request, reply in sites.sent:
        jobs = unseal(request).header.get("jobs", [])
        header, parts = unseal(reply)
        for place, job in enumerate(jobs):
            wanted = up if job["kind"] == "train" else {"loss", "total", "metric.acc"}
            assert set(parts[str(place)]) == wanted
            said = header["replies"][place].keys()
            assert said <= {"number", "samples", "loss", "counts", "sound", "version", "counters", "scored"}
    assert len(sites.sites["node-0"].introduction().parts["told"]) == 0


def test_noise_of_local_privacy_comes_from_the_site(tmp_path: Path) -> None:
    guard = [DifferentialPrivacyCallback(clip=0.5, noise_multiplier=1.0, where="local")]
    found = []
    for run in ("a", "b"):
        whole = blobs(**DATA).federation
        sites = InProcess(network(made, whole, tmp_path / run))
        for node in list(sites.sites):
            own = sites.sites[node]
            sites.sites[node] = Site(own.client, own.method, own.own.federation, own.store, guards=guard)
        server = made()
        serve(server, sites, CLIENTS, rounds=1, callbacks=[DifferentialPrivacyCallback(0.5, 1.0, "local")])
        found.append(server.state_dict()["net.fc1.weight"])
        assert server.trainer.callback_metrics["privacy/epsilon"] > 0
    assert not torch.equal(*found)
    with pytest.raises(FederationError, match="clients that are needed"):  # a site without the guard is another run
        serve(
            made(),
            transport(tmp_path / "c"),
            CLIENTS,
            callbacks=[DifferentialPrivacyCallback(0.5, 1.0, "local")],
            patience=0.3,
        )


def test_noise_from_the_seed_is_refused_at_a_site(tmp_path: Path) -> None:
    guard = DifferentialPrivacyCallback(where="local", reproducible_noise=True)
    with pytest.raises(FederationError, match="which the server knows"):
        Site(0, made().double(), blobs(**DATA).federation.part([0]), PrivateStore(tmp_path), guards=[guard])


def test_private_sgd_works_at_the_sites(tmp_path: Path) -> None:
    whole = blobs(**DATA).federation
    whole.inputs.data = whole.inputs.double()
    sites = {}
    for client in range(CLIENTS):
        guards = [PrivateSGDCallback(clip=0.1, noise_multiplier=0.0)]
        store = PrivateStore(tmp_path / str(client))
        sites[f"node-{client}"] = Site(client, made().double(), whole.part([client]), store, guards=guards)
    server = made()
    serve(server, InProcess(sites), CLIENTS, rounds=2, callbacks=[PrivateSGDCallback(clip=0.1, noise_multiplier=0.0)])
    expected = made()
    fit(expected, blobs(**DATA), 2, callbacks=[PrivateSGDCallback(clip=0.1, noise_multiplier=0.0)])
    assert same(server, expected)
    assert not same(server, simulated(rounds=2))


SERVER_SIDE = {
    "fairness": ("FedAvg", {}, [FairnessCallback()]),
    "dashboard": ("FedPer", {}, [Dashboard()]),
    "record": ("FedAvg", {}, [RunRecord()]),
    "central privacy": ("FedAvg", {}, [DifferentialPrivacyCallback(clip=1.0, noise_multiplier=0.5)]),
    "robust rule": ("FedAvg", {"aggregation": Median()}, []),
    "clusters": ("IFCA", {"clusters": 2}, [ClustersCallback()]),
    "agents": ("WAFFLEAvg", {"agent_of_interest": "all"}, [AgentWeightsCallback()]),
    "checkpoint": ("FedAvg", {}, [FederatedCheckpoint()]),
}


@pytest.mark.parametrize("name", SERVER_SIDE)
def test_callbacks_of_the_server_work_as_in_simulation(name: str, tmp_path: Path) -> None:
    kind, options, callbacks = SERVER_SIDE[name]
    method, found = getattr(methods, kind), []
    for place, run in enumerate(("simulated", "real")):
        logger, own = CSVLogger(tmp_path, run), copy.deepcopy(callbacks)
        more = {"logger": logger, "enable_checkpointing": name == "checkpoint"}
        server = made(method, **copy.deepcopy(options))
        torch.manual_seed(0)
        if place:
            sites = transport(tmp_path / "sites", method, **options)
            trainer = serve(server, sites, CLIENTS, 2, callbacks=own, **more)
        else:
            trainer = fit(server, blobs(**DATA), 2, callbacks=own, **more)
        metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith("time/")}
        files = sorted(path.name for path in Path(logger.log_dir).rglob("*") if path.suffix in (".csv", ".json", ".md"))
        found.append((metrics, files))
    assert found[0][0].keys() == found[1][0].keys()
    assert found[0][1] == found[1][1]
    if name != "central privacy":  # whose noise nobody can repeat
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-12, nan_ok=True)


def test_callbacks_that_look_at_clients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="MembershipInferenceCallback reads private state of clients"):
        serve(made(), transport(tmp_path), CLIENTS, callbacks=[MembershipInferenceCallback()])


def test_the_configuration_is_told_in_words(tmp_path: Path) -> None:
    site = transport(tmp_path).sites["node-0"]
    text = "\n".join(site.run.lines())
    assert "FedPer" in text
    assert "lr 0.1" in text
    assert site.run.fingerprint in text
    assert json.dumps(site.introduction().header)
    assert site.introduction().header["samples"] == {"train": 19, "val": 0, "test": 10}
