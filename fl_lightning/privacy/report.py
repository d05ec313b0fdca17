"""Reports of attacks, with their threat models."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.privacy.views import VIEWS
from fl_lightning.sheet import cell, markdown

#: One attack on one client: its keys (view, assumption, variant, client, group) and scores.
Row = dict[str, Any]
#: The view of baselines, which need no model or message.
BASELINE = "baseline"
#: Keys of a row that are not scores.
KEYS = ("view", "assumption", "variant", "client", "group")
#: Keys that identify an attack.
HOW = ("view", "assumption", "variant")


@dataclass
class Report:
    """All rows of an attack after a round.

    Args:
        attack: name of the attack.
        method: name of the attacked method.
        round: number of completed rounds.
        rows: one row per client and attack.
        by: score that measures the strength of an attack; higher is stronger.
        notes: additional notes.
        pick: score by which an attacker, who does not know ``by``, selects an attack; None means ``by``.

    Attributes:
        baselines: rows of baselines, removed from ``rows``.
    """

    attack: str
    method: str
    round: int
    rows: list[Row]
    by: str
    notes: dict[str, Any] = field(default_factory=dict)
    pick: str | None = None
    baselines: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.baselines = [row for row in self.rows if row["view"] == BASELINE]
        self.rows = [row for row in self.rows if row["view"] != BASELINE]

    def floors(self) -> dict[str, dict[str, float]]:
        """Return the mean over clients of every score of each baseline."""
        names = dict.fromkeys(row["variant"] for row in self.baselines)
        return {name: self.mean([row for row in self.baselines if row["variant"] == name]) for name in names}

    def floor(self) -> dict[str, float]:
        """Return the mean over clients of each baseline's main score."""
        return {name: scores[self.by] for name, scores in self.floors().items()}

    def verdicts(self) -> list[str]:
        """Return a sentence for every view whose strongest attack is no better than the best baseline."""
        floor = {name: value for name, value in self.floor().items() if not math.isnan(value)}
        if not floor:
            return []
        name, value = max(floor.items(), key=lambda one: one[1])
        best = {view: self.strongest(view=view) for view in self.views()}
        return [
            f"No attack of **{view}** is better than the baseline `{name}` ({self.by} {value:.2f}): it shows nothing."
            for view, one in best.items()
            if one is not None and not one[self.by] > value
        ]

    def select(self, **conditions: Any) -> list[Row]:
        """Return rows whose keys have the given values."""
        return [row for row in self.rows if all(row[key] == value for key, value in conditions.items())]

    def mean(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the mean over rows of every score, without NaN."""
        names = [name for name in rows[0] if name not in KEYS] if rows else []
        return {name: _mean([row[name] for row in rows]) for name in names}

    def ways(self) -> list[dict[str, str]]:
        """Return the distinct attacks."""
        return [dict(zip(HOW, way, strict=True)) for way in dict.fromkeys(tuple(r[k] for k in HOW) for r in self.rows)]

    def strongest(self, **conditions: Any) -> dict[str, Any] | None:
        """Return the strongest matching attack with its mean scores over clients; None if there is none."""
        ways = [w for w in self.ways() if all(w[key] == value for key, value in conditions.items())]
        found: list[dict[str, Any]] = [{**way, **self.mean(self.select(**way))} for way in ways]
        return max(found, key=lambda one: _sortable(one[self.pick or self.by]), default=None)

    def best(self, ways: Sequence[dict[str, str]]) -> dict[str, float]:
        """Return the highest mean over clients of every score among these attacks.

        With ``pick``, return the mean scores of the selected attack instead.
        """
        means = [self.mean(self.select(**way)) for way in ways]
        if self.pick is not None:
            pick = self.pick
            return max(means, key=lambda one: _sortable(one[pick]), default={})
        return {name: max((one[name] for one in means), key=_sortable) for name in (means[0] if means else ())}

    def views(self) -> list[str]:
        """Return the views with rows, in order."""
        return list(dict.fromkeys(row["view"] for row in self.rows))

    def scalars(self) -> dict[str, float]:
        """Return metrics to log: the strongest attack of every view, ``<attack>/<view>/<score>``."""
        logged: dict[str, float] = {}
        for view in self.views():
            best = self.strongest(view=view)
            assert best is not None
            logged |= {f"{self.attack}/{view}/{k}": v for k, v in best.items() if k not in HOW and not math.isnan(v)}
        return logged

    def markdown(self) -> str:
        """Format the report in Markdown: threat models, means over clients of every attack, and groups' means."""
        lines = [f"# {self.attack} on {self.method} after {self.round} rounds", ""]
        lines += [f"- **{view}** sees {VIEWS[view].sees}." for view in self.views()]
        lines += [f"- {name}: {value}" for name, value in self.notes.items()]
        lines += [f"- {sentence}" for sentence in self.verdicts()]
        table = [{**way, **self.mean(self.select(**way))} for way in self.ways()]
        for row in table:
            best = self.strongest(view=row["view"])
            row["strongest"] = "yes" if best is not None and all(best[k] == row[k] for k in HOW) else ""
        for name, known in self.floors().items():
            table.append({"view": BASELINE, "assumption": "", "variant": name, **known, "strongest": ""})
        lines += ["", *_table(table)]
        groups = sorted({row["group"] for row in self.rows if row["group"]})
        if len(groups) > 1:
            rows = []
            for view in self.views():
                best = self.strongest(view=view)
                assert best is not None
                way = {key: best[key] for key in HOW}
                rows += [{"group": g, **way, **self.mean(self.select(**way, group=g))} for g in groups]
            lines += ["", "Strongest attack of every view, by group of clients:", "", *_table(rows)]
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """Format the report as JSON, with one row per client and attack."""
        plain = {k: getattr(self, k) for k in ("attack", "method", "round", "by", "notes")}
        threat = {view: VIEWS[view].sees for view in self.views()}
        return json.dumps({**plain, "threat_models": threat, "rows": self.rows, "baselines": self.baselines}, indent=1)


def _table(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["Nothing crossed the wire that could be attacked."]
    left = sum(name in ("group", *KEYS) for name in rows[0])
    cells = ([cell(v) if v != v or not isinstance(v, float) else f"{v:.4f}" for v in row.values()] for row in rows)
    return markdown(list(rows[0]), cells, left).splitlines()


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else float("nan")


def _sortable(value: float) -> float:
    return -math.inf if math.isnan(value) else value
