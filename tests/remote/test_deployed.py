"""A real federation equals its simulation bit for bit; ``benchmarks/deployed.py`` runs all methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import cases
from tests.support.federations import needs_flower


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
