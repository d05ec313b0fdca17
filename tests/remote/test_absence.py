"""Every method with clients that join late, are absent for a round, or never come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_lightning.callbacks import FederatedCallback
from fl_lightning.errors import FederationError
from tests.support import cases
from tests.support.sites import case_network, serve

#: What needs all clients before it begins, and says so.
NEED_ALL = {"FedCluster-dominant": "dominant"}
CASES = [case for case in cases.CASES if case.name != "FedBPS-auto"]


class Coming(FederatedCallback):
    """Client 2 joins in round 1, in which client 0 is absent; client 4 never comes."""

    def __init__(self, sites: Any) -> None:
        self.sites = sites
        sites.absent = {"node-2", "node-4"}

    def on_round_start(self, trainer: Any, pl_module: Any, round: int, cohort: list[int]) -> None:
        self.sites.absent = {"node-4", *({"node-0"} if round == 1 else ())} if round else self.sites.absent


@pytest.mark.filterwarnings("ignore:Round .* went on without")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_goes_on_without_some(case: cases.Case, tmp_path: Path) -> None:
    net, policy = next(iter(case.runs()))
    sites = case_network(case, net, policy, tmp_path)
    server = case.make(net, policy, "sequential")
    if case.name in NEED_ALL:
        with pytest.raises(FederationError, match=NEED_ALL[case.name]):
            serve(server, sites, len(cases.SIZES), fraction=1.0, least=1, callbacks=[Coming(sites)])
        return
    serve(server, sites, len(cases.SIZES), fraction=1.0, least=1, callbacks=[Coming(sites)])
    assert all(value.isfinite().all() for value in server.state_dict().values())
    scores = server.evaluator.scores["test"]
    assert scores[:4].isfinite().all()
    assert scores[4].isnan()
