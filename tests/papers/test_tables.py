"""Published tables as data, and the runs that their cells ask for."""

from __future__ import annotations

from typing import Any

import pytest

from fl_lightning.cli.lightning import FederatedCLI
from fl_lightning.papers import tables as tables_module
from fl_lightning.papers.cells import accepted
from fl_lightning.papers.tables import config_hash, config_of, line_name, scale_of, select, table, tables


@pytest.mark.slow
def test_every_different_part_of_a_run_of_every_table_parses() -> None:
    class Parsed(FederatedCLI):
        def instantiate_classes(self) -> None:
            """Only parse."""

    def kind(value: Any) -> Any:
        """Identity of configurations that are parsed differently: names and classes, not numbers."""
        if isinstance(value, dict):
            return tuple(sorted((key, kind(item)) for key, item in value.items()))
        return value if isinstance(value, str) else type(value).__name__

    configs = [config_of(cell) for found in tables().values() for cell in found]
    assert len({config_hash(config) for config in configs}) > 200
    # The trainer, the model and the data are parsed one by one: every different one of each is in some run.
    parts = {kind({part: config[part]}): config for config in configs for part in config}
    assert len(parts) > 50
    for config in {config_hash(config): config for config in parts.values()}.values():
        parsed = Parsed(args=accepted(config), run=False).config
        assert parsed["model"]["class_path"] == config["model"]["class_path"]


def test_the_papers_settings_reach_the_run() -> None:
    (cell,) = select(table("waffle_factor_journal/table6"), {"dataset": "mnist", "method": "fedavg", "E": "20"})
    config = config_of(cell)
    assert config["trainer"]["max_epochs"] == 50
    assert config["model"]["init_args"]["epochs"] == 20
    assert config["model"]["init_args"]["lr"] == 0.04
    (cell,) = select(table("waffle_factor_journal/table7"), {"dataset": "mnist", "method": "fedavg", "E": "30"})
    assert config_of(cell)["model"]["init_args"]["lr"] == 0.02
    cells = select(table("waffle_factor_journal/table9"), {"F": "80", "alpha_over_F": "0.4"})
    options = {cell["method"]: config_of(cell)["model"]["init_args"] for cell in cells}
    assert {name: found["schedule"] for name, found in options.items()} == {
        "waffle_factor": "alternate",
        "waffle_factor_joint": "joint",
    }
    assert all(found["factors"] == {"fc1": 80} and found["alpha_ratio"] == 0.4 for found in options.values())


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
        agents = "scale not stated" if "agents" in cell else "part of the data"
        assert tables_module.coverage_of(cell) == (agents if cell["dataset"] == "mnist" else "reduced")
        assert (config["trainer"]["max_epochs"] == 100) == (cell["dataset"] == "mnist")
    asked = {"dataset": "mnist", "partition": "distribution_C", "method": "waffle_avg", "agents": "None"}
    rows = select(cells_of_table, asked)
    twenty, *_ = select(cells_of_table, {**asked, "agents": "20"})
    scheme = config_of(twenty)["data"]["init_args"]["partition"]["init_args"]
    assert scheme == {"base": "C", "clients": 20, "samples_per_agent": None}
    assert [tables_module.run_metric(row) for row in rows] == [
        *("best_acc", "local_test_acc", "rounds_to_98", "bytes_per_round"),
    ]
    assert [row["value"] for row in rows] == [99.0, None, None, None]
    ours = select(cells_of_table, {**asked, "method": "waffle_avg_weighted_mean"})
    assert {config_of(row)["model"]["init_args"]["control"] for row in ours} == {"weighted_mean"}
    assert {config_of(row)["model"]["init_args"]["control"] for row in rows} == {"eq1"}
    (shifted,) = {config_hash(config_of(c)) for c in select(cells_of_table, {**asked, "partition": "distribution_A*"})}
    assert shifted not in {config_hash(config_of(row)) for row in rows}


def test_published_values_are_kept_and_added_cells_have_none() -> None:
    cells_of_table = table("waffle_factor_journal/table2")
    (paper,) = select(cells_of_table, {"dataset": "mnist", "method": "waffle_factor", "partition": "unimodal_Z2"})
    (ours,) = select(cells_of_table, {"dataset": "mnist", "method": "waffle_factor_joint", "partition": "unimodal_Z2"})
    assert paper["value"] == 96.23
    assert ours["value"] is None


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
        whole = cell.get("images") == "all"
        assert config["data"]["init_args"].get("limit") == (
            2500 if depth else 5000 if large else None if whole else 14000
        )
        assert (scale_of(cell) is None) == whole
        assert tables_module.coverage_of(cell) == ("full" if whole else "reduced")
        assert config["data"]["init_args"]["fraction"] == 1.0
    local, whole = 3 + 4 + 2, 2 * (3 + 4)
    assert len({config_hash(config_of(cell)) for cell in found}) == 12 + 3 + 9 + 16 + local + whole
    chosen = [cell for cell in found if cell.get("p") == "auto"]
    assert len(chosen) == 6
    assert all(cell["value"] is None for cell in chosen)


def test_a_prior_precision_that_is_the_default_is_the_run_of_the_table() -> None:
    """One and the same run; the others differ in nothing else."""
    study = {cell["delta"]: config_of(cell) for cell in table("fedbps/study-delta")}
    (cell,) = select(table("fedbps/table1"), {"dataset": "mnist", "p": "0.7", "images": "None"})
    assert study.pop(1) == config_of(cell)
    assert len(study) == 4
    for delta, config in study.items():
        assert config["model"]["init_args"].pop("prior_precision") == delta
        assert config == config_of(cell)


def test_every_cell_of_the_file_has_the_keys_that_results_need() -> None:
    for cell in tables_module._read("published.yaml")["results"]:
        assert {"paper", "table", "dataset", "partition", "method", "metric", "value"} <= cell.keys()


def test_feddaf_settings_reach_the_run() -> None:
    cells_of_table = table("feddaf/table1")
    asked = {"dataset": "fmnist", "method": "feddaf", "metric": "global_test_acc"}
    (cell,) = select(cells_of_table, {**asked, "images": "None"})
    config = config_of(cell)
    assert config["data"]["init_args"]["partition"]["init_args"] == {"clients": 50, "eta": 0.5}
    assert config["model"]["init_args"]["net"]["class_path"].endswith("LeNetBN")
    nets = {c["method"]: config_of(c)["model"]["init_args"]["net"] for c in select(cells_of_table, {"model": "lenet"})}
    assert nets.pop("fedavg_without_norm") == {"class_path": "fl_lightning.nets.LeNet5"}
    assert len(nets) == 11
    assert {net["class_path"] for net in nets.values()} == {"fl_lightning.nets.LeNetBN"}  # the same for all methods
    assert len({c["method"] for c in select(cells_of_table, {"dataset": "sent140"})}) == 10
    (cell,) = select(table("feddaf/figure6"), {"method": "fedavg", "eta": "1.0"})
    assert config_of(cell)["data"]["init_args"]["partition"]["init_args"]["eta"] == 1.0
    (cell,) = select(table("feddaf/figure7"), {"method": "ifca", "clients": "100"})
    assert config_of(cell)["data"]["init_args"]["partition"]["init_args"]["clients"] == 100
    (cell,) = select(table("feddaf/figure4"), {})
    same = {config_hash(config_of(c)) for c in select(table("feddaf/figure5"), {"method": "feddaf"})}
    assert same == {config_hash(config_of(cell))}  # one run for both
    (whole,) = select(cells_of_table, {**asked, "images": "all"})
    assert (config_of(whole)["trainer"]["max_epochs"], config_of(whole)["model"]["init_args"]["epochs"]) == (100, 5)
    assert tables_module.coverage_of(whole) == "scale not stated"
    (longer,) = select(cells_of_table, {"images": "8000", "method": "ifca", "metric": "local_test_acc"})
    assert config_of(longer)["trainer"] == {"max_epochs": 30, "precision": "bf16-mixed"}
    assert config_of(longer)["data"]["init_args"]["limit"] == 8000
    (cell,) = select(cells_of_table, {"model": "resnet18", "method": "fedma", "metric": "global_test_acc"})
    assert tables_module.scale_of(cell) == "2,000 images, 10 clients, 10 rounds of 1 epoch, batches of 16"


def test_local_trains_as_often_as_a_client_of_the_others_does_on_average() -> None:
    for name, rounds, epochs in (("table2", 10, 5), ("table6", 5, 10), ("table5", 10, 5), ("textg1", 10, 5)):
        for cell in select(table(f"waffle_factor_journal/{name}"), {"method": "local"}):
            if cell.get("E", epochs) == epochs:
                config = config_of(cell)
                assert config["trainer"]["max_epochs"] == rounds
                assert config["model"]["init_args"]["epochs"] == epochs
                assert rounds == config["data"]["init_args"]["fraction"] * (50 if name == "table6" else 100)
    (cell,) = select(table("fl_lightning/privacy"), {"method": "local", "metric": "local_test_acc"})
    assert config_of(cell)["trainer"]["max_epochs"] == 50


def test_all_recipes_hold_no_validation_samples_out() -> None:
    """The papers have none."""
    configs = [config_of(cell) for cells in tables().values() for cell in cells]
    assert all(config["data"]["init_args"]["val_fraction"] == 0 for config in configs)
