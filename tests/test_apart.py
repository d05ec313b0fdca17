"""Server and clients apart: objects of their own, own data alone, messages as bytes, and the simulation's numbers.

The server is a stock ``Trainer.fit`` without a sample. Every client is a :class:`Site`: a method object of its own,
made anew from the same settings, no Trainer, its own samples and nobody else's, and a folder for what it keeps. What
passes between them is bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden import cases
from tests.remote.sites import InProcess, case_network, kept, made, serve

#: Chooses its option by trials on everybody's data, which is for simulations: it refuses, as tested below.
SIMULATED_ONLY = ("FedBPS-auto",)


def apart(case: cases.Case, net: str, policy: str, folder: Path, restart: int | None = None) -> tuple[Any, InProcess]:
    """The case's run with server and clients apart; the server may be made anew after some rounds."""
    sites, path = case_network(case, net, policy, folder), folder / "server.ckpt"
    for rounds in [cases.ROUNDS] if restart is None else [restart, cases.ROUNDS]:
        server = made(case, net, policy)
        torch.manual_seed(0)
        trainer = serve(server, sites, len(cases.SIZES), rounds, case.fraction, str(path) if path.exists() else None)
        if restart is not None:
            trainer.save_checkpoint(path)
    return server, sites


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name].nan_to_num(9e9), right[name].nan_to_num(9e9))]
    assert not different


def assert_as_simulated(server: Any, sites: InProcess, case: cases.Case, net: str, policy: str) -> Any:
    expected = cases.parts(together := cases.run(case, net, policy, "sequential"))
    assert_same(dict(server.state_dict()), expected["server"])
    assert_same(kept(sites, server), expected["private"])
    assert_same({"scores": server.evaluator.scores["test"]}, {"scores": expected["numbers"]["scores"]})
    return together


RUNS = [(case, *run) for case in cases.CASES if case.name not in SIMULATED_ONLY for run in case.runs()]


@pytest.mark.parametrize(("case", "net", "policy"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_apart(case: cases.Case, net: str, policy: str, tmp_path: Path) -> None:
    server, sites = apart(case, net, policy, tmp_path)
    together = assert_as_simulated(server, sites, case, net, policy)
    assert server.bytes_up == together.bytes_up
    assert server.bytes_down == together.bytes_down
    assert all(site.method._trainer is None for site in sites.sites.values())


RESTARTED = ["FedAvg-adam", "SCAFFOLD", "WAFFLe", "APFL", "FedBPS", "FeSEM", "IFCA", "FedGroup", "FedMA-layerwise"]
RESTARTED += ["FedMA-grow", "WAFFLEAvg-all", "WeightErosion-all", "FedDAF"]


@pytest.mark.parametrize("name", RESTARTED)
def test_a_server_that_is_started_anew_goes_on(name: str, tmp_path: Path) -> None:
    case = next(case for case in cases.CASES if case.name == name)
    net, policy = next(iter(case.runs()))
    server, sites = apart(case, net, policy, tmp_path, restart=2)
    assert_as_simulated(server, sites, case, net, policy)


def test_trials_on_everybodys_data_are_refused(tmp_path: Path) -> None:
    case = next(case for case in cases.CASES if case.name == "FedBPS-auto")
    with pytest.raises(Exception, match="p: auto tries values on simulated clients, which real ones are not: give p"):
        apart(case, "mlp", "average", tmp_path)
