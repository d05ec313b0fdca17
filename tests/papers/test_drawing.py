"""Pictures of recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fl_lightning.papers import figures, tables
from fl_lightning.papers.drawing import draw
from fl_lightning.papers.marked import MARK
from fl_lightning.papers.measure import measure
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import config_hash, select, table
from tests.support.tiny import GLOBAL, TINY, run


def test_weights_of_the_agents_by_round_are_kept_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(json.dumps({**TINY, "trainer": {"max_epochs": 4}}))
    config["model"]["class_path"] = "fl_lightning.methods.WAFFLEAvg"
    config["data"]["init_args"]["fraction"] = 1.0
    result = run(tmp_path / "runs", config)
    assert [len(by_client) for by_client in result["weights"]] == [12] * 4
    assert all(sum(by_client) == pytest.approx(1, abs=1e-3) for by_client in result["weights"])
    own = [by_client[0] for by_client in result["weights"]]
    last = max((i for i, weight in enumerate(own) if weight < 1), default=-1)
    assert result["metrics"].get("local_since") == (last + 2 if last < 3 else None)
    plain = run(tmp_path / "runs", {**TINY, "trainer": {"max_epochs": 4}})
    assert "weights" not in plain
    rows = select(
        table("waffle_avg/table1"), {"dataset": "mnist", "partition": "distribution_C", "method": "waffle_avg,fedavg"}
    )
    rows = [row for row in rows if "agents" not in row]
    monkeypatch.setattr(tables, "table", lambda name: rows)
    monkeypatch.setattr(tables, "config_of", lambda cell, rounds=None: {"method": cell["method"]})
    records = Records(None)
    records.keep("t", {"method": "waffle_avg"}, 0, result)
    records.keep("t", {"method": "fedavg"}, 0, plain)
    drawn: list[Any] = []
    kept = figures.agents
    monkeypatch.setattr(figures, "agents", lambda *args: (drawn.append(args), kept(*args)))
    tmp_path.joinpath("docs").mkdir()
    paths = draw(records, "waffle_avg/table1", tmp_path / "docs")
    assert [list(runs) for runs, *_ in drawn] == [["WAFFLE, as published"]]
    stem = "waffle_avg-table1-mnist-distribution_C"
    assert [path.name for path in paths] == [f"{stem}{k}.png" for k in ("", "-weights", "-groups", "-clients")]
    assert all(path.stat().st_size > 5000 for path in paths)
    with Image.open(paths[1]) as image:
        assert image.text["Software"] == MARK  # type: ignore[attr-defined]


def test_a_study_is_drawn_over_the_key_that_it_varies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    result = {"metrics": {"local_test_acc": 90.0}, "curves": {"local_test_acc": [80.0, 90.0]}, "rounds": 2}
    records = Records(None)
    for cell in table("fedbps/table2"):
        for seed in (0, 1):
            records.keep("t", tables.config_of(cell), seed, result)
    kept = figures.study
    monkeypatch.setattr(figures, "study", lambda *args: (drawn.append(args), kept(*args)))
    paths = draw(records, "fedbps/table2", tmp_path)
    ((lines, path, _, key, _),) = drawn
    assert key == "p"
    assert lines.keys() == {"MNIST", "Fashion-MNIST", "CIFAR-10"}
    assert set(lines["MNIST"]) == {0.3, 0.5, 0.7, 0.9, "auto"}
    assert all(len(results) == 2 for results in lines["MNIST"].values())
    assert path.stat().st_size > 5000
    assert [one.name for one in paths] == ["fedbps-table2-by-p.png"]


def test_pictures_by_round_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"paper": "feddaf", "table": "Table 1", "dataset": "digits", "partition": "eta", "metric": "global_test_acc"}
    rows = [{**cell, "method": "feddaf", "model": "a"}, {**cell, "method": "fedavg", "model": "b"}]
    monkeypatch.setattr(tables, "config_of", lambda cell, rounds=None: json.loads(json.dumps(GLOBAL)))
    monkeypatch.setattr(tables, "table", lambda name: rows)
    records = Records(None)
    records.keep("feddaf/table1", GLOBAL, 0, run(tmp_path / "runs", GLOBAL))
    paths = draw(records, "feddaf/table1", tmp_path)
    kinds = ("", "-loss", "-time", "-seconds", "-fusion")
    expected = {f"feddaf-table1-digits-eta-{m}{k}.png" for m in "ab" for k in kinds}
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in paths} == expected
    measured = measure(records, rows[0])
    assert measured is not None
    assert measured.run == config_hash(GLOBAL)


def test_pictures_that_need_more_than_a_record_are_kept_with_it(tmp_path: Path) -> None:
    source = tmp_path / "results" / "pictures" / "fedbps-table1-a-b-inversion.png"
    figures.save(__import__("fl_lightning.pictures", fromlist=["canvas"]).canvas(), source)
    records = Records(tmp_path / "results")
    (path,) = draw(records, "fedbps/table1", tmp_path / "docs")
    assert path.name == source.name
    assert path.read_bytes() == source.read_bytes()
    assert draw(records, "fedbps/table2", tmp_path / "docs") == []
