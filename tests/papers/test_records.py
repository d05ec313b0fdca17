"""Records of runs, in one file of lines for each table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.errors import FederationError
from fl_lightning.papers.measure import SWING, measure
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import config_hash, config_of, select, table

CONFIG: dict[str, Any] = {"trainer": {"max_epochs": 2}, "data": {"class_path": "b", "init_args": {"a": 1}}}


def test_a_record_is_a_line_and_lines_are_in_order(tmp_path: Path) -> None:
    records = Records(tmp_path / "results")
    for seed in (1, 0):
        records.keep("paper/table1", CONFIG, seed, {"metrics": {"b": 1.5, "a": seed}})
    path = tmp_path / "results" / "paper_table1.jsonl"
    name = config_hash(CONFIG)
    rest = '"config":{"data":{"class_path":"b","init_args":{"a":1}},"trainer":{"max_epochs":2}}'
    assert path.read_text() == "".join(
        f'{{"run":"{name}","seed":{seed},{rest},"result":{{"metrics":{{"a":{seed},"b":1.5}}}}}}\n' for seed in (0, 1)
    )
    again = Records(tmp_path / "results")
    assert again.seeds(CONFIG) == [0, 1]
    assert again.result(CONFIG, 1) == {"metrics": {"b": 1.5, "a": 1}}
    assert again.result(CONFIG, 2) is None


def test_a_run_that_two_tables_ask_for_is_recorded_once(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.keep("paper/table1", CONFIG, 0, {"a": 1})
    records.keep("paper/table2", CONFIG, 0, {"a": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["paper_table1.jsonl"]
    assert Records(tmp_path).result(CONFIG, 0) == {"a": 2}


def test_a_trial_is_kept_in_memory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = Records(None)
    records.keep("paper/table1", CONFIG, 0, {"a": 1})
    assert records.result(CONFIG, 0) == {"a": 1}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"run": "a", "seed": 0}'])
def test_a_damaged_line_is_named(tmp_path: Path, text: str) -> None:
    Records(tmp_path).keep("paper/table1", CONFIG, 0, {"a": 1})
    path = tmp_path / "paper_table1.jsonl"
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(FederationError, match=r"paper_table1\.jsonl, line 2, is not a record"):
        Records(tmp_path).seeds(CONFIG)


def result(curve: list[float], **more: float) -> dict[str, Any]:
    metrics = {"local_test_acc": curve[-1], **more}
    return {"metrics": metrics, "curves": {"local_test_acc": curve}, "seconds": 2.0}


def test_mean_spread_and_swing_of_a_cell_by_hand() -> None:
    (cell,) = select(table("waffle_factor_journal/table8"), {"method": "qffl"})
    config, records = config_of(cell), Records(None)
    assert measure(records, cell) is None
    records.keep("t", config, 0, result([10.0, 80.0, 81.0, 82.0, 83.0, 84.0]))
    records.keep("t", config, 3, result([10.0, 86.0, 86.0, 86.0, 86.0, 86.0]))
    found = measure(records, cell)
    assert found is not None
    assert (found.values, found.seeds, found.mean, found.seconds) == ((84.0, 86.0), (0, 3), 85.0, (2.0, 2.0))
    assert found.std == pytest.approx(2**0.5)
    # The last five rounds of seed 0 have a standard deviation of sqrt 2, above SWING.
    assert SWING == 1.0
    assert found.last == pytest.approx((82.0 + 86.0) / 2)
    calm = measure(records, cell, seeds=[3])
    assert calm is not None
    assert (calm.std, calm.last) == (None, None)


def test_a_gain_is_the_difference_between_two_runs() -> None:
    (cell,) = select(table("waffle_factor_journal/textg1"), {"partition": "unimodal_Z3", "method": "waffle_factor"})
    records = Records(None)
    base = {**cell, "method": "fedavg"}
    records.keep("t", config_of(cell), 0, result([71.0]))
    assert measure(records, cell) is None
    records.keep("t", config_of(base), 0, result([64.5]))
    found = measure(records, cell)
    assert found is not None
    assert found.values == (6.5,)


def test_records_name_what_their_configuration_says() -> None:
    """Every record that is kept with the code."""
    root = Path(__file__).parents[2] / "results"
    lines = [json.loads(text) for path in sorted(root.glob("*.jsonl")) for text in path.read_text().splitlines()]
    assert len(lines) > 500
    assert [line["run"] for line in lines if line["run"] != config_hash(line["config"])] == []
    names = [(line["run"], line["seed"]) for line in lines]
    assert len(set(names)) == len(names)
    assert all(line["config"]["data"]["init_args"]["val_fraction"] == 0 for line in lines)
