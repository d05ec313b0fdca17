"""``fl-lightning compare``: what runs left behind, side by side."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning.cli import main
from fl_lightning.cli.compare import experiments_of, populations, summary
from fl_lightning.cli.runs import find
from fl_lightning.errors import FederationError
from tests.support.browser import colours, screenshot

Maker = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """Writes the record of a run with hand-made numbers."""

    def write(name: str, seed: int = 0, final: float = 0.8, **settings: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        scores = [[0.5, 0.4, 0.3, 0.0], [final + 0.1, final + 0.1, final, final - 0.2]]
        means = [sum(row) / 4 for row in scores]
        curve = {"rounds": [0, 1]}
        record = {
            "format": 1,
            "settings": {"method": name.partition("-")[0], "lr": 0.1, "seed": seed, **settings},
            "rounds": 2,
            "seconds": 4.0,
            "steps": 200,
            "engine": "stacked",
            "bytes": [3_000_000, 5_000_000],
            "parameters": 1000,
            "curves": {
                "test/acc": {**curve, "values": means},
                "comm/up_bytes": {**curve, "values": [1.5e6, 1.5e6]},
                "comm/down_bytes": {**curve, "values": [2.5e6, 2.5e6]},
                "privacy/auroc": {**curve, "values": [0.6, 0.7]},
            },
            "clients": {"rounds": [0, 1], "accuracy": scores},
            "groups": {"mode": [0, 0, 0, 1]},
        }
        (folder / "run.json").write_text(json.dumps(record))
        return folder

    return write


class Addresses(HTMLParser):
    """All that a page would load, and its balanced tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.anchors: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [value for key in ("src", "srcset") if (value := given.get(key))]
        self.anchors += [value[1:] for key in ("href",) if (value := given.get(key)) and value.startswith("#")]
        self.ids += [value] if (value := given.get("id")) else []
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_numbers_are_those_of_the_last_round(make: Maker) -> None:
    experiments = experiments_of(find([str(make("FedAvg", final=0.8)), str(make("Local", final=0.6))]))
    sheet = summary(experiments)
    assert sheet.columns[:4] == ["run", "mean %", "worst tenth %", "variance (%²)"]
    row = sheet.rows[0]
    scores = np.array([90.0, 90.0, 80.0, 60.0])
    assert row[1:4] == [f"{scores.mean():.2f}", "60.00", f"{scores.var():.2f}"]
    assert sheet.best == {}, "one seed makes no winner"
    groups = populations(experiments)
    assert groups is not None
    assert groups.columns == ["run", "all %", "majority %", "minority %", "gap %", "variance (%²)"]
    assert groups.rows[0][1:5] == ["80.00", "86.67", "60.00", "26.67"]


def test_seeds_are_averaged_and_names_tell_runs_apart(make: Maker) -> None:
    folders = [make("FedAvg-0", 0, 0.8), make("FedAvg-1", 1, 0.7), make("FedAvg-2", 0, 0.6, lr=0.5), make("Local")]
    experiments = experiments_of(find(map(str, folders)))
    assert [one.name for one in experiments] == ["FedAvg (lr=0.1)", "FedAvg (lr=0.5)", "Local"]
    assert summary(experiments).rows[0][1] == "75.00 ± 7.07"


def test_the_best_of_repeated_runs_is_marked(make: Maker) -> None:
    folders = [make("FedAvg-0", 0, 0.8), make("FedAvg-1", 1, 0.7), make("Local-0", 0, 0.6), make("Local-1", 1, 0.5)]
    sheet = summary(experiments_of(find(map(str, folders))))
    assert (sheet.best[1], sheet.best[3]) == (0, 0)
    assert "**75.00 ± 7.07**" in sheet.markdown()


def test_names_show_of_a_partition_what_differs_alone(make: Maker) -> None:
    ten = "Unimodal(clients=10, classes_per_client=2, distinct=False)"
    folders = [make("FedAvg-0", partition=ten), make("FedAvg-1", partition=ten.replace("10", "20"), temperature=2 / 3)]
    names = [one.name for one in experiments_of(find(map(str, folders)))]
    assert names == ["FedAvg (clients=10, temperature=none)", "FedAvg (clients=20, temperature=0.6667)"]
    folders.append(make("FedAvg-2", partition="IID(clients=10)"))
    names = [run.name.partition(",")[0] for run in find(map(str, folders))]
    assert names == ["FedAvg (partition=Unimodal", "FedAvg (partition=Unimodal", "FedAvg (partition=IID"]


def test_the_report_says_data_units_and_names_in_words(make: Maker, tmp_path: Path) -> None:
    def drawn(figure: Any) -> str:
        (axes,) = figure.axes
        legend = [text.get_text() for one in figure.legends for text in one.get_texts()]
        lines = [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in axes.lines]
        return json.dumps({"title": axes.get_title(), "y": axes.get_ylabel(), "legend": legend, "lines": lines})

    folders = [str(make("FedAvg", data="Digits", clients=4)), str(make("Local", final=0.6, data="Digits", clients=4))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fl_lightning.pictures.embedded", lambda figure: drawn(figure) if len(figure.axes) == 1 else "")
        main(["compare", *folders, "--out", str(tmp_path / "out"), "--quiet"])
    text = html.unescape((tmp_path / "out" / "report.html").read_text())
    found = {one["title"]: one for line in re.findall(r'src="({.*?})"', text) if (one := json.loads(line))}
    mean = found["mean over clients"]
    assert (mean["y"], mean["legend"]) == ("accuracy (%)", ["FedAvg", "Local"])
    assert mean["lines"][0] == [[1.0, 2.0], [30.0, pytest.approx(80.0)]]
    assert not any("/" in title for title in found)
    assert "<dt>clients</dt><dd>4</dd>" in text
    assert "<dt>seeds</dt><dd>0; one for each, so no differences are marked</dd>" in text
    assert "<th>MB sent up, in a round</th>" in text
    assert "<td>1.5</td>" in text
    assert "val/" not in text
    assert "comm/" not in text


def test_the_same_run_twice_is_told_apart_by_its_folder(make: Maker) -> None:
    runs = find([str(make("FedAvg-a")), str(make("FedAvg-b"))])
    assert [run.name.partition(" [")[0] for run in runs] == ["FedAvg", "FedAvg"]
    assert len({run.name for run in runs}) == 2
    assert len(experiments_of(runs)) == 2


def test_the_report_needs_nothing_else(make: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("FedAvg", final=0.8)
    make("Local", final=0.6)
    main(["compare", str(tmp_path), "--out", str(tmp_path / "out"), "--title", "A < B"])
    printed = capsys.readouterr().out
    assert "worst tenth" in printed
    assert "report.html" in printed
    text = (tmp_path / "out" / "report.html").read_text()
    page = Addresses()
    page.feed(text)
    assert page.open == []
    assert page.loads
    assert all(address.startswith("data:image/") for address in page.loads)
    assert not re.search(r"<(script|link|iframe)|url\(|@import", text)
    assert set(page.anchors) <= set(page.ids)
    for section in ("Result", "Learning-curves", "Clients", "Privacy", "Communication", "Speed", "Settings"):
        assert section in page.ids
    assert "A &lt; B" in text
    assert "@media print" in text


def test_markdown_and_latex_tables(make: Maker, tmp_path: Path) -> None:
    make("FedAvg", final=0.8)
    make("Local", final=0.6)
    main(["compare", str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"])
    markdown = (tmp_path / "out" / "table.md").read_text()
    assert "| FedAvg | 80.00 | 60.00 |" in markdown
    latex = (tmp_path / "out" / "table.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 4
    assert r"mean \%" in latex
    assert r"\textbf" not in latex, "one seed makes no winner"


def test_quiet_prints_nothing(make: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", str(make("FedAvg")), "--out", str(tmp_path / "out"), "--quiet"])
    assert capsys.readouterr().out == ""


def cell(folder: Path, accuracy: float = 70.0, **more: Any) -> None:
    """Writes the result of a cell of ``reproduce``."""
    folder.mkdir()
    result = {
        "metrics": {"parameters": 10},
        "rounds": 2,
        "seconds": 3.0,
        "engine": "captured",
        "bytes": [1, 2],
        "curves": {"local_test_acc": [50.0, accuracy]},
        "clients": [accuracy - 10, accuracy + 10],
        "modes": [],
        **more,
    }
    (folder / "result.json").write_text(json.dumps(result))


def test_cells_of_reproduce_are_runs(tmp_path: Path) -> None:
    cell(tmp_path / "0123-seed2")
    (run,) = find([str(tmp_path)])
    assert run.curves["test/acc"] == ([0, 1], [0.5, 0.7])
    assert run.final["test/acc"] == 0.7
    assert (run.settings["seed"], run.engine) == ("2", "captured")


@pytest.mark.parametrize(
    ("more", "names"), [({}, ["0123", "4567"]), ({"method": "FedAvg"}, ["FedAvg (run=0123)", "FedAvg (run=4567)"])]
)
def test_cells_are_averaged_over_their_seeds(more: dict[str, str], names: list[str], tmp_path: Path) -> None:
    for name, accuracy in (("0123-seed0", 60.0), ("0123-seed1", 80.0), ("4567-seed0", 90.0)):
        cell(tmp_path / name, accuracy, **more)
    experiments = experiments_of(find([str(tmp_path)]))
    assert [one.name for one in experiments] == names
    assert [row[1] for row in summary(experiments).rows] == ["70.00 ± 14.14", "90.00"]


def test_a_run_without_a_validated_round(make: Maker, tmp_path: Path) -> None:
    path = make("FedAvg") / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"curves": {}, "clients": {"rounds": [], "accuracy": []}}))
    main(["compare", str(tmp_path), "--out", str(tmp_path / "alone"), "--quiet"])
    make("Local", final=0.6)
    main(["compare", str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"])
    assert "| Local | 60.00 |" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(("text", "sentence"), [("{", "cannot be read"), ("[]", "is not the"), ("{}", "is not the")])
def test_a_damaged_result_is_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    cell(tmp_path / "0123-seed0")
    (tmp_path / "0123-seed0" / "result.json").write_text(text)
    with pytest.raises(FederationError, match=sentence):
        find([str(tmp_path)])


def test_runs_with_tensorboards_events_alone(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "old")) as writer:
        for step, value in enumerate((0.5, 0.75)):
            writer.add_scalar("test/acc", value, step)
            writer.add_scalar("percent/test/acc", 100 * value, step)
            writer.add_scalar("comm/up_bytes", 10, step)
            writer.add_scalar("comm/down_bytes", 20, step)
    (run,) = find([str(tmp_path)])
    assert run.final["test/acc"] == 0.75
    assert set(run.curves) == {"test/acc", "comm/up_bytes", "comm/down_bytes"}
    assert run.traffic == (20, 40)
    main(["compare", str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"])
    assert "Learning-curves" in (tmp_path / "out" / "report.html").read_text()


def test_settings_that_lightning_wrote_as_python_objects(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.0.x").write_bytes(b"")
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\npersonal: !!python/tuple\n- head\n")
    (run,) = find([str(tmp_path)])
    assert run.settings == {"lr": 0.1, "personal": None}
    (tmp_path / "hparams.yaml").write_text("lr: [")
    with pytest.raises(FederationError, match=r"hparams.yaml cannot be read"):
        find([str(tmp_path)])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="There is no run in"):
        find([str(tmp_path)])
    with pytest.raises(FederationError, match="There is no run"):
        find([str(tmp_path / "nowhere")])


@pytest.mark.slow
def test_the_report_in_a_browser(make: Maker, tmp_path: Path) -> None:
    main(["compare", str(make("FedAvg")), "--out", str(tmp_path / "out"), "--quiet"])
    screenshot(f"file://{tmp_path}/out/report.html", tmp_path / "report.png")
    assert colours(tmp_path / "report.png") > 100
