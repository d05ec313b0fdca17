"""Pages of results, generated from the records alone."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.papers import marked, tables, worth
from fl_lightning.papers.claims import Claim, judge
from fl_lightning.papers.coverage import KINDS, NONE, coverage, deviations, hours
from fl_lightning.papers.layout import Layout, Place, Shown
from fl_lightning.papers.measure import Measured
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import FULL, REDUCED, Cell, Config
from fl_lightning.papers.words import figure, name_of
from fl_lightning.sheet import markdown

Plan = Mapping[str, Any]
#: Rows, columns and places of a table.
Grid = tuple[list[str], list[str], list[list[Shown | None]]]
#: Folders of the papers' pages and figures.
PAGES, PICTURES = "results", "pictures/results"
UNEXPLAINED, SMALLER = "Unexplained.", "Run at a smaller scale, not comparable."
#: Row names for a paper's own method, by key of a claim, and for all other methods.
OWN, OTHERS = {"original": "its method, as published", "changed": "its method, ours"}, "other methods"
#: README's table: row names and methods.
ROWS = {
    "Local": "local",
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "q-FFL": "qffl",
    "WAFFLe (as published)": "waffle_factor_joint",
    "WAFFLe (ours)": "waffle_factor",
}
COLUMNS = {"all clients": "local_test_acc", "majority": "majority", "minority": "minority", "variance": "variance"}


def write_pages(records: Records, docs: Path) -> list[Path]:
    """Write pages and figures of all tables to a folder, and remove outdated ones.

    Returns:
        The files, pages first.
    """
    from fl_lightning.papers.drawing import draw
    from fl_lightning.papers.figures import deviations

    plans = tables.pages()["pages"]
    layouts = {plan["name"]: _layouts(records, plan) for plan in plans}
    drawn = [deviations(_mapped(layouts), docs / PICTURES / "deviations.png")]
    written = [marked.write_text(docs / "results.md", front_page(records, layouts))]
    for plan in plans:
        name, pictures = plan["name"], {}
        for one in plan["curves"]:
            pictures[one] = draw(records, one, docs / PICTURES / name)
            drawn += pictures[one]
        written.append(marked.write_text(docs / PAGES / f"{name}.md", paper_page(records, plan, layouts[name])))
        written.append(marked.write_text(docs / PAGES / f"{name}-curves.md", curves_page(plan, pictures)))
    drawn.append(worth.draw(records, docs / PICTURES / "map.png"))
    written.append(marked.write_text(docs / PAGES / "map.md", worth.page(records, f"../{PICTURES}/map.png")))
    marked.remove_others([docs / PAGES, docs / PICTURES], [*written, *drawn])
    return [*written, *drawn]


def readme_table(records: Records) -> str:
    """Return README's table: MNIST with a majority and a minority of clients, mean over seeds."""
    asked = {"dataset": "mnist", "partition": "multimodal_Z2", "metric": list(COLUMNS.values())}
    plan = {"of": [f"waffle_factor_journal/table{n}" for n in (1, 2)], "where": asked}
    places = Layout(records, {**plan, "rows": ["method"], "columns": ["metric"]}).places
    rows = []
    for name, method in ROWS.items():
        found = [places.get((method,), {}).get((metric,)) for metric in COLUMNS.values()]
        rows.append([name, *("" if one is None or one.measured is None else _short(one.measured) for one in found)])
    return markdown(["method", *COLUMNS], rows)


def _short(measured: Measured) -> str:
    return f"{measured.mean:.1f} ± {measured.std or 0:.1f}"


def front_page(records: Records, layouts: Mapping[str, Sequence[Layout]]) -> str:
    """Return the first page: claims, coverage and the figure of all deviations."""
    plans = [plan for plan in tables.pages()["pages"] if "claims" in plan]
    claims = [(plan, judge(records, claim)) for plan in plans for claim in plan["claims"]]
    rows = [[_link(plan), *_claim_texts(claim)] for plan, claim in claims]
    head = ["paper", "claim", "verdict", "paper's gain", "as published", "ours", "Local"]
    said = tables.pages()["texts"]
    parts = [said["front"], markdown(head, rows, left=3), "## Coverage\n", _coverage_table(plans, layouts)]
    parts += [said["coverage"], "## Deviations\n", f"![{said['picture']}]({PICTURES}/deviations.png)\n"]
    parts += [said["deviations"], _deviation_table(plans, layouts), said["places"]]
    parts += ["## Runs\n", _runs(records, [one for of in layouts.values() for one in of])]
    parts += ["## Pages\n", f"- [{said['map']['title']}]({PAGES}/map.md)"]
    parts += [f"- {_link(plan)}, [curves]({PAGES}/{plan['name']}-curves.md)" for plan in tables.pages()["pages"]]
    return "\n".join(parts)


def paper_page(records: Records, plan: Plan, layouts: Sequence[Layout]) -> str:
    """Return the page of one paper: claims, tables, assumptions and missing cells."""
    parts = [f"# {plan['title']}\n", f"{plan['about'].strip()}\n"]
    if plan.get("published", True):
        parts.append(tables.pages()["texts"]["entries"])
    if "claims" in plan:
        rows = [_claim_texts(judge(records, claim)) for claim in plan["claims"]]
        parts += [
            "## Claims\n",
            markdown(["claim", "verdict", "paper's gain", "as published", "ours", "Local"], rows, left=2),
        ]
    parts += [text for one in layouts if (text := section(one, plan.get("explanations", [])))]
    for title, key in (("Assumptions", "assumptions"), ("How settings were chosen", "chosen")):
        if key in plan:
            parts += [f"## {title}\n", *(f"- {text}" for text in plan[key]), ""]
    parts += ["## Not measured\n", _missing(records, plan, layouts)]
    return "\n".join([*parts, "## Runs\n", _runs(records, layouts)])


def curves_page(plan: Plan, pictures: Mapping[str, Sequence[Path]]) -> str:
    """Return the page of a paper's figures."""
    about = tables.pages()["texts"]["curves"]
    head = f"Means over seeds of the runs behind [the tables]({plan['name']}.md). {about}"
    parts = [f"# Curves: {plan['title']}\n", head]
    for name, paths in pictures.items():
        title = plan["curves"][name]
        parts.append(f"## {title}\n")
        for path in paths:
            of = ", ".join(map(name_of, path.stem.removeprefix(name.replace("/", "-")).strip("-").split("-")))
            parts.append(f"![{title}: {of}](../{PICTURES}/{plan['name']}/{path.name})\n")
    return "\n".join(parts)


def section(layout: Layout, explanations: Sequence[Plan] = (), level: str = "##") -> str:
    """Return one table of a page with its footnotes; empty if there is nothing to show."""
    if not layout.places or layout.is_hidden:
        return ""
    notes: dict[str, int] = {}
    rows = []
    for row, found in layout.places.items():
        texts = [_entry(layout, found.get(column), explanations, notes) for column in layout.columns]
        rows.append([_said(layout.plan["rows"], row), *texts])
    lent = layout.beneath()
    if lent is not None:
        rows.append([name_of(lent[0]["method"]), _own(lent[1]), *([""] * (len(layout.columns) - 1))])
    head = [", ".join(map(_heading, layout.plan["rows"])), *(_said(layout.plan["columns"], c) for c in layout.columns)]
    about = f"{layout.plan['about'].strip()}\n" if "about" in layout.plan else ""
    parts = [f"{level} {layout.plan['title']}\n", about, markdown(head, rows), _scales(layout)]
    parts += [f"{number}. {text}" for text, number in notes.items()]
    return "\n".join([part for part in parts if part] + [""])


def _layouts(records: Records, plan: Plan) -> list[Layout]:
    return [Layout(records, one, is_ours=not plan.get("published", True)) for one in plan["tables"]]


def _mapped(layouts: Mapping[str, Sequence[Layout]]) -> dict[str, Grid]:
    """Return the tables in the figure of deviations, by title."""
    return {
        f"{plan['title']}\n{layout.plan['title']}": _grid(layout)
        for plan in tables.pages()["pages"]
        for layout in layouts[plan["name"]]
        if layout.plan.get("map") and not layout.is_hidden
    }


def _grid(layout: Layout) -> Grid:
    """Return rows with published values, columns and places."""
    kept = {row: found for row, found in layout.places.items() if any(one.published for one in found.values())}
    rows = [_plain(_said(layout.plan["rows"], row)) for row in kept]
    columns = [_plain(_said(layout.plan["columns"], column)) for column in layout.columns]
    return rows, columns, [[found.get(column) for column in layout.columns] for found in kept.values()]


def _entry(layout: Layout, shown: Shown | None, explanations: Sequence[Plan], notes: dict[str, int]) -> str:
    """Format the published and measured value of one place, with the number of its footnote."""
    if shown is None:
        return ""
    ours = "not measured" if shown.measured is None else _own(shown.measured)
    text = ours if layout.is_ours else f"{figure(shown.value, shown.std)} / {ours}"
    if not shown.deviates:
        return text
    note = explain(layout, shown, explanations)
    return f"{text} <sup>{notes.setdefault(note, len(notes) + 1)}</sup>"


def _own(measured: Measured) -> str:
    swings = "" if measured.last is None else f", last five {figure(measured.last)}"
    return f"{figure(measured.mean, measured.std)} ({len(measured.seeds)}){swings}"


def explain(layout: Layout, shown: Shown, explanations: Sequence[Plan]) -> str:
    """Return the first explanation that matches a deviation, or "Unexplained."."""
    assert shown.measured is not None
    is_reduced = shown.measured.coverage == REDUCED
    fitting = (
        one["text"] for one in explanations if _applies(layout, shown, one) and is_reduced == one.get("reduced", False)
    )
    return str(next(fitting, SMALLER if is_reduced else UNEXPLAINED))


def _applies(layout: Layout, shown: Shown, one: Plan) -> bool:
    """Whether an explanation matches this place, by its cell and measured value."""
    assert shown.measured is not None
    assert shown.value is not None
    if not tables.fits(shown.cell, one.get("when", {})):
        return False
    side = "above" if shown.measured.mean > shown.value else "below"
    if one.get("beyond", side) != side:
        return False
    if "last" in one:
        return shown.measured.last is not None and abs(shown.measured.last - shown.value) <= 2
    if "local" in one:
        local = layout.local(shown)
        return local is not None and local.mean > shown.value
    return True


def _scales(layout: Layout) -> str:
    """Describe how a table's runs are smaller than the paper's, by column, or by row if columns mix scales."""
    smaller = [shown for shown in layout.shown if shown.measured is not None and shown.measured.scale != FULL]
    axes = [_by_scale(layout, smaller, axis) for axis in ("columns", "rows")]
    found = next((one for one in axes if len(set().union(*one.values())) == sum(map(len, one.values()))), axes[0])
    if not found:
        return ""
    said = [f"{'; '.join(names)}: {scale}" for scale, names in found.items()]
    alike = len(found) == 1 and len(next(iter(axes[0].values()))) == len(layout.columns)
    return f"Scale: {next(iter(found)) if alike else '. '.join(said)}.\n"


def _by_scale(layout: Layout, places: Sequence[Shown], axis: str) -> dict[str, list[str]]:
    """Group the names of columns or rows by scale."""
    found: dict[str, dict[str, None]] = {}
    for shown in places:
        assert shown.measured is not None
        place = tuple(shown.cell.get(key) for key in layout.plan[axis])
        found.setdefault(shown.measured.scale, {})[_said(layout.plan[axis], place)] = None
    return {scale: list(names) for scale, names in found.items()}


def _coverage_table(plans: Sequence[Plan], layouts: Mapping[str, Sequence[Layout]]) -> str:
    rows, total = [], Counter[str]()
    for plan in plans:
        counts = {kind: len(cells) for kind, cells in coverage(layouts[plan["name"]], plan["papers"]).items()}
        total.update(counts)
        rows.append([_link(plan), *(str(counts[kind]) for kind in KINDS), str(sum(counts.values()))])
    rows.append(["all", *(str(total[kind]) for kind in KINDS), str(sum(total.values()))])
    return markdown(["paper", *KINDS, "cells"], rows)


def _deviation_table(plans: Sequence[Plan], layouts: Mapping[str, Sequence[Layout]]) -> str:
    """Return statistics of the deviations: each paper's own method, our variant of it, and other methods."""
    rows = []
    for plan in plans:
        own = {claim[key]: said for key, said in OWN.items() for claim in plan["claims"] if key in claim}
        found: dict[str, list[float]] = {said: [] for said in (*OWN.values(), OTHERS)}
        for method, deviation in deviations(layouts[plan["name"]]):
            found[own.get(method, OTHERS)].append(deviation)
        for said, points in found.items():
            if points:
                mean, median = (f(map(abs, points)) for f in (statistics.fmean, statistics.median))
                above, below = sum(one > 1 for one in points), sum(one < -1 for one in points)
                counts = (len(points) - above - below, above, below)
                rows.append([_link(plan), said, str(len(points)), f"{mean:.1f}", f"{median:.1f}", *map(str, counts)])
    head = ["paper", "rows", "places", "mean", "median", "within 1 point", "more than 1 above", "more than 1 below"]
    return markdown(head, rows, left=2)


def _missing(records: Records, plan: Plan, layouts: Sequence[Layout]) -> str:
    """Return the parts of a paper that were not measured, and their cost."""
    left, said = coverage(layouts, plan["papers"])[NONE], tables.pages()["texts"]
    known: set[str] = set()
    rows = [row for one in layouts if not one.plan.get("larger") for row in _left_of(records, one, left, known)]
    head = ["table", "data", "methods", "cells", "runs", "core hours, one seed"]
    parts = [markdown(head, rows, left=3)] if rows else []
    if plan.get("published", True) and not rows:
        parts.append("Every published value was measured.\n")
    others = list(_others(records, layouts, known))
    if others:
        parts += [said["others"], markdown([*head[:3], *head[4:]], others, left=3)]
    return "\n".join([*parts, *([said["hours"]] if rows or others else []), _single(records, layouts)])


def _left_of(records: Records, layout: Layout, left: Sequence[Cell], known: set[str]) -> Iterator[list[str]]:
    """Yield unmeasured published cells of one table by data set; adds their runs to ``known``."""
    found: dict[str, list[Shown]] = {}
    for shown in layout.shown:
        if any(cell in left for cell in shown.published):
            found.setdefault(shown.cell["dataset"], []).append(shown)
    for data, places in found.items():
        asked = [one for shown in places for one in (shown.cell, tables.beside(shown.cell)) if one is not None]
        configs = {tables.config_hash(config): config for config in map(tables.config_of, asked)}
        known.update(configs)
        todo = [config for config in configs.values() if not records.seeds(config)]
        methods = ", ".join(dict.fromkeys(name_of(shown.cell["method"]) for shown in places))
        cells = {json.dumps(cell, sort_keys=True) for shown in places for cell in shown.published}
        yield [layout.plan["title"], name_of(data), methods, str(len(cells)), str(len(todo)), _cost(records, todo)]


def _others(records: Records, layouts: Sequence[Layout], known: set[str]) -> Iterator[list[str]]:
    """Yield missing runs that are not in ``known``, each with the first table that needs it."""
    for layout in layouts:
        found: dict[str, list[Cell]] = {}
        for cell in layout.absent:
            run = tables.config_hash(tables.config_of(cell))
            if run not in known:
                found.setdefault(cell["dataset"], []).append(cell)
            known.add(run)
        for data, cells in found.items():
            methods = ", ".join(dict.fromkeys(name_of(cell["method"]) for cell in cells))
            cost = _cost(records, map(tables.config_of, cells))
            yield [layout.plan["title"], name_of(data), methods, str(len(cells)), cost]


def _single(records: Records, layouts: Sequence[Layout]) -> str:
    """Return the cost of a second seed for runs with one seed."""
    measured = {one.measured.run: one.measured for layout in layouts for one in layout.shown if one.measured}
    once = [sum(one.seconds) for one in measured.values() if len(one.seeds) == 1]
    if not once:
        return ""
    return f"{len(once)} runs have one seed; a second seed of each would take {sum(once) / 3600:.1f} core hours.\n"


def _cost(records: Records, configs: Iterable[Config]) -> str:
    """Return the estimated core hours of runs."""
    costs = [hours(records, config) for config in configs]
    known = [cost for cost in costs if cost is not None]
    return "no similar run" if len(known) < len(costs) else f"{sum(known):.1f}"


def _runs(records: Records, layouts: Sequence[Layout]) -> str:
    """Return number, duration and environment of the runs behind a page."""
    names = {one.measured.run for layout in layouts for one in layout.shown if one.measured is not None}
    lines = [line["result"] for line in records.lines() if line["run"] in names]
    whole, minutes = divmod(round(sum(result["seconds"] for result in lines) / 60), 60)
    known = [result["environment"] for result in lines if "environment" in result]
    made = Counter(f"{one['processor']} ({one['vectors']}), commit {str(one['commit'])[:10]}" for one in known)
    parts = [f"{len(lines)} runs, {whole} h {minutes} min in total; one thread each, most shared the machine."]
    parts += [f"{number} on {machine}." for machine, number in sorted(made.items())]
    older = len(lines) - len(known)
    parts += [f"{older} have no record of commit, versions, processor and date."] if older else []
    return " ".join(parts) + "\n"


def _claim_texts(claim: Claim) -> list[str]:
    gains = [claim.published, claim.original, claim.changed, claim.local]
    return [claim.text.replace("*", r"\*"), claim.verdict, *("-" if gain is None else f"{gain:+.1f}" for gain in gains)]


def _link(plan: Plan) -> str:
    return f"[{plan['title']}]({PAGES}/{plan['name']}.md)"


def _said(keys: Sequence[str], place: Place) -> str:
    """Name a row or column by its values; numbers are prefixed by their key."""
    words = (_value(key, value) for key, value in zip(keys, place, strict=True) if value is not None)
    return ", ".join(word for word in words if word)


def _value(key: str, value: Any) -> str:
    numbered = isinstance(value, int | float) or value == "auto"
    return f"{_heading(key)} = {value}" if numbered else name_of(str(value))


def _heading(key: str) -> str:
    return {"l1_weight": "omega", "alpha_over_F": "alpha / F", "dataset": "data"}.get(key, key)


def _plain(text: str) -> str:
    return text.replace("\\", "").replace("`", "")
