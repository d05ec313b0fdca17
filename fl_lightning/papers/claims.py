"""Claims of the papers, checked against recorded runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.papers import tables
from fl_lightning.papers.measure import Measured, measure
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import REDUCED, Cell

#: Fraction of the published gain required to call a claim reproduced.
SHARE = 0.5
VERDICTS = REPRODUCED, CHANGED, NOT, UNTESTED = (
    "reproduced",
    "only with a changed method",
    "not reproduced",
    "not tested at scale",
)


@dataclass(frozen=True)
class Claim:
    """A claim that one method outperforms others.

    Args:
        text: the claim.
        published: the lead in the paper.
        original: the lead of the paper's own algorithm in recorded runs; None if a run is missing.
        changed: the lead of our variant of it; None if there is no variant or a run is missing.
        local: the lead of training without federation; None if a run is missing.
        is_whole: whether all runs are at the paper's scale, or the paper does not state its scale.
    """

    text: str
    published: float
    original: float | None
    changed: float | None
    local: float | None
    is_whole: bool

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``.

        Example:
            >>> Claim("a", 10.0, 2.0, 6.0, None, True).verdict, Claim("a", 10.0, 5.0, None, None, True).verdict
            ('only with a changed method', 'reproduced')
        """
        if not self.is_whole or self.original is None:
            return UNTESTED
        if self.original >= SHARE * self.published:
            return REPRODUCED
        return CHANGED if self.changed is not None and self.changed >= SHARE * self.published else NOT


def judge(records: Records, plan: Mapping[str, Any]) -> Claim:
    """Compare the methods named in a claim of ``pages.yaml``."""
    cells = [cell for cell in tables.table(plan["of"]) if tables.fits(cell, plan["where"])]
    where = {key: value for key, value in plan["where"].items() if key not in (*tables.SCALES, "view")}
    printed = [cell for cell in tables.table(plan["of"]) if tables.fits(cell, where)]
    sign = -1.0 if plan.get("lower") else 1.0
    than = plan["than"] if isinstance(plan["than"], list) else [plan["than"]]
    base = _measured(records, cells, than)

    def ahead(method: str | None) -> float | None:
        found = _measured(records, cells, [method] if method else [])
        return None if found is None or base is None else sign * (_mean(found) - _mean(base))

    runs = [*(base or ()), *(_measured(records, cells, [plan["original"]]) or ())]
    return Claim(
        text=plan["claim"],
        published=sign * (_printed(printed, [plan["better"]]) - _printed(printed, than)),
        original=ahead(plan["original"]),
        changed=ahead(plan.get("changed")),
        local=ahead("local"),
        is_whole=all(one.coverage != REDUCED for one in runs),
    )


def _printed(cells: Sequence[Cell], methods: Sequence[str]) -> float:
    return statistics.fmean(cell["value"] for cell in cells if cell["method"] in methods and cell["value"] is not None)


def _measured(records: Records, cells: Sequence[Cell], methods: Sequence[str]) -> list[Measured] | None:
    """Return results of the methods' cells; None if there are none or one is missing."""
    found = [measure(records, cell) for cell in cells if cell["method"] in methods]
    known = [one for one in found if one is not None]
    return known if found and len(known) == len(found) else None


def _mean(found: Sequence[Measured]) -> float:
    return statistics.fmean(one.mean for one in found)
