"""``fl-lightning reproduce``: what it runs, records, shows and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.cli import main, reproduce
from fl_lightning.cli.workers import Workers
from fl_lightning.errors import FederationError
from fl_lightning.papers import tables
from fl_lightning.papers.measure import measure
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import Cell, Config, config_hash, select, table
from tests.support.tiny import TINY, run

TABLE = "waffle_factor_journal/table2"
FEDAVG = ["--only", "dataset=mnist", "method=fedavg", "partition=unimodal_Z2", "metric=local_test_acc"]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # no cell of a printed table is folded


def give(monkeypatch: pytest.MonkeyPatch, config: Config) -> Config:
    """Let all cells ask for one configuration."""

    def config_of(cell: Cell, rounds: int | None = None) -> Config:
        asked: Config = json.loads(json.dumps(config))
        if rounds is not None:
            asked["trainer"]["max_epochs"] = rounds
        return asked

    monkeypatch.setattr(tables, "config_of", config_of)
    return config_of({})


def test_a_run_that_fails_leaves_the_others_and_is_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {**TINY, "trainer": {"max_epochs": 1}}
    bad = json.loads(json.dumps(good))
    bad["data"]["init_args"]["partition"]["init_args"]["clients"] = [800, 400]
    monkeypatch.setattr(tables, "config_of", lambda cell, rounds=None: bad if cell["method"] == "fedavg" else good)
    only = ["--only", "dataset=mnist", "method=fedavg,fedprox", "partition=unimodal_Z2"]
    with pytest.raises(SystemExit) as end:
        main(["reproduce", TABLE, *only, "--quiet"])
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"FedAvg Digits {config_hash(bad)} seed 0 (" in said
    assert config_hash(good) not in said
    assert [line["run"] for line in Records(Path("results")).lines()] == [config_hash(good)]


def test_a_seed_that_is_given_twice_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(console: Any, records: Any, folder: Any, runs: Any, seeds: list[int], jobs: int) -> dict[str, str]:
        asked.extend(seeds)
        return {}

    monkeypatch.setattr(reproduce, "_run_all", noted)
    with pytest.raises(SystemExit):
        main(["reproduce", TABLE, "--seeds", "1", "0", "1", "--jobs", "2"])
    assert asked == [1, 0]


def test_ctrl_c_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def press(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "begin", lambda *args: None)
    monkeypatch.setattr(Workers, "ended", press)
    with pytest.raises(SystemExit) as end:
        main(["reproduce", TABLE, "--only", "dataset=mnist", "method=fedavg", "--jobs", "2"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "fl-lightning: Stopped: finished runs are kept; repeat the command to continue.\n"


def test_the_command_writes_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = give(monkeypatch, {**TINY, "trainer": {"max_epochs": 2}})
    first, second = (run(tmp_path / "runs", config, seed) for seed in (0, 1))
    Path("results").mkdir()
    Path("results/notes.json").write_text("{}")  # somebody else's
    main(["reproduce", TABLE, *FEDAVG, "--seeds", "0", "1", "0", "--runs", "runs", "--cached"])
    assert {path.name for path in Path("results").rglob("*") if path.is_file()} == {
        *("notes.json", "waffle_factor_journal_table2.jsonl")
    }
    assert not Path("docs").exists()
    records = Records(Path("results"))
    assert [records.result(config, seed) for seed in (0, 1)] == [first, second]
    (cell,) = select(table(TABLE), dict(condition.split("=") for condition in FEDAVG[1:]))
    found = measure(records, cell)
    assert found is not None
    accuracies = [result["metrics"]["local_test_acc"] for result in (first, second)]
    assert found.values == tuple(accuracies)
    assert found.mean == pytest.approx(sum(accuracies) / 2)
    assert (found.seeds, found.scale, found.coverage, found.rounds) == ((0, 1), "full", "full", 2)
    said = " ".join(capsys.readouterr().out.split())
    assert "94.46 ± 0.84" in said
    assert f"{found.mean:.2f}" in said


def test_a_trial_is_shown_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = give(monkeypatch, TINY)
    run(tmp_path / "runs", {**config, "trainer": {"max_epochs": 1}})
    main(["reproduce", TABLE, *FEDAVG, "--rounds", "1", "--runs", "runs", "--cached"])
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 13 rounds" in said
    assert "nothing was recorded" in said
    assert not Path("results").exists()


def test_records_outlive_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = give(monkeypatch, {**TINY, "trainer": {"max_epochs": 2}})
    first = run(tmp_path / "one", config, 0)
    main(["reproduce", TABLE, *FEDAVG, "--cached", "--runs", "one"])
    # Elsewhere another seed is run, and the record of the first is enough to add it to the table.
    second = run(tmp_path / "two", config, 1)
    main(["reproduce", TABLE, *FEDAVG, "--seeds", "0", "1", "--runs", "two"])
    said = "2 runs, 0 to do, 1 in parallel (1 taken from results: with another --results they run again)"
    assert said in " ".join(capsys.readouterr().out.split())
    assert [Records(Path("results")).result(config, seed) for seed in (0, 1)] == [first, second]


def test_list_show_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "--list"])
    assert TABLE in capsys.readouterr().out
    main(["reproduce", TABLE, "--only", "dataset=mnist", "method=fedprox", "--show"])
    (first, *_) = yaml.safe_load_all(capsys.readouterr().out)
    assert first["model"]["init_args"]["mu"] == 1.0
    with pytest.raises(FederationError, match="There is no table 'nope'"):
        table("nope")
    with pytest.raises(FederationError, match="No cell of the table has dataset=cats"):
        select(table(TABLE), {"dataset": "cats"})
    with pytest.raises(FederationError, match="have no 'datasets'; did you mean dataset\\? They have dataset, method"):
        select(table(TABLE), {"datasets": "mnist"})
    for argv in (["nope"], [TABLE, "--only", "mnist"]):
        with pytest.raises(SystemExit) as end:
            main(["reproduce", *argv])
        assert end.value.code == 2
