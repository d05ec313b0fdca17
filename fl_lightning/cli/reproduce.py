"""``fl-lightning reproduce TABLE``: run the cells of a published table and compare the results."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from fl_lightning.cli.lightning import FederatedCLI
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.cli.workers import Workers
from fl_lightning.errors import FederationError
from fl_lightning.papers import tables
from fl_lightning.papers.cells import cached, folder_of, progress_of, run_cell
from fl_lightning.papers.drawing import keep_own
from fl_lightning.papers.measure import Measured, measure
from fl_lightning.papers.pages import write_pages
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import Cell, Config
from fl_lightning.papers.words import figure
from fl_lightning.view import View


def build_parser() -> FederatedArgumentParser:
    """The command's options."""
    parser = FederatedArgumentParser(prog="fl-lightning reproduce", description="Run a published table and compare.")
    parser.add_argument("table", nargs="?", help="the table, such as waffle_factor_journal/table2")
    parser.add_argument("--list", action="store_true", help="list all tables and exit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds; one run per cell and seed")
    parser.add_argument("--rounds", type=int, help="number of rounds of a trial, which is shown but not recorded")
    parser.add_argument("--only", nargs="+", default=[], help="conditions, such as dataset=mnist method=fedavg,fedprox")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, one thread each")
    parser.add_argument("--runs", default="runs/reproduce", help="folder of finished and unfinished runs")
    parser.add_argument("--results", default="results", help="folder of the records, one file per table")
    parser.add_argument("--docs", help="folder for the pages of all tables and their pictures")
    parser.add_argument("--cached", action="store_true", help="use finished or recorded runs only")
    parser.add_argument("--quiet", action="store_true", help="show no progress and print no table")
    parser.add_argument("--show", action="store_true", help="print the runs' configurations and exit")
    return parser


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    options = build_parser().parse_args(argv[1:])
    options.seeds = list(dict.fromkeys(options.seeds))
    for option in ("jobs", "rounds"):
        if (number := options[option]) is not None and number < 1:
            raise FederationError(f"--{option} must be 1 or more, not {number}.")
    if options.list or (options.table is None and options.docs is None):
        for name, cells in tables.tables().items():
            print(f"{name:<32} {len(cells):>3} cells, {len(_runs(cells, None)):>3} runs per seed")
        return
    console = Console(quiet=options.quiet)
    if options.table is not None:
        cells = tables.select(tables.table(options.table), dict(_condition(text) for text in options.only))
        if options.show:
            print(yaml.safe_dump_all(_runs(cells, options.rounds).values(), sort_keys=False))
            return
        _reproduce(options, cells, console)
    if options.docs is not None:
        written = write_pages(Records(Path(options.results)), Path(options.docs))
        console.print(f"wrote {len(written)} pages and pictures into {options.docs}")


def _reproduce(options: Any, cells: list[Cell], console: Console) -> None:
    """Run the cells of a table or load their runs, record them and show the results."""
    runs, folder = _runs(cells, options.rounds), Path(options.runs)
    records = Records(Path(options.results))
    failed = {} if options.cached else _run_all(console, records, folder, runs, options.seeds, options.jobs)
    if options.rounds is not None:
        records = Records(None)  # a trial leaves none
    _record(records, folder, options.table, cells, options.seeds, options.rounds)
    rows = [(cell, found) for cell in cells if (found := measure(records, cell, options.seeds, options.rounds))]
    if not rows and not failed:
        raise FederationError("None of these cells has a finished run: remove --cached to run them.")
    if rows:
        console.print(render(options.table, rows))
        console.print("a trial: nothing was recorded" if records.folder is None else f"recorded in {records.folder}")
    if failed:
        raise FederationError(f"Some runs failed, repeat the command to retry them: {_told(failed)}.")


def _condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise FederationError(f"--only takes conditions such as dataset=mnist, not {text!r}.")
    return key, value


def _asked(cells: list[Cell]) -> list[Cell]:
    """The cells, and the cells they are compared with."""
    return [one for cell in cells for one in (cell, tables.beside(cell)) if one is not None]


def _runs(cells: list[Cell], rounds: int | None) -> dict[str, Config]:
    """Return the distinct runs of the cells, by hash."""
    configs = (tables.config_of(cell, rounds) for cell in _asked(cells))
    return {tables.config_hash(config): config for config in configs}


def _record(records: Records, folder: Path, name: str, cells: list[Cell], seeds: list[int], rounds: int | None) -> None:
    """Record finished runs; records of unfinished ones do not change."""
    for cell in _asked(cells):
        config = tables.config_of(cell, rounds)
        for seed in seeds:
            result = cached(folder, config, seed)
            if result is not None and result != records.result(config, seed):
                records.keep(name, config, seed, result)
                if records.folder is not None:
                    keep_own(records.folder, cell, folder_of(folder, config, seed))


def assemble(config: Config) -> FederatedCLI:
    """Trainer, model and data of a configuration."""
    return FederatedCLI(args=config, run=False, save_config_callback=None)


def _run_all(
    console: Console, records: Records, folder: Path, runs: dict[str, Config], seeds: list[int], jobs: int
) -> dict[str, str]:
    """Run unfinished cells; returns error messages by run."""
    asked = [(config, seed) for seed in seeds for config in runs.values()]
    new = [(config, seed) for config, seed in asked if cached(folder, config, seed) is None]
    todo = [run for run in new if records.result(*run) is None]
    old = len(new) - len(todo)
    known = f" ({old} taken from {records.folder}: with another --results they run again)" if old else ""
    console.print(f"{len(asked)} runs, {len(todo)} to do, {jobs} in parallel{known}")
    view = View("run", len(todo), quiet=console.quiet or not todo, console=console)
    failed: dict[str, str] = {}
    left, done = iter(todo), 0
    with _kept(), Workers(jobs) as workers, view:
        while done < len(todo):
            while workers.free and (run := next(left, None)):
                workers.begin(run_cell, folder, *run, assemble)
            for (_, config, seed, _), future in workers.ended():
                done += 1
                name, error = _name(config, seed), future.exception()
                if error is not None:
                    failed[name] = _reason(error)
                view.print(f"{done}/{len(todo)} {name}: {failed.get(name) or _outcome(future.result())}")
            parts = [(call, part) for call in workers.running.values() if (part := progress_of(*call[:3]))]
            facts = (f"{_name(*call[1:3])} {part.rounds}/{part.total} {part.accuracy:.1f} %" for call, part in parts)
            view.update(done + sum(part.rounds / part.total for _, part in parts), *facts)
    return failed


@contextmanager
def _kept() -> Iterator[None]:
    """Explain on Ctrl-C what happens to the runs."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Stopped: finished runs are kept; repeat the command to continue.") from None


def _told(failed: dict[str, str]) -> str:
    """Format failed runs and their reasons, each reason once.

    Example:
        >>> _told({"a": "no data", "b": "no memory", "c": "no data"})
        'a, c (no data); b (no memory)'
    """
    runs: dict[str, list[str]] = {}
    for name, reason in failed.items():
        runs.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in runs.items())


def _outcome(result: dict[str, Any]) -> str:
    return f"{result['metrics']['local_test_acc']:.2f} in {result['seconds']:.0f} s"


def _reason(error: BaseException) -> str:
    """Why a run failed, in a few words; unexpected errors also print their traceback."""
    if isinstance(error, BrokenProcessPool):
        return "its process was killed"
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, FederationError):
        return text
    traceback.print_exception(error)
    return f"{type(error).__name__}: {text}"


def _name(config: Config, seed: int) -> str:
    """A run in a few words."""
    method, data = (config[part]["class_path"].rpartition(".")[2] for part in ("model", "data"))
    return f"{method} {data} {tables.config_hash(config)} seed {seed}"


def render(name: str, rows: list[tuple[Cell, Measured]]) -> Table:
    """Table of published and measured values."""
    shown = Table(title=name)
    for heading in ("cell", "metric"):
        shown.add_column(heading, overflow="fold")
    for heading in ("paper", "measured", "difference", "scale"):
        shown.add_column(heading, justify="right", overflow="fold")
    for cell, measured in rows:
        shown.add_row(tables.label(cell), cell["metric"], *_texts(cell, measured))
    return shown


def _texts(cell: Cell, measured: Measured) -> Iterator[str]:
    """Published value, measured value, difference and scale."""
    yield figure(cell["value"], cell.get("std"))
    yield figure(measured.mean, measured.std)
    yield "" if cell["value"] is None else f"{measured.mean - cell['value']:+.2f}"
    yield f"{measured.scale}, {len(measured.seeds)} seed{'s' * (len(measured.seeds) > 1)}"
