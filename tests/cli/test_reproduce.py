"""Published tables as data, cells as cached and resumable runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.cli import cells, figures, main, reproduce
from fl_lightning.cli import tables as tables_module
from fl_lightning.cli.lightning import FederatedCLI
from fl_lightning.cli.records import Records
from fl_lightning.cli.results import time_of
from fl_lightning.cli.tables import config_hash, config_of, line_name, scale_of, select, table, tables
from fl_lightning.cli.workers import Workers
from fl_lightning.errors import FederationError

TINY: dict[str, Any] = {
    "trainer": {"max_epochs": 13},
    "model": {
        "class_path": "fl_lightning.methods.FedAvg",
        "init_args": {
            "net": {"class_path": "fl_lightning.nets.MLP", "init_args": {"in_features": 64, "hidden": [8]}},
            "lr": 0.1,
            "engine": "stacked",
        },
    },
    "data": {
        "class_path": "fl_lightning.datamodules.Digits",
        "init_args": {
            "fraction": 0.5,
            "partition": {
                "class_path": "fl_lightning.datamodules.Multimodal",
                "init_args": {"modes": [[0, 1, 2, 3], [4, 5]], "clients": [8, 4]},
            },
        },
    },
}


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_different_part_of_a_run_of_every_table_parses() -> None:
    class Parsed(FederatedCLI):
        def instantiate_classes(self) -> None:
            """Only parse."""

    def kind(value: Any) -> Any:
        """What tells configurations that are parsed differently: names and classes, not numbers."""
        if isinstance(value, dict):
            return tuple(sorted((key, kind(item)) for key, item in value.items()))
        return value if isinstance(value, str) else type(value).__name__

    configs = [config_of(cell) for found in tables().values() for cell in found]
    assert len({config_hash(config) for config in configs}) > 200
    # The trainer, the model and the data are parsed one by one: every different one of each is in some run.
    parts = {kind({part: config[part]}): config for config in configs for part in config}
    assert len(parts) > 50
    for config in {config_hash(config): config for config in parts.values()}.values():
        assert Parsed(args=config, run=False).config["model"]["class_path"] == config["model"]["class_path"]


def test_the_papers_settings_reach_the_run() -> None:
    (cell,) = select(table("waffle_factor_journal/table6"), {"dataset": "mnist", "method": "fedavg", "E": "20"})
    config = config_of(cell)
    assert config["trainer"]["max_epochs"] == 50
    assert config["model"]["init_args"]["epochs"] == 20
    assert config["model"]["init_args"]["lr"] == 0.04
    (cell,) = select(table("waffle_factor_journal/table7"), {"dataset": "mnist", "method": "fedavg", "E": "30"})
    assert config_of(cell)["model"]["init_args"]["lr"] == 0.02
    (cell,) = select(table("waffle_factor_journal/table9"), {"F": "80", "alpha_over_F": "0.4"})
    assert config_of(cell)["model"]["init_args"]["factors"] == {"fc1": 80}
    assert config_of(cell)["model"]["init_args"]["alpha_ratio"] == 0.4


def test_one_run_serves_all_cells_that_ask_for_it() -> None:
    accuracy = select(table("waffle_factor_journal/table2"), {"dataset": "mnist", "partition": "multimodal_Z2"})
    groups = select(table("waffle_factor_journal/table1"), {"dataset": "mnist"})
    assert {config_hash(config_of(c)) for c in accuracy} == {config_hash(config_of(c)) for c in groups}


def test_one_run_is_one_line_of_a_picture() -> None:
    """An attack's views are figures of one run."""
    for name in ("waffle_factor_journal/table3", "waffle_factor_journal/table4", "fl_lightning/privacy"):
        lines: dict[str, set[str]] = {}
        for cell in table(name):
            if cell["metric"] != "parameters":
                lines.setdefault(config_hash(config_of(cell)), set()).add(line_name(cell))
        assert {len(names) for names in lines.values()} == {1}, name


def test_alice_alone_is_evaluated_and_smaller_scales_are_said() -> None:
    cells_of_table = table("waffle_avg/table1")
    assert {cell["partition"] for cell in cells_of_table} == {f"distribution_{x}" for x in ("A", "B", "C", "A*", "B*")}
    for cell in cells_of_table:
        config = config_of(cell)
        assert config["data"]["init_args"]["eval_only"] == [0]
        assert (tables_module.scale_of(cell) is None) == (cell["dataset"] == "mnist")
        assert (config["trainer"]["max_epochs"] == 100) == (cell["dataset"] == "mnist")
    asked = {"dataset": "mnist", "partition": "distribution_C", "method": "waffle_avg"}
    rows = select(cells_of_table, asked)
    assert [tables_module.run_metric(row) for row in rows] == [
        *("best_acc", "local_test_acc", "rounds_to_98", "bytes_per_round"),
    ]
    assert [row["value"] for row in rows] == [99.0, None, None, None]
    ours = select(cells_of_table, {**asked, "method": "waffle_avg_weighted_mean"})
    assert {config_of(row)["model"]["init_args"]["control"] for row in ours} == {"weighted_mean"}
    assert {config_of(row)["model"]["init_args"]["control"] for row in rows} == {"eq1"}
    (shifted,) = {config_hash(config_of(c)) for c in select(cells_of_table, {**asked, "partition": "distribution_A*"})}
    assert shifted not in {config_hash(config_of(row)) for row in rows}


def test_best_and_final_accuracy_rounds_and_bytes_of_one_agent(tmp_path: Path) -> None:
    config = json.loads(json.dumps({**TINY, "trainer": {"max_epochs": 3}}))
    config["data"]["init_args"]["eval_only"] = [2]
    result = cells.run_cell(tmp_path, config, seed=0)
    curve, metrics = result["curves"]["local_test_acc"], result["metrics"]
    assert [client is not None for client in result["clients"]] == [client == 2 for client in range(12)]
    assert metrics["local_test_acc"] == pytest.approx(result["clients"][2], abs=1e-3)
    assert metrics["best_acc"] == max(curve)
    assert metrics["bytes_per_round"] == 2 * 6 * 4 * metrics["parameters"]  # six clients, up and down
    assert metrics.get("rounds_to_98") == next((i for i, acc in enumerate(curve, 1) if acc >= 98), None)


def test_weights_of_the_agents_by_round_are_kept_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(json.dumps({**TINY, "trainer": {"max_epochs": 4}}))
    config["model"]["class_path"] = "fl_lightning.methods.WAFFLEAvg"
    config["data"]["init_args"]["fraction"] = 1.0
    result = cells.run_cell(tmp_path / "runs", config, seed=0)
    assert [len(by_client) for by_client in result["weights"]] == [12] * 4
    assert all(sum(by_client) == pytest.approx(1, abs=1e-3) for by_client in result["weights"])
    own = [by_client[0] for by_client in result["weights"]]
    last = max((i for i, weight in enumerate(own) if weight < 1), default=-1)
    assert result["metrics"].get("local_since") == (last + 2 if last < 3 else None)
    assert "weights" not in cells.run_cell(tmp_path / "runs", TINY, seed=0)
    rows = select(table("waffle_avg/table1"), {"dataset": "mnist", "partition": "distribution_C"})
    given = {True: config, False: TINY}
    monkeypatch.setattr(reproduce, "config_of", lambda cell: given[cell["method"] == "waffle_avg"])
    drawn: list[Any] = []
    kept = figures.agents
    monkeypatch.setattr(figures, "agents", lambda *args: (drawn.append(args), kept(*args)))
    reproduce.draw(Records(tmp_path / "runs", tmp_path), "waffle_avg/table1", rows, [0], None, tmp_path)
    assert [list(runs) for runs, *_ in drawn] == [["waffle_avg"]]
    assert (tmp_path / "results-waffle_avg-table1-mnist-distribution_C-weights.png").stat().st_size > 5000


def test_a_run_that_fails_leaves_the_others_and_is_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {**TINY, "trainer": {"max_epochs": 1}}
    bad = json.loads(json.dumps(good))
    bad["data"]["init_args"]["partition"]["init_args"]["clients"] = [800, 400]
    monkeypatch.setattr(reproduce, "config_of", lambda cell: bad if cell["method"] == "fedavg" else good)
    only = ["--only", "dataset=mnist", "method=fedavg,fedprox", "partition=unimodal_Z2"]
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "waffle_factor_journal/table2", *only, "--quiet"])
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"FedAvg Digits {config_hash(bad)} seed 0 (" in said
    assert config_hash(good) not in said
    (row,) = json.loads(Path("results/waffle_factor_journal_table2.json").read_text())
    assert row["method"] == "fedprox"


def test_a_seed_that_is_given_twice_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(console: Any, records: Any, runs: Any, seeds: list[int], jobs: int) -> dict[str, str]:
        asked.extend(seeds)
        return {}

    monkeypatch.setattr(reproduce, "_run_all", noted)
    with pytest.raises(SystemExit):
        main(["reproduce", "waffle_factor_journal/table2", "--seeds", "1", "0", "1", "--jobs", "2"])
    assert asked == [1, 0]


def test_ctrl_c_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def press(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "begin", lambda *args: None)
    monkeypatch.setattr(Workers, "ended", press)
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "waffle_factor_journal/table2", "--only", "dataset=mnist", "method=fedavg", "--jobs", "2"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "fl-lightning: Stopped: finished runs are kept, and the same command goes on.\n"


def test_the_time_of_a_table_counts_every_run_once() -> None:
    measured = {"config_hash": "a", "seeds": [0, 1], "seconds": 1800.0}
    other = {**measured, "config_hash": "b", "seeds": [0]}
    rows = [{"measured": one} for one in (measured, measured, other)]
    assert time_of(rows) == "3 runs, 1 h 30 min in all."


def test_published_values_are_kept_and_added_cells_have_none() -> None:
    cells_of_table = table("waffle_factor_journal/table2")
    (paper,) = select(cells_of_table, {"dataset": "mnist", "method": "waffle_factor", "partition": "unimodal_Z2"})
    (ours,) = select(cells_of_table, {"dataset": "mnist", "method": "waffle_factor_joint", "partition": "unimodal_Z2"})
    assert paper["value"] == 96.23
    assert ours["value"] is None


def test_a_run_is_resumed_cached_and_the_same_as_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cells.run_cell(tmp_path / "whole", TINY, seed=1)
    assert whole["rounds"] == 13
    assert {len(curve) for curve in whole["curves"].values()} == {13}

    noted = cells.Recorder.on_validation_end

    def stops(self: Any, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 11:
            raise RuntimeError("power cut")
        noted(self, trainer, pl_module)

    monkeypatch.setattr(cells.Recorder, "on_validation_end", stops)
    with pytest.raises(RuntimeError, match="power cut"):
        cells.run_cell(tmp_path / "part", TINY, seed=1)
    assert cells.cached(tmp_path / "part", TINY, 1) is None
    monkeypatch.undo()
    part = cells.run_cell(tmp_path / "part", TINY, seed=1)
    assert part["curves"] == whole["curves"]
    assert part["metrics"] == whole["metrics"]
    assert part["clients"] == whole["clients"]

    monkeypatch.setattr(FederatedCLI, "__init__", lambda *a, **k: pytest.fail("a cached run was run again"))
    assert cells.run_cell(tmp_path / "part", TINY, seed=1) == part


def test_sub_populations_of_a_run(tmp_path: Path) -> None:
    result = cells.run_cell(tmp_path, {**TINY, "trainer": {"max_epochs": 2}}, seed=0)
    scores, metrics = result["clients"], result["metrics"]
    majority, minority = sum(scores[:8]) / 8, sum(scores[8:]) / 4
    assert metrics["majority"] == pytest.approx(majority, abs=1e-3)
    assert metrics["minority"] == pytest.approx(minority, abs=1e-3)
    assert metrics["gap"] == pytest.approx(majority - minority, abs=1e-3)
    assert metrics["local_test_acc"] == pytest.approx((8 * majority + 4 * minority) / 12, abs=1e-3)
    assert metrics["variance"] >= 8 * 4 / 12**2 * metrics["gap"] ** 2 - 1e-3
    assert metrics["parameters"] == 64 * 8 + 8 * 10


def test_the_command_writes_results_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "config_of", lambda cell: {**TINY, "trainer": {"max_epochs": 2}})
    for seed in (0, 1):  # in this process: the recipe above is only known here
        cells.run_cell(tmp_path / "runs", {**TINY, "trainer": {"max_epochs": 2}}, seed)
    only = ["--only", "dataset=mnist", "method=fedavg", "partition=unimodal_Z2"]
    options = ["--seeds", "0", "1", "0", "--runs", str(tmp_path / "runs"), "--cached"]
    Path("results").mkdir()
    Path("results/notes.json").write_text("{}")  # somebody else's
    main(["reproduce", "waffle_factor_journal/table2", *only, *options])
    (row,) = json.loads(Path("results/waffle_factor_journal_table2.json").read_text())
    assert row["value"] == 94.46
    assert row["measured"]["seeds"] == [0, 1]
    assert row["measured"]["scale"] == "full"
    assert {"mean", "std", "rounds", "config_hash"} <= row["measured"].keys()
    page = Path("docs/results.md").read_text()
    assert "| mnist unimodal_Z2 fedavg | local_test_acc | 94.46 ± 0.84 |" in page
    more = ["--only", "dataset=mnist", "method=fedprox", "partition=unimodal_Z2"]
    main(["reproduce", "waffle_factor_journal/table2", *more, *options])
    assert len(json.loads(Path("results/waffle_factor_journal_table2.json").read_text())) == 2  # the first stays


@pytest.mark.parametrize(
    ("rounds", "seeds", "stays"),
    [
        (49, [0, 1, 2, 3], True),
        (50, [1, 2], True),
        (50, [0, 1, 2], False),  # measured again
        (50, [2, 3], False),
        (51, [0], False),
    ],
)
def test_a_trial_does_not_replace_what_was_measured(rounds: int, seeds: list[int], stays: bool, tmp_path: Path) -> None:
    name = "waffle_factor_journal/table2"
    cell, other, *_ = table(name)
    old = {**cell, "measured": {"rounds": 50, "seeds": [0, 1, 2], "mean": 1.0}}
    new = {**cell, "measured": {"rounds": rounds, "seeds": seeds, "mean": 2.0}}
    beside = {**other, "measured": {"rounds": 1, "seeds": [0], "mean": 3.0}}
    assert reproduce.write_results(tmp_path, name, [old])[1] == []
    path, lesser = reproduce.write_results(tmp_path, name, [new, beside])
    assert json.loads(path.read_text()) == [old if stays else new, beside]
    assert lesser == ([new] if stays else [])


def test_the_command_says_which_rows_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "config_of", lambda cell: json.loads(json.dumps(TINY)))
    only = ["--only", "dataset=mnist", "method=fedavg", "partition=unimodal_Z2"]
    command = ["reproduce", "waffle_factor_journal/table2", *only, "--cached", "--runs", str(tmp_path / "runs")]
    for rounds in (2, 1):
        cells.run_cell(tmp_path / "runs", {**TINY, "trainer": {"max_epochs": rounds}}, seed=0)
        main([*command, "--rounds", str(rounds)])
        if rounds == 2:
            written = {path: path.read_bytes() for path in Path().rglob("*") if path.suffix in (".md", ".png")}
            assert written
    assert "1 of the rows stay as they were" in capsys.readouterr().out
    assert all(path.read_bytes() == before for path, before in written.items())  # nor the page nor a picture


def test_tables_outlive_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**TINY, "trainer": {"max_epochs": 2}}
    monkeypatch.setattr(reproduce, "config_of", lambda cell: json.loads(json.dumps(config)))
    first = cells.run_cell(tmp_path / "one", config, seed=0)
    command = ["reproduce", "waffle_factor_journal/table2", "--only", "dataset=mnist", "method=fedavg"]
    main([*command, "--cached", "--runs", str(tmp_path / "one")])
    kept = json.loads(Path(f"results/runs/{config_hash(config)}-seed0.json").read_text())
    assert kept == {"config": config, "seed": 0, "result": first}

    # Elsewhere another seed is run, and the record of the first is enough to add it to the table.
    second = cells.run_cell(tmp_path / "two", config, seed=1)
    main([*command, "--seeds", "0", "1", "--runs", str(tmp_path / "two")])
    said = "2 runs, 0 of them to do, 1 at a time (1 taken from results/runs: with another --results they run again)"
    assert said in " ".join(capsys.readouterr().out.split())
    row, *_ = json.loads(Path("results/waffle_factor_journal_table2.json").read_text())
    both = [result["metrics"]["local_test_acc"] for result in (first, second) if row["metric"] == "local_test_acc"]
    assert row["measured"]["seeds"] == [0, 1]
    assert not both or row["measured"]["mean"] == pytest.approx(sum(both) / 2, abs=1e-3)

    # A record that is damaged counts as none; a run that is there replaces its record.
    Path(f"results/runs/{config_hash(config)}-seed0.json").write_text("{")
    records = Records(tmp_path / "two", Path("results/runs"))
    assert records.result(config, 0) is None
    assert records.result(config, 1) == second
    Records(tmp_path / "one", Path("results/runs")).keep(config, 0)
    assert records.result(config, 0) == first


def test_the_settings_of_the_parameter_selection_paper_reach_the_run() -> None:
    settings = {"lr": 0.01, "epochs": 5, "batch_size": 128, "momentum": 0.9, "weight_decay": 0.0005}
    nets = {"lenet5": "LeNet5", "wide_lenet": "WideLeNet"} | {f"resnet{n}": f"ResNet{n}" for n in (20, 32, 44, 56)}
    found = [cell for name in ("table1", "table2", "table3") for cell in table(f"fedbps/{name}")]
    for cell in found:
        config = config_of(cell)
        options = config["model"]["init_args"]
        depth, large = cell["table"] == "Table 3", cell["dataset"] == "cifar10"
        smaller = {"epochs": 1, "batch_size": 16} if depth else {"batch_size": 32} if large else {}  # for two cores
        assert (settings | smaller).items() <= options.items()
        assert options["net"]["class_path"] == f"fl_lightning.nets.{nets[cell['model']]}"
        assert options.get("p") == cell.get("p")
        assert config["trainer"]["max_epochs"] == (10 if large else 60)
        assert config["data"]["init_args"].get("limit") == (2500 if depth else 5000 if large else 14000)
        assert scale_of(cell) is not None
        assert config["data"]["init_args"]["fraction"] == 1.0
    assert len({config_hash(config_of(cell)) for cell in found}) == 12 + 3 + 9 + 16
    chosen = [cell for cell in found if cell.get("p") == "auto"]
    assert len(chosen) == 6
    assert all(cell["value"] is None for cell in chosen)


def test_a_study_is_drawn_over_the_key_that_it_varies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    result = {"metrics": {"local_test_acc": 90.0}, "curves": {"local_test_acc": [80.0, 90.0]}, "rounds": 2}
    monkeypatch.setattr(Records, "result", lambda self, config, seed: result if seed < 2 else None)
    records = Records(tmp_path, tmp_path)
    kept = figures.study
    monkeypatch.setattr(figures, "study", lambda *args: (drawn.append(args), kept(*args)))
    reproduce.draw(records, "fedbps/table2", table("fedbps/table2"), [0, 1, 2], None, tmp_path)
    ((lines, path, _, key, _),) = drawn
    assert key == "p"
    assert lines.keys() == {"mnist", "fmnist", "cifar10"}
    assert set(lines["mnist"]) == {0.3, 0.5, 0.7, 0.9, "auto"}
    assert all(len(results) == 2 for results in lines["mnist"].values())
    assert path.stat().st_size > 5000
    assert [p.name for p in tmp_path.glob("*.png")] == ["results-fedbps-table2-by-p.png"]
    reproduce.draw(records, "fedbps/table1", table("fedbps/table1"), [0], None, tmp_path)
    assert len(list(tmp_path.glob("results-fedbps-table1-*.png"))) == 3


def test_fewer_rounds_are_said_to_be_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "config_of", lambda cell: json.loads(json.dumps(TINY)))
    cells.run_cell(tmp_path, {**TINY, "trainer": {"max_epochs": 1}}, seed=0)
    measured = reproduce.measure(Records(tmp_path, tmp_path), {"metric": "local_test_acc"}, [0, 5], rounds=1)
    assert measured is not None
    assert (measured["scale"], measured["seeds"], measured["std"]) == ("1 of 13 rounds", [0], None)


def test_list_show_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "--list"])
    assert "waffle_factor_journal/table2" in capsys.readouterr().out
    main(["reproduce", "waffle_factor_journal/table2", "--only", "dataset=mnist", "method=fedprox", "--show"])
    (first, *_) = yaml.safe_load_all(capsys.readouterr().out)
    assert first["model"]["init_args"]["mu"] == 1.0
    with pytest.raises(FederationError, match="There is no table 'nope'"):
        table("nope")
    with pytest.raises(FederationError, match="No cell of the table has dataset=cats"):
        select(table("waffle_factor_journal/table2"), {"dataset": "cats"})
    for argv in (["nope"], ["waffle_factor_journal/table2", "--only", "mnist"]):
        with pytest.raises(SystemExit) as end:
            main(["reproduce", *argv])
        assert end.value.code == 2


def test_every_cell_of_the_file_has_the_keys_that_results_need() -> None:
    for cell in tables_module._read("published.yaml")["results"]:
        assert {"paper", "table", "dataset", "partition", "method", "metric", "value"} <= cell.keys()


GLOBAL: dict[str, Any] = {
    "trainer": {"max_epochs": 3},
    "model": {
        "class_path": "fl_lightning.methods.FedDAF",
        "init_args": {**TINY["model"]["init_args"], "feature_stats": True, "warmup": 1, "fit_steps": 5},
    },
    "data": {
        "class_path": "fl_lightning.datamodules.Digits",
        "init_args": {
            "limit": 800,
            "partition": {
                "class_path": "fl_lightning.datamodules.DominantClass",
                "init_args": {"clients": 5, "shards_per_class": 10},
            },
        },
    },
}


def test_global_accuracy_loss_weights_and_times_of_a_run(tmp_path: Path) -> None:
    """The clients' test sets make up the global one: its accuracy is their mean, weighted by their sizes."""
    result = cells.run_cell(tmp_path, GLOBAL, seed=0)
    curves, times = result["curves"], result["times"]
    for name in ("global_test_acc", "local_test_acc", "train_loss", "fusion/largest", "fusion/effective"):
        assert len(curves[name]) == 3
    assert {len(times[name]) for name in ("elapsed", "clients", "server")} == {3}
    assert result["metrics"]["global_test_acc"] == curves["global_test_acc"][-1]
    assert result["metrics"]["global_test_acc_last5"] == pytest.approx(sum(curves["global_test_acc"]) / 3)
    assert abs(curves["global_test_acc"][-1] - curves["local_test_acc"][-1]) < 2
    assert len(set(curves["global_test_acc"])) > 1
    assert times["elapsed"] == sorted(times["elapsed"])
    assert curves["train_loss"][-1] < curves["train_loss"][0]


def test_pictures_by_round_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"paper": "feddaf", "table": "Table 1", "dataset": "digits", "partition": "eta", "metric": "global_test_acc"}
    rows = [{**cell, "method": "feddaf", "model": "a"}, {**cell, "method": "fedavg", "model": "b"}]
    monkeypatch.setattr(reproduce, "config_of", lambda cell: json.loads(json.dumps(GLOBAL)))
    monkeypatch.setattr(reproduce, "table", lambda name: rows)
    cells.run_cell(tmp_path / "runs", GLOBAL, 0)
    records = Records(tmp_path / "runs", tmp_path / "records")
    reproduce.draw(records, "feddaf/table1", rows, [0], None, tmp_path)
    kinds = ("", "-loss", "-time", "-seconds", "-fusion")
    expected = {f"results-feddaf-table1-digits-eta-{m}{k}.png" for m in "ab" for k in kinds}
    assert {path.name for path in tmp_path.glob("*.png")} == expected
    measured = reproduce.measure(records, rows[0], [0], None)
    assert measured is not None
    assert "mean_of_last_5_rounds" in measured


def test_feddaf_settings_reach_the_run() -> None:
    cells_of_table = table("feddaf/table1")
    (cell,) = select(cells_of_table, {"dataset": "fmnist", "method": "feddaf"})
    config = config_of(cell)
    assert config["data"]["init_args"]["partition"]["init_args"] == {"clients": 50, "eta": 0.5}
    assert config["model"]["init_args"]["net"]["class_path"].endswith("LeNetBN")
    nets = {c["method"]: config_of(c)["model"]["init_args"]["net"] for c in select(cells_of_table, {"model": "lenet"})}
    assert nets.pop("fedavg_without_norm") == {"class_path": "fl_lightning.nets.LeNet5"}
    assert len(nets) == 10
    assert {net["class_path"] for net in nets.values()} == {"fl_lightning.nets.LeNetBN"}  # the same for all methods
    assert len({c["method"] for c in select(cells_of_table, {"dataset": "sent140"})}) == 9
    (cell,) = select(table("feddaf/figure6"), {"method": "fedavg", "eta": "1.0"})
    assert config_of(cell)["data"]["init_args"]["partition"]["init_args"]["eta"] == 1.0
    (cell,) = select(table("feddaf/figure7"), {"method": "ifca", "clients": "100"})
    assert config_of(cell)["data"]["init_args"]["partition"]["init_args"]["clients"] == 100
    (cell,) = select(table("feddaf/figure4"), {})
    same = {config_hash(config_of(c)) for c in select(table("feddaf/figure5"), {"method": "feddaf"})}
    assert same == {config_hash(config_of(cell))}  # one run for both
    (cell,) = select(cells_of_table, {"model": "resnet18", "method": "fedma"})
    assert tables_module.scale_of(cell) == "2,000 images, 10 clients, 10 rounds of 1 epoch, batches of 16"
