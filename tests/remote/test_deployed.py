"""A real federation equals its simulation bit for bit; ``benchmarks/deployed.py`` runs all methods."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_lightning.callbacks import SecureAggregationCallback
from fl_lightning.remote.envelope import unseal
from tests.support import cases
from tests.support.federations import needs_flower
from tests.support.sites import InProcess, network, serve


@needs_flower
@pytest.mark.slow
def test_four_methods_over_flower(tmp_path: Path) -> None:
    from tests.support.deployed import Deployed

    with Deployed(tmp_path) as federation:
        for name in ("FedAvg", "FedPer", "SCAFFOLD", "WAFFLe"):
            case = next(case for case in cases.CASES if case.name == name)
            net, policy = list(case.runs())[-1]
            server = federation.run(case, net, policy)
            assert federation.same(server, case, net, policy) == {"weights": True, "private": True, "scores": True}


def is_masked(request: bytes, round: int) -> bool:
    """Whether a request is for a client's values of a round under masks."""
    header = unseal(request).header
    return header.get("stage") == "masked" and header["job"]["setting"][0] == round


@needs_flower
@pytest.mark.slow
def test_secure_aggregation_over_flower_with_a_supernode_that_is_killed(tmp_path: Path) -> None:
    from tests.support.deployed import Deployed

    case = next(case for case in cases.CASES if case.name == "SCAFFOLD")
    every = replace(case, fraction=1.0)
    with Deployed(tmp_path) as federation:
        server = federation.run(case, "norm", "average", [SecureAggregationCallback()])
        same = federation.same(server, case, "norm", "average", [SecureAggregationCallback()])
        assert same == {"weights": True, "private": True, "scores": True}

        node, killed = federation.nodes[3], []
        answer = node.worker._answer

        def dies(request: bytes) -> bytes:
            reply = answer(request)
            if is_masked(request, 1) and not killed:
                killed.append(node.node.child.pid)
                os.kill(killed[0], signal.SIGKILL)
            return reply

        node.worker._answer = dies
        with pytest.warns(UserWarning, match="Round 1: went on without client 3"):
            server = federation.run(
                every, "norm", "average", [SecureAggregationCallback()], rounds=2, least=4, patience=60.0
            )
        assert killed

    def lost(at: str, request: bytes, reply: bytes) -> bytes | str:
        return "it was killed" if at == "node-3" and is_masked(request, 1) else reply

    def make() -> object:
        return every.make("norm", "average", "sequential")

    torch.manual_seed(0)
    sites = network(make, cases.data(every).federation, tmp_path / "own", guards=[SecureAggregationCallback()])
    expected = make()
    callbacks = [SecureAggregationCallback()]
    with pytest.warns(UserWarning, match="Round 1: went on without client 3"):
        serve(expected, InProcess(sites, lost), len(cases.SIZES), rounds=2, least=4, callbacks=callbacks)
    for name, value in expected.state_dict().items():
        assert torch.equal(server.state_dict()[name], value), name
