"""Server and clients apart: objects of their own, own data alone, messages as bytes, and the simulation's numbers.

The server is a stock ``Trainer.fit`` whose data is NaN. Every client has a method object of its own, made anew from the
same settings, no Trainer, and data in which everybody else's samples are NaN. What passes between them is written as
safetensors and read again.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load, save
from torch import Tensor, nn

from fl_lightning.engine import make_engine
from fl_lightning.errors import FederationError
from fl_lightning.evaluation import Personal, Scorer, scored
from fl_lightning.exchange import Scores, train_clients
from fl_lightning.federation import ClientIndex, Federation, Split
from fl_lightning.local_optim import Adam, RMSprop
from fl_lightning.module import FederatedModule
from fl_lightning.parties import JOINING, Introduction, LocalData, Me, Messages, Returned, Setting
from fl_lightning.robust import Median
from fl_lightning.schedules import Cosine
from fl_lightning.snapshots import ClientSnapshot
from fl_lightning.wire import Message, State, is_finite
from tests.golden import cases
from tests.support import fit, untimed

#: Chooses its option by trials on everybody's data, which is for simulations: it refuses, as tested below.
SIMULATED_ONLY = ("FedBPS-auto",)


def passed(message: State) -> State:
    """A message as it arrives: names, shapes, types and bits, no tensor of the sender's."""
    return load(save({name: value.detach().contiguous() for name, value in message.items()}))


def alone(whole: Federation, client: int) -> Federation:
    """One client's data: a federation of one, in which all that is not its own is NaN."""
    own = torch.cat([index[client] for index in (whole.train, whole.test, whole.index("val"))])
    inputs = torch.full_like(whole.inputs, torch.nan)
    inputs[own] = whole.inputs[own]
    targets = torch.zeros_like(whole.targets)
    targets[own] = whole.targets[own]
    train, test, val = (ClientIndex.of([whole.index(split)[client]]) for split in ("train", "test", "val"))
    maps = None if whole.label_maps is None else whole.label_maps[client : client + 1]
    rest = {"val": None if whole.val is None else val, "label_maps": maps, "meta": {}, "numbers": (client,)}
    return replace(whole, inputs=inputs, targets=targets, train=train, test=test, **rest)


class Site:
    """One client: a method object, its own data, and what it keeps, by the number of the training."""

    def __init__(self, client: int, method: FederatedModule, federation: Federation) -> None:
        self.client, self.method, self.data = client, method, LocalData(federation, 0)
        self.kept: dict[int, ClientSnapshot] = {}
        self.pending: dict[int, ClientSnapshot] = {}
        assert method._trainer is None

    def me(self, number: int, setting: Setting) -> Me:
        kept = self.kept.get(number, self.kept.get(self.client, ClientSnapshot()))
        rest = (setting.round, setting.rounds, setting.stage, setting.clients, self.method.seed, kept.private)
        return Me(self.client, number, *rest, self.data)

    def train(self, number: int, setting: Setting, message: State) -> Returned:
        me = self.me(number, setting)
        (one,) = train_clients(self.method, make_engine("sequential"), {number: message}, [me])
        if one.keep is not None:
            before = self.kept.get(number, ClientSnapshot())
            self.pending[number] = before.after(one.keep, setting.round, one.steps)
        reply = Message(number, passed(one.up), len(self.data), one.loss)
        return Returned(reply, one.keep is not None, one.keep is None or is_finite(one.keep))

    def settled(self, number: int, setting: Setting, message: State) -> Me:
        me = self.me(number, setting)
        (more,) = self.method.settle([message], [me])
        return replace(me, private={**me.private, **more})

    def evaluate(self, number: int, setting: Setting, message: State, split: Split) -> Scores:
        state = self.method.personal(message, self.settled(number, setting, message))
        outputs = Scorer().outputs(self.method, self.data.source, [Personal(0, state, False)], split)
        return scored(outputs, torch.device("cpu"), self.method.task)


class ApartClients:
    """The ``Clients`` of sites that share nothing with the server but bytes."""

    simulated = False

    def __init__(self, server: FederatedModule, sites: Sequence[Site]) -> None:
        self.server, self.sites = server, sites

    def introduce(self) -> list[Introduction]:
        found = []
        for site in self.sites:
            setting = Setting(stage=JOINING, clients=len(self.sites))
            told = passed(site.method.introduce(site.me(site.client, setting)))
            found.append(Introduction(len(site.data), tuple(site.data.source.inputs.shape[1:]), None, told))
        return found

    def train(self, setting: Setting, messages: Messages, max_steps: int | None = None) -> Iterator[Returned]:
        for number, message in messages.items():
            yield self.sites[self.server.client_of(number)].train(number, setting, passed(message))

    def gather(self, returned: list[Returned]) -> list[Returned]:
        return sorted(returned, key=lambda one: one.message.client)

    def commit(self, numbers: Iterable[int], round: int) -> None:
        for number in numbers:
            site = self.sites[self.server.client_of(number)]
            if number in site.pending:
                site.kept[number] = site.pending.pop(number)
        for site in self.sites:
            site.pending = {}

    def reset(self) -> None:
        pass

    def evaluate(self, setting: Setting, messages: Messages, split: Split) -> Scores:
        found = []
        for client, message in messages.items():
            number = self.server.evaluated_as(client)
            score = self.sites[client].evaluate(number, setting, passed(message), split)
            found.append(score._replace(clients=torch.tensor([client])))
        return Scores.joined(found)

    def tell(self, setting: Setting, messages: Messages) -> Mapping[int, State]:
        told = {}
        for client, message in messages.items():
            site, received = self.sites[client], passed(message)
            me = site.settled(self.server.evaluated_as(client), setting, received)
            told[client] = passed(site.method.tell(received, me))
        return told


class StopAfter(Callback):
    """Stops a fit after some rounds; the run is as long as its Trainer says all the same."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.rounds


def blinded(data: Any) -> Any:
    """The server's data: shapes and numbers of clients, NaN for everything else."""
    federation = data.federation
    inputs, targets = torch.full_like(federation.inputs, torch.nan), torch.zeros_like(federation.targets)
    data.federation = replace(federation, inputs=inputs, targets=targets)
    return data


def apart(
    case: cases.Case, net: str, policy: str, restart: int | None = None, path: Path | None = None
) -> tuple[Any, list[Site]]:
    """The case's run with server and clients apart; the server may be made anew after some rounds, from ``path``."""
    whole = cases.data(case).federation
    sites = [
        Site(client, case.make(net, policy, "sequential").double(), alone(whole, client))
        for client in range(len(cases.SIZES))
    ]
    server = None
    for last in [cases.ROUNDS] if restart is None else [restart, cases.ROUNDS]:
        resumed = server is not None
        server = case.make(net, policy, "sequential")
        server.exchange = ApartClients(server, sites)
        stop = [StopAfter(last)]
        trainer = fit(server, blinded(cases.data(case)), cases.ROUNDS, str(path) if resumed else None, callbacks=stop)
        if path is not None:
            trainer.save_checkpoint(path)
    return server, sites


def kept(sites: Sequence[Site]) -> dict[str, Tensor]:
    """All that the sites keep, by number and name."""
    found: dict[str, Tensor] = {}
    for site in sites:
        for number, shot in site.kept.items():
            found |= {f"{number}.{name}": value for name, value in shot.private.items()}
            found[f"{number}.counters"] = torch.tensor([shot.rounds, shot.steps, shot.last_round])
    return found


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name].nan_to_num(9e9), right[name].nan_to_num(9e9))]
    assert not different


def noisy(inputs: Tensor, rng: np.random.Generator) -> Tensor:
    """An augmentation: every batch has noise of its client's own."""
    return inputs + 0.1 * torch.from_numpy(rng.standard_normal(tuple(inputs.shape))).to(inputs)


def frozen() -> nn.Module:
    """A perceptron whose first layer is not trained."""
    net = cases.mlp()
    net.fc1.requires_grad_(False)
    return net


def dropping() -> nn.Module:
    """A perceptron with dropout, whose noise is the client's own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(cases.FEATURES, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, cases.CLASSES)]
        return nn.Sequential(OrderedDict(zip(("fc1", "relu", "drop", "fc2"), layers, strict=True)))


NETS = {"frozen": frozen, "dropout": dropping}
CYCLED = {"label_maps": torch.stack([(torch.arange(cases.CLASSES) + shift) % cases.CLASSES for shift in range(5)])}
HELD_OUT, AUGMENTED = {"val_fraction": 0.25}, {"transform": noisy, "augment": True}
CACHED = {**cases.L1, "omega": 0.1, "never_sampled": "adapt", "dictionary": "cached"}
FEATURES = {"warmup": 1, "fit_steps": 20, "feature_stats": True, "basis": "refitted", "adaptive": False}
#: What a client may further have of its own, and options that no golden number is recorded of.
MORE = [
    cases.Case("optimizer-kept", "FedAvg", {"optimizer": Adam(), "keep_optimizer": True, "lr": 0.01}, ("norm",)),
    cases.Case("momentum-kept", "FedPer", {"momentum": 0.5, "keep_optimizer": True}, ("mlp",)),
    cases.Case("optimizer", "FedProx", {"mu": 0.5, "optimizer": RMSprop(), "lr": 0.01}, ("mlp",)),
    *(
        cases.Case(f"schedule-by-{unit}", "FedAvg", {"lr_schedule": Cosine(), "lr_schedule_by": unit}, ("mlp",))
        for unit in ("round", "epoch", "step")
    ),
    cases.Case("SCAFFOLD-schedule", "SCAFFOLD", {"lr_schedule": Cosine()}, ("mlp",)),
    cases.Case("frozen", "FedAvg", nets=("frozen",)),
    cases.Case("frozen-APFL", "APFL", nets=("frozen",)),
    cases.Case("dropout", "FedAvg", nets=("dropout",)),
    cases.Case("dropout-WAFFLe", "WAFFLe", cases.FACTORS, ("dropout",)),
    cases.Case("augmented", "FedPer", nets=("mlp",), data=AUGMENTED),
    cases.Case("held-out", "FedAvg", nets=("norm",), policies=cases.ALL, data=HELD_OUT),
    *(
        cases.Case(f"held-out-{name}", name, options, ("mlp",), data=HELD_OUT)
        for name, options in {"IFCA": {"clusters": 2}, "FedBPS": {"p": 0.3}, "WAFFLe": cases.FACTORS}.items()
    ),
    cases.Case("relabelled", "FedCluster", {"clusters": 2, "groups": "dominant"}, ("mlp",), data=CYCLED),
    cases.Case("relabelled-IFCA", "IFCA", {"clusters": 2}, ("mlp",), data=CYCLED),
    cases.Case("median", "SCAFFOLD", {"aggregation": Median()}, ("mlp",)),
    cases.Case("LGFedAvg-shared", "LGFedAvg", {"shared": ["fc1"]}, ("mlp",)),
    cases.Case("FedDAF-refitted", "FedDAF", FEATURES, ("norm",)),
    cases.Case("WAFFLEAvg-available", "WAFFLEAvg", {"before_first": "available"}, ("mlp",)),
    cases.Case("WAFFLeL1-cached", "WAFFLeL1", CACHED, ("mlp",)),
]
ALL = [case for case in (*cases.CASES, *MORE) if case.name not in SIMULATED_ONLY]
RUNS = [(case, *run) for case in ALL for run in case.runs()]


@functools.cache
def together(name: str, net: str, policy: str) -> tuple[FederatedModule, dict[str, dict[str, Tensor]]]:
    """The case's run under one Trainer, and what it came to."""
    case = next(case for case in ALL if case.name == name)
    method = cases.run(case, net, policy, "sequential")
    return method, cases.parts(method)


def assert_equal(server: FederatedModule, sites: Sequence[Site], run: tuple[cases.Case, str, str]) -> None:
    """Weights, what clients keep and what they score are those of the run under one Trainer."""
    case, net, policy = run
    method, expected = together(case.name, net, policy)
    assert_same(dict(server.state_dict()), expected["server"])
    assert_same(kept(sites), expected["private"])
    assert_same(server.evaluator.scores, method.evaluator.scores)
    assert untimed(server.summary) == pytest.approx(untimed(method.summary), rel=0, abs=0, nan_ok=True)
    assert (server.bytes_up, server.bytes_down) == (method.bytes_up, method.bytes_down)


@pytest.fixture(autouse=True)
def nets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in NETS.items():
        monkeypatch.setitem(cases.NETS, name, make)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0].name}-{run[1]}-{run[2]}")
def test_apart(run: tuple[cases.Case, str, str]) -> None:
    assert_equal(*apart(*run), run)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_server_that_is_started_anew_goes_on(case: cases.Case, tmp_path: Path) -> None:
    run = (case, *next(iter(case.runs())))
    assert_equal(*apart(*run, restart=2, path=tmp_path / "server.ckpt"), run)


def test_runs_have_clients_that_never_train() -> None:
    """Which are evaluated all the same; but for those in which all clients take part."""
    for case in cases.CASES[:4]:
        method, _ = together(case.name, "mlp", "average")
        trained = {client for client in method.snapshots if method.snapshots[client].rounds}
        assert 0 < len(trained) < len(cases.SIZES)
        assert method.evaluator.scores["test"].isfinite().all()


def test_trials_on_everybodys_data_are_refused() -> None:
    case = next(case for case in cases.CASES if case.name == "FedBPS-auto")
    with pytest.raises(
        FederationError, match="p: auto tries values on simulated clients, which real ones are not: give p"
    ):
        apart(case, "mlp", "average")
