"""Pages of results: every published cell has its place, every number its record, every page its bytes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.errors import FederationError
from fl_lightning.papers import marked, pages, tables, worth
from fl_lightning.papers.claims import judge
from fl_lightning.papers.coverage import NONE, coverage, hours, uncovered
from fl_lightning.papers.layout import Layout
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import config_hash, config_of, select, table

ROOT = Path(__file__).parents[2]
TABLE = "waffle_factor_journal/table2"
ACCURACIES = {
    "local_test_acc",
    "global_test_acc",
    "best_alice_test_acc_over_rounds",
    "final_alice_test_acc",
    "majority",
}
PLANS = {plan["name"]: plan for plan in tables.pages()["pages"]}


@cache
def kept() -> Records:
    """The records that are kept with the code."""
    return Records(ROOT / "results")


@cache
def layouts(name: str) -> tuple[Layout, ...]:
    return tuple(Layout(kept(), plan, not PLANS[name].get("published", True)) for plan in PLANS[name]["tables"])


def every() -> list[Layout]:
    return [layout for name in PLANS for layout in layouts(name)]


def test_every_published_cell_has_a_place() -> None:
    assert uncovered(every()) == []
    counted = [
        cell for plan in PLANS.values() for cells in coverage(every(), plan["papers"]).values() for cell in cells
    ]
    assert len(counted) == len(tables.published()) == 461


@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.get("published", True)])
def test_cells_without_a_record_are_listed_as_missing(name: str) -> None:
    missing = coverage(layouts(name), PLANS[name]["papers"])[NONE]
    listed = pages.paper_page(kept(), PLANS[name], layouts(name)).partition("## Not measured")[2]
    counts = re.findall(r"\| (\d+) \| \d+ \| [^|]* \|$", listed.partition("## Runs")[0], flags=re.MULTILINE)
    assert sum(map(int, counts)) == len(missing)


def test_a_cell_that_loses_its_records_is_listed(tmp_path: Path) -> None:
    """With its run, once, and rows of our own apart from published ones."""
    plan, fewer = PLANS["waffle"], Records(tmp_path)
    asked = {"dataset": "cifar10", "partition": "unimodal_Z2", "method": "waffle_factor_joint,local"}
    cells = select(table(TABLE), asked)
    hashes = {config_hash(config_of(cell)) for cell in cells}
    for path in (ROOT / "results").glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        kept_lines = [line for line in lines if line[8:24] not in hashes]
        (tmp_path / path.name).write_text("".join(kept_lines))

    def listed(found: Records) -> tuple[str, str]:
        text = pages.paper_page(found, plan, [Layout(found, one) for one in plan["tables"]])
        first, _, second = text.partition("## Not measured")[2].partition("Additional runs")
        return first, second

    title = plan["tables"][0]["title"]
    row = f"| {title} | CIFAR-10 |"
    assert row not in "".join(listed(kept()))
    first, second = listed(fewer)
    assert row not in first, "our variant stands beside the same published values and was measured"
    assert re.search(rf"{re.escape(row)} [^|]*Local[^|]* \| 2 \|", second)
    assert re.search(rf"{re.escape(row)} [^|]*as published[^|]* \| 2 \|", second)


@pytest.mark.parametrize("name", PLANS)
def test_every_run_that_a_page_asks_for_is_recorded_or_listed_with_its_cost(name: str) -> None:
    absent = {config_hash(config_of(cell)) for layout in layouts(name) for cell in layout.absent}
    for cell in (cell for layout in layouts(name) for cell in layout.absent):
        other = tables.beside(cell)
        absent |= {config_hash(config_of(other))} if other and not kept().seeds(config_of(other)) else set()
    listed = (
        pages.paper_page(kept(), PLANS[name], layouts(name)).partition("## Not measured")[2].partition("## Runs")[0]
    )
    counts = re.findall(r"\| (\d+) \| ([^|]*) \|$", listed, flags=re.MULTILINE)
    assert sum(int(runs) for runs, _ in counts) >= len(absent)
    assert all(float(cost) >= 0 for _, cost in counts)


def test_local_is_under_every_table_of_accuracies() -> None:
    """Measured or listed as missing; where clients have no model of their own it is in the table after."""
    for name in ("waffle", "waffle-avg", "feddaf", "fedbps"):
        for layout in layouts(name):
            metrics = {shown.cell["metric"] for shown in layout.shown}
            if not metrics & ACCURACIES:
                continue
            asked = {cell["method"] for cell in [*layout.absent, *(one.cell for one in layout.shown)]}
            beneath = layout.beneath() is not None
            assert "local" in asked or beneath or metrics == {"global_test_acc"} or layout.plan.get("larger"), (
                layout.plan
            )


def test_every_number_rests_on_the_records_of_its_recipe() -> None:
    for layout in every():
        for shown in layout.shown:
            if shown.measured is not None:
                config = config_of(shown.cell)
                assert shown.measured.run == config_hash(config)
                found = [kept().result(config, seed) for seed in shown.measured.seeds]
                assert None not in found


def test_every_record_is_asked_for_by_a_cell() -> None:
    asked = {config_hash(config_of(cell)) for cells in tables.tables().values() for cell in cells}
    assert [line["run"] for line in kept().lines() if line["run"] not in asked] == []


def test_the_pages_are_those_of_the_records() -> None:
    """Byte for byte; pictures are not looked at, as fonts differ between machines."""
    found = {name: layouts(name) for name in PLANS}
    texts = {"results.md": pages.front_page(kept(), found)}
    texts |= {f"results/{name}.md": pages.paper_page(kept(), plan, found[name]) for name, plan in PLANS.items()}
    texts["results/map.md"] = worth.page(kept(), "../pictures/results/map.png")
    for name, text in texts.items():
        said = "fl-lightning reproduce --docs docs writes it again"
        assert (ROOT / "docs" / name).read_text() == f"{text.rstrip()}\n\n{marked.COMMENT}\n", said


def test_every_picture_is_shown_by_a_page() -> None:
    shown = {path for page in (ROOT / "docs").rglob("*.md") for path in re.findall(r"[\w*.-]+\.png", page.read_text())}
    drawn = {path.name for path in (ROOT / "docs" / "pictures" / "results").rglob("*.png")}
    assert drawn - shown == set()


def test_deviations_have_a_footnote_and_small_ones_have_none() -> None:
    plan = PLANS["waffle"]
    (layout,) = (one for one in layouts("waffle") if one.plan["title"].startswith("Accuracy"))
    text = pages.section(layout, plan["explanations"])
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    entries = [entry for row in rows for entry in row.split("|")[2:-1]]
    checked = 0
    for entry in entries:
        numbers = re.match(r" ([\d.]+)(?: ± [\d.]+)? / ([\d.]+)", entry)
        if numbers:
            far = abs(float(numbers[1]) - float(numbers[2])) > 2
            assert ("<sup>" in entry) == far, entry
            checked += 1
    assert checked > 25
    notes = {int(number) for number in re.findall(r"<sup>(\d+)</sup>", text)}
    assert notes == {int(number) for number in re.findall(r"^(\d+)\. ", text, flags=re.MULTILINE)}


def test_the_original_and_ours_share_a_published_value_and_local_has_none() -> None:
    (layout,) = (one for one in layouts("waffle") if one.plan["title"].startswith("Accuracy"))
    rows = {row[0]: next(iter(places.values())) for row, places in layout.places.items()}
    assert list(rows) == ["fedavg", "fedprox", "qffl", "waffle_factor_joint", "waffle_factor", "local"]
    assert rows["waffle_factor_joint"].value == rows["waffle_factor"].value == 96.23
    assert rows["waffle_factor"].std == 0.31  # printed by the conference alone
    assert len(rows["fedavg"].published) == 2
    assert rows["local"].value is None


def test_clustered_methods_stand_beside_the_published_value_by_local_test() -> None:
    whole, local = layouts("feddaf")[:2]
    clustered = {("fesem",), ("ifca",), ("fedgroup",)}
    assert all(not one.published for row in clustered for one in whole.places[row].values())
    for row in clustered:
        for one in local.places[row].values():
            assert one.cell["metric"] == "local_test_acc"
            assert one.published[0]["metric"] == "global_test_acc"


def result(accuracy: float, **more: Any) -> dict[str, Any]:
    metrics = {"local_test_acc": accuracy, "majority": accuracy, "minority": accuracy, "variance": 1.0}
    return {"metrics": metrics, "curves": {}, "seconds": 3600.0, "rounds": 1, **more}


def records(**accuracies: float) -> Records:
    """Records of methods on MNIST, unimodal."""
    found = Records(None)
    for method, accuracy in accuracies.items():
        cell = {"dataset": "mnist", "method": method, "partition": "unimodal_Z2", "metric": "local_test_acc"}
        (asked,) = select(table(TABLE), cell)
        found.keep(TABLE, config_of(asked), 0, result(accuracy))
    return found


CLAIM = {
    "claim": "ahead",
    "of": TABLE,
    "where": {"dataset": "mnist", "partition": "unimodal_Z2", "metric": "local_test_acc"},
    "better": "waffle_factor",
    "than": "fedavg",
    "original": "waffle_factor_joint",
    "changed": "waffle_factor",
}


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ({"fedavg": 90.0, "waffle_factor_joint": 90.9}, "reproduced"),  # 1.77 are published
        ({"fedavg": 90.0, "waffle_factor_joint": 90.8}, "not reproduced"),
        ({"fedavg": 90.0, "waffle_factor_joint": 89.0, "waffle_factor": 91.0}, "only with a changed method"),
        ({"fedavg": 90.0}, "not tested at scale"),
        ({"waffle_factor_joint": 90.0}, "not tested at scale"),
    ],
)
def test_verdicts(accuracies: dict[str, float], verdict: str) -> None:
    claim = judge(records(**accuracies), CLAIM)
    assert claim.published == pytest.approx(96.23 - 94.46)
    assert claim.verdict == verdict


def test_a_smaller_run_tests_no_claim() -> None:
    assert judge(kept(), PLANS["feddaf"]["claims"][0]).verdict == "not tested at scale"


def test_explanations_are_chosen_by_what_was_measured() -> None:
    """A row that is above its published value is explained by Local only where Local is, too."""
    plan = PLANS["waffle"]

    def footnote(**accuracies: float) -> str:
        layout = Layout(records(**accuracies), {**plan["tables"][0], "where": CLAIM["where"]})
        shown = next(iter(layout.places["waffle_factor",].values()))
        return pages.explain(layout, shown, plan["explanations"])

    assert footnote(waffle_factor=99.0) == pages.UNEXPLAINED
    assert footnote(waffle_factor=99.0, local=96.0) == pages.UNEXPLAINED
    assert footnote(waffle_factor=99.0, local=96.5).startswith("Local, which trains as often")
    assert footnote(waffle_factor=90.0, local=96.5) == pages.UNEXPLAINED


def test_what_a_run_would_cost_by_hand() -> None:
    found = records(fedavg=90.0)
    (cell,) = select(table("waffle_factor_journal/table6"), {"dataset": "mnist", "method": "fedavg", "E": "20"})
    # A hundred rounds of five epochs took an hour; fifty of twenty are twice as many.
    assert hours(found, config_of(cell)) == pytest.approx(2.0)
    # Local trains with every client in five of these rounds, not with a tenth of them in fifty: as much as they do.
    (alone,) = select(table("waffle_factor_journal/table6"), {"dataset": "mnist", "method": "local", "E": "20"})
    assert hours(found, config_of(alone)) == pytest.approx(2.0)
    (other,) = select(table("waffle_factor_journal/table6"), {"dataset": "cifar10", "method": "fedavg", "E": "20"})
    assert hours(found, config_of(other)) is None


def test_what_a_larger_run_would_cost_by_hand() -> None:
    found, cells = Records(None), table("fedbps/table1")
    small, large = (
        config_of(select(cells, {"dataset": "mnist", "method": "fedavg", "images": images})[0])
        for images in ("None", "all")
    )
    found.keep("fedbps/table1", small, 0, result(90.0))
    assert hours(found, large) == pytest.approx(5.0)  # 70,000 images and not 14,000
    ten, twenty = (
        config_of(select(table("waffle_avg/table1"), {"partition": "distribution_B*", "method": "apfl", **asked})[0])
        for asked in ({"dataset": "mnist", "agents": "None"}, {"agents": "20"})
    )
    found.keep("waffle_avg/table1", ten, 0, result(90.0))
    # Ten agents of 2,000 samples each took an hour; four fifths of all of MNIST are 2.8 times as much.
    assert hours(found, twenty) == pytest.approx(2.8)


def test_tables_of_larger_runs_are_shown_once_there_is_one() -> None:
    (plan,) = (one for one in PLANS["fedbps"]["tables"] if one["title"] == "Accuracy, all images (Table 1)")
    found = Records(None)
    assert pages.section(Layout(found, plan)) == ""
    (cell,) = select(table("fedbps/table1"), {"dataset": "mnist", "method": "fedavg", "images": "all"})
    found.keep("fedbps/table1", config_of(cell), 0, result(98.0))
    assert "| FedAvg | 98.49 / 98.00 (1) | 87.28 / not measured |" in pages.section(Layout(found, plan))


def test_deviations_in_figures_by_hand() -> None:
    """94.46, 96.23 (as published and ours) and 91.46 are published; a value that two tables print counts once."""
    found = records(fedavg=95.0, waffle_factor_joint=92.0, waffle_factor=98.0, qffl=94.0, local=50.0)
    plan = PLANS["waffle"]
    made = {"waffle": [Layout(found, one) for one in plan["tables"]]}
    rows = pages._deviation_table([plan], made).splitlines()[2:]
    assert [row.split("| ", 2)[2] for row in rows] == [
        "its method, as published | 1 | 4.2 | 4.2 | 0 | 0 | 1 |",
        "its method, ours | 1 | 1.8 | 1.8 | 0 | 1 | 0 |",
        "other methods | 2 | 1.5 | 1.5 | 1 | 1 | 0 |",
    ]
    reduced = {"feddaf": layouts("feddaf")}
    assert len(pages._deviation_table([PLANS["feddaf"]], reduced).splitlines()) == 2, "no smaller run is compared"


def test_the_table_of_readme_by_hand() -> None:
    found = Records(None)
    (cell,) = select(
        table(TABLE), {"dataset": "mnist", "method": "local", "partition": "multimodal_Z2", "metric": "local_test_acc"}
    )
    for seed, accuracy in enumerate((98.0, 97.0)):
        found.keep(TABLE, config_of(cell), seed, result(accuracy))
    first, _, local, *others = pages.readme_table(found).splitlines()
    assert first == "| method | all clients | majority | minority | variance |"
    assert local == "| Local | 97.5 ± 0.7 | 97.5 ± 0.7 | 97.5 ± 0.7 | 1.0 ± 0.0 |"
    assert [row.split("|")[1].strip() for row in others] == list(pages.ROWS)[1:]


def test_pages_are_written_with_a_mark_and_nothing_else_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**tables.pages(), "pages": [PLANS["fedbps"]]}
    monkeypatch.setattr(tables, "pages", lambda: small)
    written = pages.write_pages(Records(None), tmp_path)
    assert all(marked.is_marked(path) for path in written)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(written)
    old = marked.write_text(tmp_path / "results" / "old.md", "a page of earlier times")
    other = tmp_path / "results" / "notes.md"
    other.write_text("somebody's own")
    again = pages.write_pages(Records(None), tmp_path)
    assert set(again) == set(written)
    assert not old.exists()
    assert other.read_text() == "somebody's own"
    (tmp_path / "results.md").write_text("somebody's own")
    with pytest.raises(FederationError, match=r"results\.md was not written by fl-lightning reproduce: move it away"):
        pages.write_pages(Records(None), tmp_path)
    assert (tmp_path / "results.md").read_text() == "somebody's own"


def test_pages_of_curves_show_the_pictures_that_are_there() -> None:
    """Byte for byte, with the pictures that were drawn when they were written."""
    for name, plan in PLANS.items():
        text = (ROOT / "docs" / "results" / f"{name}-curves.md").read_text()
        shown = [Path(path) for path in re.findall(r"\]\((\S+\.png)\)", text)]
        pictures = {
            one: [path for path in shown if path.name.startswith(f"{one.replace('/', '-')}-")] for one in plan["curves"]
        }
        assert text == f"{pages.curves_page(plan, pictures).rstrip()}\n\n{marked.COMMENT}\n"
        assert all((ROOT / "docs" / "results" / path).exists() for path in shown)
