"""Mean and standard deviation over recorded runs for a cell of a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.papers import tables
from fl_lightning.papers.records import Records, Result
from fl_lightning.papers.tables import Cell, Config

#: A metric is unstable if its standard deviation over the last rounds of a run exceeds this many points.
SWING = 1.0
#: Number of last rounds for this check.
LAST = 5


@dataclass(frozen=True)
class Measured:
    """Result of a cell's recorded runs.

    Args:
        values: the metric of every seed.
        seeds: the seeds.
        rounds: number of rounds of a run.
        scale: how the runs are smaller than in the paper, or ``full``.
        coverage: one of ``tables.COVERAGE``.
        seconds: duration of every run.
        run: name of the configuration.
        last: mean over seeds and last rounds, if the metric is of the last round and unstable.
    """

    values: tuple[float, ...]
    seeds: tuple[int, ...]
    rounds: int
    scale: str
    coverage: str
    seconds: tuple[float, ...]
    run: str
    last: float | None = None

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def measure(
    records: Records, cell: Cell, seeds: Sequence[int] | None = None, rounds: int | None = None
) -> Measured | None:
    """Return the result of a cell's recorded runs, with the given seeds or all; None if there are none."""
    config, other = tables.config_of(cell, rounds), tables.beside(cell)
    found = {seed: value for seed in _seeds(records, config, seeds) if (value := _value(records, cell, config, seed))}
    if other is not None:
        base = tables.config_of(other, rounds)
        less = {seed: _value(records, other, base, seed) for seed in found}
        found = {seed: (value[0] - less[seed][0], value[1]) for seed, value in found.items() if less[seed]}  # type: ignore[index]
    if not found:
        return None
    run, whole = config["trainer"]["max_epochs"], tables.config_of(cell)["trainer"]["max_epochs"]
    fewer = None if run == whole else f"{run} of {whole} rounds"
    smaller = [text for text in (tables.scale_of(cell), fewer) if text]
    return Measured(
        values=tuple(value for value, _ in found.values()),
        seeds=tuple(found),
        rounds=run,
        scale=", ".join(smaller) or tables.FULL,
        coverage=tables.REDUCED if fewer else tables.coverage_of(cell),
        seconds=tuple(result["seconds"] for _, result in found.values()),
        run=tables.config_hash(config),
        last=None if other is not None else _last(cell, [result for _, result in found.values()]),
    )


def results(
    records: Records, cell: Cell, seeds: Sequence[int] | None = None, rounds: int | None = None
) -> list[Result]:
    """Return results of a cell's recorded runs, by seed."""
    config = tables.config_of(cell, rounds)
    every = (records.result(config, seed) for seed in _seeds(records, config, seeds))
    return [result for result in every if result is not None]


def _seeds(records: Records, config: Config, seeds: Sequence[int] | None) -> Sequence[int]:
    return records.seeds(config) if seeds is None else seeds


def _value(records: Records, cell: Cell, config: Config, seed: int) -> tuple[float, Result] | None:
    """Return a run's metric and result; None if the run or its metric is missing."""
    result, metric = records.result(config, seed), tables.run_metric(cell)
    if cell["metric"] == "gain_over_fedavg":
        metric = "local_test_acc"
    return (result["metrics"][metric], result) if result and metric in result["metrics"] else None


def _last(cell: Cell, found: Sequence[Result]) -> float | None:
    """Return the mean over seeds and last rounds if the metric is unstable for any seed."""
    metric: Any = tables.run_metric(cell)
    tails = [_curve(result, metric)[-LAST:] for result in found]
    if any(len(tail) < LAST for tail in tails) or max(map(statistics.pstdev, tails)) <= SWING:
        return None
    return statistics.fmean(map(statistics.fmean, tails))


def _curve(result: Result, metric: str) -> list[float]:
    """Return a metric by round; the gap is computed from the curves of majority and minority."""
    curves = result["curves"]
    if metric == "gap" and "minority" in curves:
        return [more - less for more, less in zip(curves["majority"], curves["minority"], strict=True)]
    found: list[float] = curves.get(metric, [])
    return found
