"""``fl-lightning reproduce TABLE``: run the cells of a published table and put the results beside it."""

from __future__ import annotations

import json
import shutil
import statistics
import traceback
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from fl_lightning.callbacks.inferred import PICTURE as INFERRED
from fl_lightning.cli import figures
from fl_lightning.cli.cells import folder_of, progress_of, run_cell
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.cli.records import Records
from fl_lightning.cli.results import figure, write_page
from fl_lightning.cli.tables import (
    Cell,
    Config,
    beside,
    config_hash,
    config_of,
    label,
    line_name,
    run_metric,
    scale_of,
    select,
    studies,
    table,
    tables,
)
from fl_lightning.cli.workers import Workers
from fl_lightning.errors import FederationError
from fl_lightning.view import View

Measured = dict[str, Any]
#: What FedDAF says of its weights in a round: the largest, and how many clients count.
FUSION = ("fusion/largest", "fusion/effective")


def build_parser() -> FederatedArgumentParser:
    """The command's options."""
    parser = FederatedArgumentParser(prog="fl-lightning reproduce", description="Run the cells of a published table.")
    parser.add_argument("table", nargs="?", help="the table, such as waffle_factor_journal/table2")
    parser.add_argument("--list", action="store_true", help="name all tables and stop")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run per cell and seed")
    parser.add_argument("--rounds", type=int, help="run fewer rounds than the paper; the result says so")
    parser.add_argument("--only", nargs="+", default=[], help="conditions such as dataset=mnist method=fedavg,fedprox")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--runs", default="runs/reproduce", help="folder of finished and unfinished runs")
    parser.add_argument(
        "--results", default="results", help="folder for TABLE.json and runs/, the records of finished runs"
    )
    parser.add_argument("--docs", default="docs", help="folder for results.md")
    parser.add_argument("--cached", action="store_true", help="run nothing, use the runs that are finished or recorded")
    parser.add_argument("--quiet", action="store_true", help="show no progress and print no table")
    parser.add_argument("--show", action="store_true", help="print the runs' configurations and stop")
    return parser


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    options = build_parser().parse_args(argv[1:])
    options.seeds = list(dict.fromkeys(options.seeds))
    if options.list or options.table is None:
        for name, cells in tables().items():
            print(f"{name:<32} {len(cells):>3} cells, {len(_runs(cells, None)):>3} runs per seed")
        return
    for option in ("jobs", "rounds"):
        if (number := options[option]) is not None and number < 1:
            raise FederationError(f"--{option} must be 1 or more, not {number}.")
    cells = select(table(options.table), dict(_condition(text) for text in options.only))
    runs = _runs(cells, options.rounds)
    if options.show:
        print(yaml.safe_dump_all(runs.values(), sort_keys=False))
        return
    console, records = Console(quiet=options.quiet), Records(Path(options.runs), Path(options.results) / "runs")
    failed = {} if options.cached else _run_all(console, records, runs, options.seeds, options.jobs)
    for config in runs.values():
        for seed in options.seeds:
            records.keep(config, seed)
    rows = [{**cell, "measured": measure(records, cell, options.seeds, options.rounds)} for cell in cells]
    rows = [row for row in rows if row["measured"] is not None]
    if not rows and not failed:
        raise FederationError("None of these cells has a finished run: leave --cached out to run them.")
    if rows:
        console.print(render(options.table, rows))
        written, lesser = write_results(Path(options.results), options.table, rows)
        if lesser:
            console.print(f"{len(lesser)} of the rows stay as they were in {written}: they have more rounds or seeds")
        drawn = [cell for cell in cells if _key(cell) not in map(_key, lesser)]
        if drawn:
            draw(records, options.table, drawn, options.seeds, options.rounds, Path(options.docs) / "pictures")
        write_page(Path(options.results), Path(options.docs))
        console.print(f"wrote {written} and {Path(options.docs) / 'results.md'}")
    if failed:
        raise FederationError(
            f"Not all runs were finished, the same command tries again those that failed: {_told(failed)}."
        )


def _condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise FederationError(f"--only takes conditions such as dataset=mnist, not {text!r}.")
    return key, value


def _config(cell: Cell, rounds: int | None) -> Config:
    config = config_of(cell)
    if rounds is not None:
        config["trainer"]["max_epochs"] = rounds
    return config


def _runs(cells: list[Cell], rounds: int | None) -> dict[str, Config]:
    """The different runs that the cells ask for, by hash."""
    asked = [cell for one in cells for cell in (one, beside(one)) if cell is not None]
    return {config_hash(config): config for config in (_config(cell, rounds) for cell in asked)}


def _run_all(
    console: Console, records: Records, runs: dict[str, Config], seeds: list[int], jobs: int
) -> dict[str, str]:
    """Run what is not finished; returns what went wrong, by name of the run."""
    asked = [(config, seed) for seed in seeds for config in runs.values()]
    todo = [run for run in asked if records.result(*run) is None]
    old = sum(records.is_only_recorded(*run) for run in asked)
    known = f" ({old} taken from {records.folder}: with another --results they run again)" if old else ""
    console.print(f"{len(asked)} runs, {len(todo)} of them to do, {jobs} at a time{known}")
    view = View("run", len(todo), quiet=console.quiet or not todo, console=console)
    failed: dict[str, str] = {}
    left, done = iter(todo), 0
    with _kept(), Workers(jobs) as workers, view:
        while done < len(todo):
            while workers.free and (run := next(left, None)):
                workers.begin(run_cell, records.runs, *run)
            for (_, config, seed), future in workers.ended():
                done += 1
                name, error = _name(config, seed), future.exception()
                if error is not None:
                    failed[name] = _reason(error)
                view.print(f"{done}/{len(todo)} {name}: {failed.get(name) or _outcome(future.result())}")
            parts = [(call, part) for call in workers.running.values() if (part := progress_of(*call))]
            facts = (f"{_name(*call[1:])} {part.rounds}/{part.total} {part.accuracy:.1f} %" for call, part in parts)
            view.update(done + sum(part.rounds / part.total for _, part in parts), *facts)
    return failed


@contextmanager
def _kept() -> Iterator[None]:
    """Say what becomes of the runs when someone stops the command."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Stopped: finished runs are kept, and the same command goes on.") from None


def _told(failed: dict[str, str]) -> str:
    """Which runs failed and why, every reason once.

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
    """Why a run failed, in a few words; of what nobody expected, where it happened is printed too."""
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
    return f"{method} {data} {config_hash(config)} seed {seed}"


def measure(records: Records, cell: Cell, seeds: list[int], rounds: int | None) -> Measured | None:
    """What the finished runs of a cell came to; None if there is none."""
    config, other = _config(cell, rounds), beside(cell)
    found = {seed: result for seed in seeds if (result := records.result(config, seed)) is not None}
    if other is None:
        metric = run_metric(cell)
        found = {seed: result for seed, result in found.items() if metric in result["metrics"]}
        values = [result["metrics"][metric] for result in found.values()]
    else:
        base = {seed: records.result(_config(other, rounds), seed) for seed in found}
        found = {seed: result for seed, result in found.items() if base[seed] is not None}
        values = [found[s]["metrics"][other["metric"]] - base[s]["metrics"][other["metric"]] for s in found]  # type: ignore[index]
    if not values:
        return None
    run, whole = config["trainer"]["max_epochs"], config_of(cell)["trainer"]["max_epochs"]
    smaller = [text for text in (scale_of(cell), f"{run} of {whole} rounds" if run != whole else None) if text]
    measured = {
        "mean": round(statistics.fmean(values), 4),
        "std": round(statistics.stdev(values), 4) if len(values) > 1 else None,
        "seeds": sorted(found),
        "rounds": run,
        "scale": ", ".join(smaller) or "full",
        "seconds": round(statistics.fmean(result["seconds"] for result in found.values()), 1),
        "config_hash": config_hash(config),
    }
    last = [
        result["metrics"][name] for result in found.values() if (name := f"{cell['metric']}_last5") in result["metrics"]
    ]
    if last:
        measured["mean_of_last_5_rounds"] = round(statistics.fmean(last), 4)
    return measured


def render(name: str, rows: list[Cell]) -> Table:
    """Paper beside measured."""
    shown = Table(title=name)
    for heading in ("cell", "metric"):
        shown.add_column(heading, overflow="fold")
    for heading in ("paper", "measured", "difference", "scale"):
        shown.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        shown.add_row(label(row), row["metric"], *cells_of(row))
    return shown


def cells_of(row: Cell) -> Iterator[str]:
    """Published value, measured value, difference and scale as text."""
    measured = row["measured"]
    yield figure(row["value"], row.get("std"))
    yield figure(measured["mean"], measured["std"])
    yield "" if row["value"] is None else f"{measured['mean'] - row['value']:+.2f}"
    yield f"{measured['scale']}, {len(measured['seeds'])} seed{'s' * (len(measured['seeds']) > 1)}"


def draw(records: Records, name: str, cells: list[Cell], seeds: list[int], rounds: int | None, folder: Path) -> None:
    """Pictures of finished runs of a table, one set for each data set, partition and net of the cells."""
    groups: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = {}
    images: dict[tuple[str, ...], dict[str, Any]] = {}
    nets: dict[tuple[str, str], set[str | None]] = {}
    for cell in table(name):
        nets.setdefault((cell["dataset"], cell["partition"]), set()).add(cell.get("model"))
    varied = [study["x"] for study in studies(name)]
    folder.mkdir(parents=True, exist_ok=True)
    asked = {_about(cell, nets): run_metric(cell) == "best_acc" for cell in reversed(cells)}
    for cell in [cell for cell in table(name) if cell["metric"] != "parameters" and _about(cell, nets) in asked]:
        plain = not any(key in cell for key in ("E", "F", "l1_weight", *varied))
        results = _finished(records, cell, seeds, rounds)
        if plain and results:
            groups.setdefault(_about(cell, nets), {})[line_name(cell)] = results
            own = folder_of(records.runs, _config(cell, rounds), seeds[0])
            if (own / "inversion.pt").exists():
                found = torch.load(own / "inversion.pt", weights_only=True)
                images.setdefault(_about(cell, nets), {})[line_name(cell)] = found
            if (own / INFERRED).exists():
                shutil.copy(own / INFERRED, folder / f"{_stem(name, _about(cell, nets))}-inferred.png")
    for study in studies(name):
        draw_study(records, name, study, seeds, rounds, folder)
    for about, runs in groups.items():
        stem = _stem(name, about)
        title = ", ".join(about)
        every = [result for results in runs.values() for result in results]
        if all(result["rounds"] > 1 for result in every):
            figures.curves(runs, folder / f"{stem}.png", title, accuracy_of(name), best=asked[about])
        if any("mia_auroc/insider" in result["metrics"] for result in every):
            figures.trade_off(runs, folder / f"{stem}-privacy.png", title)
        if about in images:
            figures.inversions(images[about], folder / f"{stem}-inversion.png", title)
        if accuracy_of(name) == "global_test_acc":
            figures.losses(runs, folder / f"{stem}-loss.png", title)
            figures.by_time(runs, folder / f"{stem}-time.png", title, accuracy_of(name))
            figures.spent(runs, folder / f"{stem}-seconds.png", title)
        fused = {method: results for method, results in runs.items() if FUSION[0] in results[0]["curves"]}
        if fused:
            figures.logged(fused, folder / f"{stem}-fusion.png", title, FUSION)
        weighing = {method: results for method, results in runs.items() if "weights" in results[0]}
        if weighing:
            figures.agents(weighing, folder / f"{stem}-weights.png", title)
        if all("minority" in result["curves"] for result in every):
            figures.sub_populations(runs, folder / f"{stem}-groups.png", title)
            figures.distribution(runs, folder / f"{stem}-clients.png", title)


def _stem(name: str, about: tuple[str, ...]) -> str:
    """How the names of pictures begin."""
    return f"results-{'-'.join([name.replace('/', '-'), *about])}".replace("*", "-star")


def accuracy_of(name: str) -> str:
    """The accuracy that a table is about."""
    shared = any(cell["metric"] == "global_test_acc" for cell in table(name))
    return "global_test_acc" if shared else "local_test_acc"


def _about(cell: Cell, nets: dict[tuple[str, str], set[str | None]]) -> tuple[str, ...]:
    """What a cell's picture is about: data and partition, and the net where there are several for these."""
    about = (cell["dataset"], cell["partition"])
    return (*about, cell["model"]) if len(nets[about]) > 1 else about


def draw_study(
    records: Records, name: str, study: dict[str, str], seeds: list[int], rounds: int | None, folder: Path
) -> None:
    """Final accuracy over the key that a study varies, one line for each value of another."""
    lines: dict[str, dict[Any, list[dict[str, Any]]]] = {}
    for cell in table(name):
        results = _finished(records, cell, seeds, rounds)
        if study["x"] in cell and results:
            lines.setdefault(str(cell[study["line"]]), {})[cell[study["x"]]] = results
    if lines:
        path = folder / f"results-{name.replace('/', '-')}-by-{study['x']}.png"
        figures.study(lines, path, name, study["x"], accuracy_of(name))


def _finished(records: Records, cell: Cell, seeds: list[int], rounds: int | None) -> list[dict[str, Any]]:
    """Results of a cell's finished runs."""
    return [found for seed in seeds if (found := records.result(_config(cell, rounds), seed)) is not None]


def write_results(folder: Path, name: str, rows: list[Cell]) -> tuple[Path, list[Cell]]:
    """Write the rows into the table's file; rows of other cells that are there stay, and those that rest on more.

    Returns:
        The file, and the rows that were not written as the file has a better one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('/', '_')}.json"
    merged = {_key(row): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    lesser = [row for row in rows if (old := merged.get(_key(row))) and _outweighs(old["measured"], row["measured"])]
    merged |= {_key(row): row for row in rows if row not in lesser}
    order = {_key(cell): i for i, cell in enumerate(table(name))}
    ordered = sorted(merged.values(), key=lambda row: order.get(_key(row), len(order)))
    path.write_text(json.dumps(ordered, indent=1) + "\n")
    return path, lesser


def _outweighs(old: Measured, new: Measured) -> bool:
    """Whether a trial must not replace what was measured: it has fewer rounds, or as many and only some of the seeds.

    Example:
        >>> _outweighs({"rounds": 50, "seeds": [0, 1]}, {"rounds": 50, "seeds": [1]})
        True
    """
    more_seeds = set(old["seeds"]) > set(new["seeds"])
    return bool(old["rounds"] > new["rounds"] or (old["rounds"] == new["rounds"] and more_seeds))


def _key(cell: Cell) -> str:
    return json.dumps({k: v for k, v in cell.items() if k not in ("value", "std", "note", "measured")}, sort_keys=True)
