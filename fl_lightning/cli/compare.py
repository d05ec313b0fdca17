"""``fl-lightning compare RUN...``: finished runs side by side, and a self-contained HTML report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fl_lightning.callbacks.pages import page_of, unit, words
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.cli.runs import Run, find
from fl_lightning.measure import SPELT, Measure
from fl_lightning.sheet import Sheet, figure


class Experiment(NamedTuple):
    """Runs that differ only in their seed."""

    name: str
    runs: list[Run]

    def values(self, of: Callable[[Run], float | None]) -> list[float]:
        """Return the values of all runs that have it."""
        return [value for run in self.runs if (value := of(run)) is not None]


class Column(NamedTuple):
    """A column of the comparison: its value, format and direction."""

    heading: str
    of: Callable[[Run], float | None]
    digits: int = 2
    scale: float = 1.0
    better: int = 0


def _last(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.final.get(name)


def _scored(name: str, measure: Measure | None = None) -> Callable[[Run], float | None]:
    """Return the last value of a metric on a run's validation split, if its headline metric is ``measure``."""
    return lambda run: run.final.get(f"{run.validated}/{name}") if measure in (None, run.measure) else None


def _validations(run: Run) -> float | None:
    curve = run.curves.get(f"{run.validated}/{run.measure.name}")
    return float(len(curve[0])) if curve else None


def _measures(experiments: Sequence[Experiment]) -> list[Measure]:
    """Return the headline metrics of these runs, usually one."""
    return list(dict.fromkeys(run.measure for one in experiments for run in one.runs))


def _judged(measure: Measure, apart: bool) -> list[Column]:
    """Return the columns of a headline metric; with its name if runs have several."""
    name, prefix, sign = measure.name, f"{measure.title}: " if apart else "", measure.sign
    digits = 2 if measure.share else 4
    variance = "variance (%²)" if measure.share else "variance"
    return [
        Column(f"{prefix}mean{measure.unit}", _scored(name, measure), digits, measure.scale, sign),
        Column(f"{prefix}worst tenth{measure.unit}", _scored(f"{name}_worst10", measure), digits, measure.scale, sign),
        Column(f"{prefix}{variance}", _scored("variance", measure), digits, 1, -1),
    ]


#: Display names of validation splits.
SAMPLES = {"val": "held-out training samples", "test": "test samples"}
#: Columns of costs; here and elsewhere, columns without values are left out.
COSTS = (
    Column("parameters shared", lambda run: run.parameters, 0),
    Column("MB up", lambda run: run.traffic[0] / 1e6 if run.traffic else None, 2),
    Column("MB down", lambda run: run.traffic[1] / 1e6 if run.traffic else None, 2),
    Column("seconds", lambda run: run.seconds, 1),
    Column("steps/s", lambda run: run.steps / run.seconds if run.steps and run.seconds else None, 0),
)


def build_parser() -> FederatedArgumentParser:
    """The command's options."""
    parser = FederatedArgumentParser(
        prog="fl-lightning compare",
        description="Compare finished runs and write a report. Runs that differ only in their seed are "
        "averaged. A folder stands for all runs in it.",
    )
    parser.add_argument("runs", nargs="+", type=str, help="log folders of fits")
    parser.add_argument("--out", type=str, default="comparison", help="folder for report.html, table.md and table.tex")
    parser.add_argument("--title", type=str, help="title of the report")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    return parser


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    from rich.console import Console

    from fl_lightning.cli.report import write_report

    options = build_parser().parse_args(argv[1:])
    experiments = experiments_of(find(options.runs))
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    sheets = [sheet for make in SHEETS if (sheet := make(experiments)) is not None]
    text = "\n".join(f"{sheet.title}\n\n{sheet.markdown()}" for sheet in sheets)
    (folder / "table.md").write_text(text, encoding="utf-8")
    (folder / "table.tex").write_text("\n".join(sheet.latex() for sheet in sheets), encoding="utf-8")
    title = options.title or "Comparison: " + ", ".join(one.name for one in experiments)
    write_report(folder / "report.html", experiments, title)
    if options.quiet:
        return
    console = Console()
    for sheet in sheets:
        console.print(sheet.rich())
    written = ", ".join(str(folder / name) for name in ("report.html", "table.md", "table.tex"))
    console.print(f"wrote {written}", highlight=False, soft_wrap=True)


def experiments_of(runs: Sequence[Run]) -> list[Experiment]:
    """Runs by experiment, in the order in which they were given."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.name, run.identity), []).append(run)
    return [Experiment(name, repeated) for (name, _), repeated in found.items()]


def summary(experiments: Sequence[Experiment]) -> Sheet:
    """Return the comparison: headline metric, fairness and other metrics, one row per experiment."""
    repeated = any(len(one.runs) > 1 for one in experiments)
    note = "; mean and standard deviation over seeds" if repeated else ""
    splits = {run.validated for one in experiments for run in one.runs}
    samples = SAMPLES[splits.pop()] if len(splits) == 1 else "held-out training samples or test samples, by run"
    measures = _measures(experiments)
    columns = [column for measure in measures for column in _judged(measure, len(measures) > 1)]
    others = dict.fromkeys(name for one in experiments for run in one.runs for name in run.metrics)
    columns += [
        Column(f"mean {SPELT.get(name, name)}", _scored(name), 4)
        for name in others
        if name not in {m.name for m in measures}
    ]
    columns.append(Column("rounds", _validations, 0))
    title = " and ".join(measure.title for measure in measures)
    return _sheet(f"Last round, {title} on the clients' own {samples}{note}", experiments, columns)


def populations(experiments: Sequence[Experiment]) -> Sheet | None:
    """Score by sub-population and the gap between majority and minority; None with one group."""
    names = {name: None for one in experiments for run in one.runs for name in run.populations}
    if not names:
        return None
    columns, measures = list[Column](), _measures(experiments)
    for measure in measures:
        mean, _, variance = _judged(measure, len(measures) > 1)
        columns.append(mean._replace(heading=mean.heading.replace("mean", "all")))
        columns += [mean._replace(heading=f"{name}{measure.unit}", of=_population(name, measure)) for name in names]
        columns += [mean._replace(heading=f"gap{measure.unit}", of=_scored("gap", measure), better=-1), variance]
    return _sheet("Sub-populations", experiments, columns)


def cost(experiments: Sequence[Experiment]) -> Sheet | None:
    """Traffic and time of the runs; None if unknown."""
    sheet = _sheet("Cost of the whole fit, validation included", experiments, COSTS)
    return sheet if len(sheet.columns) > 1 else None


def privacy(experiments: Sequence[Experiment]) -> Sheet | None:
    """Last values of all metrics of the privacy callbacks; None if there are none."""
    names = {tag: None for one in experiments for run in one.runs for tag in run.final if page_of(tag) == "Privacy"}
    return _sheet("Privacy", experiments, [_attacked(tag) for tag in names]) if names else None


def _attacked(tag: str) -> Column:
    """The column of a number that a privacy callback logged."""
    label, factor = unit(tag)
    return Column(f"{words(tag)} {label}".strip(), _last(tag), 2 if label == "%" else 4, factor)


#: What is printed and written as Markdown and LaTeX.
SHEETS: tuple[Callable[[Sequence[Experiment]], Sheet | None], ...] = (summary, populations, privacy, cost)


def _population(name: str, measure: Measure) -> Callable[[Run], float | None]:
    def mean(run: Run) -> float | None:
        clients = run.populations.get(name) if run.scores.size and run.measure == measure else None
        known = [value for value in run.scores[-1][clients] if value == value] if clients else []
        return statistics.fmean(known) if known else None

    return mean


def _sheet(title: str, experiments: Sequence[Experiment], columns: Sequence[Column]) -> Sheet:
    found = [(column, [one.values(column.of) for one in experiments]) for column in columns]
    found = [(column, values) for column, values in found if any(values)]
    best = {}
    for number, (column, values) in enumerate(found, 1):
        means = [statistics.fmean(v) * column.better if v else float("-inf") for v in values]
        if column.better and len(means) > 1 and all(len(v) > 1 for v in values):  # one seed makes no winner
            best[number] = means.index(max(means))
    rows = [
        [one.name, *(figure(values[i], column.digits, column.scale) for column, values in found)]
        for i, one in enumerate(experiments)
    ]
    return Sheet(title, ["run", *(column.heading for column, _ in found)], rows, best)
