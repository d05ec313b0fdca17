"""Tables of the pages: published and measured values, arranged by ``pages.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fl_lightning.papers import tables
from fl_lightning.papers.measure import Measured, measure
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import Cell

Place = tuple[Any, ...]
#: Units of metrics whose deviations are checked.
POINTS = ("percent", "percentage_points")
#: Deviation, in points, above which a cell has a footnote.
TOLERANCE = 2.0


@dataclass(frozen=True)
class Shown:
    """One place in a table.

    Args:
        cell: the measured cell.
        published: the published cells it is compared with; the first one is printed. Empty for rows of our own.
        measured: the result of its runs; None if there are none.
    """

    cell: Cell
    published: tuple[Cell, ...]
    measured: Measured | None

    @property
    def value(self) -> float | None:
        """The published value."""
        return self.published[0]["value"] if self.published else None

    @property
    def std(self) -> float | None:
        """The published standard deviation, of the first cell that has one."""
        return next((cell["std"] for cell in self.published if cell["std"] is not None), None)

    @property
    def deviation(self) -> float | None:
        """Measured minus published."""
        return None if self.measured is None or self.value is None else self.measured.mean - self.value

    @property
    def deviates(self) -> bool:
        """Whether the deviation needs an explanation."""
        if self.deviation is None:
            return False
        unit = self.published[0]["unit"]
        return abs(self.deviation) > TOLERANCE if unit in POINTS else unit == "count" and self.deviation != 0


class Layout:
    """A table on a page.

    Args:
        records: the records of all runs.
        plan: the table's entry in ``pages.yaml``.
        is_ours: whether the page shows tables of our own, without published values.
    """

    def __init__(self, records: Records, plan: Mapping[str, Any], is_ours: bool = False) -> None:
        self.records = records
        self.plan = plan
        self.is_ours = is_ours

    @cached_property
    def places(self) -> dict[Place, dict[Place, Shown]]:
        """Displayed cells by row and column."""
        found: dict[Place, dict[Place, Shown]] = {}
        for cell in self._cells():
            row = tuple(cell.get(key) for key in self.plan["rows"])
            column = tuple(cell.get(key) for key in self.plan["columns"])
            if column not in found.get(row, {}):
                shown = Shown(cell, self._published(cell), measure(self.records, cell))
                if shown.published or shown.measured:
                    found.setdefault(row, {})[column] = shown
        return {row: found[row] for row in sorted(found, key=self._order)}

    @cached_property
    def absent(self) -> list[Cell]:
        """Cells of the table without a run, published or not; the first cell for each missing run."""
        found = {tables.config_hash(tables.config_of(cell)): cell for cell in reversed(list(self._cells()))}
        return [cell for cell in reversed(found.values()) if not self.records.seeds(tables.config_of(cell))]

    @cached_property
    def columns(self) -> list[Place]:
        """Columns in the order of the cells."""
        wanted = [tuple(cell.get(key) for key in self.plan["columns"]) for cell in self._cells()]
        there = {column for row in self.places.values() for column in row}
        return [column for column in dict.fromkeys(wanted) if column in there]

    @property
    def is_hidden(self) -> bool:
        """Whether the table is listed but not shown, because none of its larger runs was made."""
        return bool(self.plan.get("larger")) and all(one.measured is None for one in self.shown)

    @property
    def shown(self) -> Iterator[Shown]:
        """Every place."""
        for row in self.places.values():
            yield from row.values()

    def local(self, shown: Shown) -> Measured | None:
        """Return the result of Local on the same data, from this table or the row taken from another one."""
        like = ("dataset", "partition", "model", "metric", "E", "agents")
        same = (o for o in self.shown if all(o.cell.get(key) == shown.cell.get(key) for key in like))
        own = next((other.measured for other in same if other.cell["method"] == "local"), None)
        lent = self.beneath()
        return own if lent is None else lent[1]

    def beneath(self) -> tuple[Cell, Measured] | None:
        """The row taken from another table."""
        plan = self.plan.get("beneath")
        if plan is None:
            return None
        cell = next(cell for cell in tables.table(plan["of"]) if tables.fits(cell, plan["where"]))
        measured = measure(self.records, cell)
        return None if measured is None else (cell, measured)

    def _cells(self) -> Iterator[Cell]:
        for name in self.plan["of"]:
            for cell in tables.table(name):
                absent = not any(key in cell for key in self.plan.get("without", ()))
                if absent and tables.fits(cell, self.plan.get("where", {})) and self._asked(cell):
                    yield cell

    def _asked(self, cell: Cell) -> bool:
        """Whether a cell has the metric measured here, if it differs from the published one."""
        return bool(cell["metric"] == self.plan.get("metric", cell["metric"]))

    def _order(self, row: Place) -> int:
        order = self.plan.get("order", [])
        return order.index(row[0]) if row[0] in order else len(order)

    def _published(self, cell: Cell) -> tuple[Cell, ...]:
        if self.is_ours or cell["method"] in self.plan.get("unpublished", ()):
            return ()
        papers = {tables.table_name(one) for one in tables.published()} & set(self.plan["of"])
        asked = _published_as(cell, self.plan.get("published_metric", cell["metric"]))
        return tuple(one for name in self.plan["of"] if name in papers for one in _printed(name) if _alike(one, asked))


def _published_as(cell: Cell, metric: str) -> Cell:
    """Return the cell as named in the paper."""
    stand_for: dict[str, str] = tables.pages()["stand_for"]
    asked = {**tables.identity(cell), "method": stand_for.get(cell["method"], cell["method"]), "metric": metric}
    return {key: value for key, value in asked.items() if key not in ("paper", "table", *tables.SCALES)}


def _printed(name: str) -> list[Cell]:
    return [cell for cell in tables.published() if tables.table_name(cell) == name]


def _alike(one: Cell, asked: Cell) -> bool:
    return {key: value for key, value in tables.identity(one).items() if key not in ("paper", "table")} == asked
