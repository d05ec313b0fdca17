"""The map of settings in which federation pays, by hand and by runs on the digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.cli import main
from fl_lightning.papers import tables, worth
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import Cell, Config, config_of, select, table
from fl_lightning.papers.worth import MEAN, WORST, Setting, advice, scores
from tests.support.tiny import TINY, run

METHODS = ["local", "fedavg", "fedper", "apfl", "ifca", "scaffold", "waffle_factor"]


def test_the_settings_reach_the_run() -> None:
    (cell,) = select(
        table("map/mnist"),
        {"partition": "modes", "classes": "5", "samples": "60", "method": "ifca", "metric": "worst_tenth"},
    )
    config = config_of(cell)
    scheme = config["data"]["init_args"]["partition"]
    assert scheme["class_path"].endswith("Multimodal")
    assert scheme["init_args"]["clients"] == [20, 20]
    assert (scheme["init_args"]["classes_per_client"], scheme["init_args"]["test_fraction"]) == (5, 0.8)
    assert config["model"]["init_args"]["clusters"] == 2
    cells = table("map/mnist")
    assert len({tables.config_hash(config_of(cell)) for cell in cells}) == 5 * 3 * len(METHODS)
    rounds = {cell["method"]: config_of(cell)["trainer"]["max_epochs"] for cell in cells}
    assert rounds.pop("local") == 0.2 * 50  # as often as a client of the others on average
    assert set(rounds.values()) == {50}
    assert [cells[0]["dataset"] for cells in map(table, worth.maps())] == ["mnist", "fmnist", "cifar10", "sent140"]
    (tweets,) = select(table("map/tweets"), {"samples": "8", "method": "apfl", "metric": MEAN})
    scheme = config_of(tweets)["data"]["init_args"]["partition"]
    assert scheme["class_path"].endswith("ByUser")
    assert scheme["init_args"] == {"clients": 25, "min_samples": 10}


def records(accuracies: dict[str, float], **asked: str) -> Records:
    found = Records(None)
    for cell in select(table("map/mnist"), {**asked, "metric": MEAN}):
        if cell["method"] in accuracies:
            metrics = {MEAN: accuracies[cell["method"]], WORST: accuracies[cell["method"]] - 10}
            result = {"metrics": metrics, "curves": {}, "seconds": 1.0}
            found.keep("map/mnist", config_of(cell), 0, result)
    return found


ONE = {"partition": "alike", "classes": "2", "samples": "20"}
SCORES = dict(zip(METHODS, (90.0, 80.0, 92.0, 92.5, 70.0, 85.0, 91.4), strict=True))


def test_a_setting_counts_once_all_of_its_methods_were_run() -> None:
    assert scores(records({m: s for m, s in SCORES.items() if m != "apfl"}, **ONE), MEAN) == {}
    found = scores(records(SCORES, **ONE), MEAN)
    assert found == {Setting("mnist", "alike", 2, 20): SCORES}
    worst = scores(records(SCORES, **ONE), WORST)
    assert worst[Setting("mnist", "alike", 2, 20)]["apfl"] == 82.5


def test_advice_says_what_federation_is_worth_and_who_leads() -> None:
    other = {**SCORES, "local": 92.4, "fedper": 60.0}
    kinds = {Setting("mnist", "alike", 2, 60): other, Setting("mnist", "alike", 2, 20): SCORES}
    apart = {Setting("mnist", "modes", 2, 20): SCORES}
    first, second = advice(kinds | apart)
    assert first == (
        "- MNIST, 2 classes, one population: +2.5 with 20, +0.1 with 60 training samples; best or level with the best: "
        "APFL (2), Local (1), FedPer (1)."
    )
    assert second.startswith("- MNIST, 2 classes, two populations: +2.5 with 20 training samples; best or level")


def test_runs_on_the_digits_make_the_page_and_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("local", "fedavg")
    cells = [cell for cell in select(table("map/mnist"), ONE) if cell["method"] in asked]

    def config_of(cell: Cell, rounds: int | None = None) -> Config:
        config: dict[str, Any] = json.loads(json.dumps({**TINY, "trainer": {"max_epochs": 1}}))
        config["model"]["class_path"] = f"fl_lightning.methods.{'Local' if cell['method'] == 'local' else 'FedAvg'}"
        return config

    monkeypatch.setattr(tables, "config_of", config_of)
    monkeypatch.setattr(tables, "tables", lambda: {"map/mnist": cells})
    results = {method: run(tmp_path / "runs", config_of({"method": method})) for method in asked}
    for result in results.values():
        assert result["metrics"]["worst_tenth"] == pytest.approx(sum(sorted(result["clients"])[:2]) / 2, abs=1e-3)
    main(["reproduce", "map/mnist", "--cached", "--runs", "runs", "--quiet"])
    found = Records(Path("results"))
    text = worth.page(found, "map.png")
    gain = results["fedavg"]["metrics"][MEAN] - results["local"]["metrics"][MEAN]
    assert f"FedAvg {gain:+.1f} |" in text
    assert "Nothing is missing." in text
    assert worth.draw(found, tmp_path / "map.png").stat().st_size > 5000
