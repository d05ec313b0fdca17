"""Server and clients apart: objects of their own, own data alone, messages as bytes, and the simulation's numbers.

The server is a stock ``Trainer.fit`` whose data is NaN. Every client has a method object of its own, made anew from the
same settings, no Trainer, and data in which everybody else's samples are NaN. What passes between them is written as
safetensors and read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.engine import make_engine
from fl_lightning.evaluation import Personal, Scorer, scored
from fl_lightning.exchange import Scores, train_clients
from fl_lightning.federation import ClientIndex, Federation, Split
from fl_lightning.module import FederatedModule
from fl_lightning.parties import JOINING, Introduction, LocalData, Me, Messages, Returned, Setting
from fl_lightning.snapshots import ClientSnapshot
from fl_lightning.wire import Message, State, is_finite
from tests.golden import cases
from tests.support import fit

#: Chooses its option by trials on everybody's data, which is for simulations: it refuses, as tested below.
SIMULATED_ONLY = ("FedBPS-auto",)


def passed(message: State) -> State:
    """A message as it arrives: names, shapes, types and bits, no tensor of the sender's."""
    return load(save({name: value.detach().contiguous() for name, value in message.items()}))


def alone(whole: Federation, client: int) -> Federation:
    """One client's data: a federation of one, in which all that is not its own is NaN."""
    own = torch.cat([whole.train[client], whole.test[client]])
    inputs = torch.full_like(whole.inputs, torch.nan)
    inputs[own] = whole.inputs[own]
    targets = torch.zeros_like(whole.targets)
    targets[own] = whole.targets[own]
    train, test = (ClientIndex.of([index[client]]) for index in (whole.train, whole.test))
    return replace(whole, inputs=inputs, targets=targets, train=train, test=test, meta={}, numbers=(client,))


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
    more = {"rounds": cases.ROUNDS} if case.method == "WAFFLEAvg" else {}  # not those until the restart
    whole = cases.data(case).federation
    whole = replace(whole, inputs=whole.inputs.double())
    sites = [
        Site(client, case.make(net, policy, "sequential", **more).double(), alone(whole, client))
        for client in range(len(cases.SIZES))
    ]
    server = None
    for rounds in [cases.ROUNDS] if restart is None else [restart, cases.ROUNDS]:
        resumed = server is not None
        server = case.make(net, policy, "sequential", **more)
        server.exchange = ApartClients(server, sites)
        trainer = fit(server, blinded(cases.data(case)), rounds, str(path) if resumed else None)
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


RUNS = [(case, *run) for case in cases.CASES if case.name not in SIMULATED_ONLY for run in case.runs()]


@pytest.mark.parametrize(("case", "net", "policy"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_apart(case: cases.Case, net: str, policy: str) -> None:
    expected = cases.parts(together := cases.run(case, net, policy, "sequential"))
    server, sites = apart(case, net, policy)
    assert_same(dict(server.state_dict()), expected["server"])
    assert_same(kept(sites), expected["private"])
    assert_same({"scores": server.evaluator.scores["test"]}, {"scores": expected["numbers"]["scores"]})
    assert server.bytes_up == together.bytes_up
    assert server.bytes_down == together.bytes_down


RESTARTED = ["FedAvg-adam", "SCAFFOLD", "WAFFLe", "APFL", "FedBPS", "FeSEM", "IFCA", "FedGroup", "FedMA-layerwise"]
RESTARTED += ["FedMA-grow", "WAFFLEAvg-all", "WeightErosion-all", "FedDAF"]


@pytest.mark.parametrize("name", RESTARTED)
def test_a_server_that_is_started_anew_goes_on(name: str, tmp_path: Path) -> None:
    case = next(case for case in cases.CASES if case.name == name)
    net, policy = next(iter(case.runs()))
    expected = cases.parts(cases.run(case, net, policy, "sequential"))
    server, sites = apart(case, net, policy, restart=2, path=tmp_path / "server.ckpt")
    assert_same(dict(server.state_dict()), expected["server"])
    assert_same(kept(sites), expected["private"])
    assert_same({"scores": server.evaluator.scores["test"]}, {"scores": expected["numbers"]["scores"]})


def test_trials_on_everybodys_data_are_refused() -> None:
    case = next(case for case in cases.CASES if case.name == "FedBPS-auto")
    with pytest.raises(Exception, match="p: auto tries values on simulated clients, which real ones are not: give p"):
        apart(case, "mlp", "average")
