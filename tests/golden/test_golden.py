"""Every method and variant gives the numbers that were recorded: bit for bit on a known processor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden import record
from tests.support import cases

GOLDEN: dict[str, Any] = json.loads(record.PATH.read_text())


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_golden(case: cases.Case) -> None:
    bits = GOLDEN["bits"].get(cases.platform())
    for run, entry in record.entries(case).items():
        wanted = GOLDEN["sums"][run]
        assert entry["sums"].keys() == wanted.keys()
        wrong = [part for part in wanted if not cases.same(entry["sums"][part], wanted[part])]
        assert not wrong, f"{run}: {wrong} changed"
        if bits is not None:
            assert entry["bits"] == bits[run], f"{run}: changed in the last bits"


def test_every_method_is_recorded() -> None:
    from fl_lightning import methods

    assert {case.method for case in cases.CASES} == set(methods.__all__)
