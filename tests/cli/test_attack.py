"""``fl-lightning attack``, and the tables of attacks in ``reproduce``."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest

from fl_lightning.callbacks import MembershipInferenceCallback
from fl_lightning.cli import attack, main
from fl_lightning.papers import figures, tables
from fl_lightning.papers.cells import EVERY, folder_of
from fl_lightning.papers.drawing import draw
from fl_lightning.papers.measure import measure
from fl_lightning.papers.records import Records
from fl_lightning.papers.tables import config_of, run_metric, select, table
from tests.support.commands import QUICKSTART, QUIET, refused
from tests.support.tiny import TINY, run

SAVER = '[{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "saved", "filename": "run"}}]'

CHOSEN = {"method": "fedavg", "metric": "mia_auroc", "view": "server"}


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_attacks_on_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--config", QUICKSTART, "--model.engine=stacked", "--model.epochs=2"]
    main(["fit", *run, *QUIET, "--trainer.max_epochs=1", f"--trainer.callbacks={SAVER}"])
    before = Path("saved/run.ckpt").read_bytes()
    capsys.readouterr()
    options = '{"shadows": 1, "clients": 2}'
    attack = ["attack", *run, "--ckpt_path", "saved/run.ckpt"]
    main([*attack, "--attack", "membership", "--view", "outsider", "--options", options])
    shown = capsys.readouterr().out
    assert "target 2/2  membership attack  in " in shown
    assert "# membership on FedAvg after 1 rounds" in shown
    assert "**outsider** sees one intercepted up message of the client" in shown
    (report,) = json.loads(Path("runs/attack/attack_membership.json").read_text())
    assert {row["view"] for row in report["rows"]} == {"outsider"}
    main(
        [
            *attack,
            "--attack=leakage",
            "--view",
            "outsider",
            "insider",
            "--options",
            '{"steps": 2}',
            "--out",
            "here",
            "--quiet",
        ]
    )
    shown = capsys.readouterr().out
    assert "label_acc" in shown
    assert "target" not in shown
    assert Path("here/attack_leakage.md").exists()
    assert Path("saved/run.ckpt").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "options"),
    [("client_membership", {"memory": 2}), ("property", {"shadows": 8}), ("imprint", {"place": "front", "clients": 1})],
)
def test_attacks_on_clients_as_a_whole_and_by_a_crafting_server(
    name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--config", QUICKSTART, "--model.engine=stacked", "--model.epochs=2"]
    main(["fit", *run, *QUIET, "--trainer.max_epochs=1", f"--trainer.callbacks={SAVER}"])
    capsys.readouterr()
    main(["attack", *run, "--ckpt_path", "saved/run.ckpt", "--attack", name, "--options", json.dumps(options)])
    assert f"# {name} on FedAvg after 1 rounds" in capsys.readouterr().out
    (report,) = json.loads(Path(f"runs/attack/attack_{name}.json").read_text())
    assert report["rows"]


def test_the_configuration_that_a_run_saved_serves_the_attack_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named as a reader of the README would, and as the process's own arguments, of which Lightning does not warn."""
    logs = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs"]
    main(["fit", "--config", "quickstart", "--quiet", *logs, "--trainer.max_epochs=1", "--trainer.callbacks=" + SAVER])
    (config,) = Path("runs").rglob("config.yaml")
    view = ["--view", "outsider", "--options", '{"shadows": 1, "clients": 2}', "--quiet"]
    for given in ("quickstart", str(config)):
        command = ["attack", "--config", given, "--ckpt_path", "saved/run.ckpt", *view, "--out", Path(given).stem]
        monkeypatch.setattr("sys.argv", ["fl-lightning", *command])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="LightningCLI's args parameter")
            main(command)
    assert Path("quickstart/attack_membership.json").read_text() == Path("config/attack_membership.json").read_text()


def test_what_cannot_be_attacked(capsys: pytest.CaptureFixture[str]) -> None:
    attack = ["attack", "--config", QUICKSTART]
    assert "The attacked run is missing" in refused(capsys, *attack)
    assert "--dry_run is an option of fit" in refused(capsys, *attack, "--ckpt_path", "no.ckpt", "--dry_run")
    assert "--ckpt_path best is not known here" in refused(capsys, *attack, "--ckpt_path", "best")
    assert "There is no checkpoint no.ckpt" in refused(capsys, *attack, "--ckpt_path", "no.ckpt")
    assert "expected one of membership, inversion, leakage" in refused(capsys, *attack, "--attack", "bribery")
    options = ["--ckpt_path", "no.ckpt", "--options", '{"bribe": 3}']
    assert "The membership attack has no option 'bribe'" in refused(capsys, *attack, *options)
    views = ["--ckpt_path", "no.ckpt", "--view", "outsider", "spy"]
    assert "There is no view 'spy': choose among outsider" in refused(capsys, *attack, *views)


OPTIONS = {
    "membership": "shadows",
    "inversion": "starts",
    "leakage": "steps",
    "client_membership": "references",
    "property": "label",
    "imprint": "bins",
}


@pytest.mark.parametrize(("name", "option"), OPTIONS.items())
def test_options_of_an_attack_have_types(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("many", 1.5):
        with pytest.raises(SystemExit) as end:
            attack.make_attack(name, {"views": ["server"], option: value})
        assert end.value.code == 2
        assert f"{option}: expected a value of type int, not '{value}'" in capsys.readouterr().err


def test_a_lightning_that_knows_no_weights_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning before 2.6: the checkpoint is looked for, not the argument refused."""

    class Older(lightning.pytorch.Trainer):
        def test(
            self,
            model: Any = None,
            dataloaders: Any = None,
            ckpt_path: Any = None,
            verbose: bool = True,
            datamodule: Any = None,
        ) -> Any:
            return super().test(model, dataloaders, ckpt_path, verbose, datamodule)

    monkeypatch.setattr(lightning.pytorch, "Trainer", Older)
    argv = ["attack", "--config", QUICKSTART, "--ckpt_path", "no.ckpt", "--weights_only", "true"]
    assert "There is no checkpoint no.ckpt" in refused(capsys, *argv)


def test_published_attacks_have_runs() -> None:
    membership = select(table("waffle_factor_journal/table3"), {"method": "waffle_factor", "metric": "mia_accuracy"})
    views = {cell.get("view"): cell for cell in membership}
    assert {"outsider", "server", "other_client", "insider", "outsider/guess", "server/traces", None} <= views.keys()
    assert [cell["value"] for cell in membership if "view" not in cell] == [56.2]
    assert all(cell["value"] is None for cell in membership if "view" in cell)
    assert run_metric(views["server/traces"]) == "mia_accuracy/server/traces"
    assert run_metric(views[None]) == "mia_accuracy"
    assert all(config_of(cell) == config_of(membership[0]) for cell in membership)
    config = config_of(membership[0])
    assert config["data"]["init_args"]["partition"]["init_args"] == {"clients": 10, "train_samples": 1000}
    assert config["model"]["init_args"]["net"]["class_path"] == "fl_lightning.nets.LeNet5Cifar"
    (inversion,) = select(table("waffle_factor_journal/table4"), {"method": "fedavg", "value": "12.46"})
    assert config_of(inversion)["trainer"]["callbacks"][0]["class_path"].endswith("ModelInversionCallback")
    assert len({cell["method"] for cell in table("fl_lightning/privacy")}) > 10


def test_cells_with_attacks_and_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "fl_lightning.callbacks."
    attacks: list[dict[str, Any]] = [
        {"class_path": f"{folder}MembershipInferenceCallback", "init_args": {"shadows": 2, "clients": 2}},
        {"class_path": f"{folder}ModelInversionCallback", "init_args": {"steps": 2, "starts": 1, "clients": 2}},
        {"class_path": f"{folder}LedgerCallback"},
    ]
    config = {**TINY, "trainer": {"max_epochs": 2, "callbacks": attacks}}
    monkeypatch.setattr(tables, "config_of", lambda cell, rounds=None: json.loads(json.dumps(config)))
    result = run(tmp_path / "runs", config, 0)
    metrics = result["metrics"]
    assert {"mia_accuracy", "mia_accuracy/server", "mia_auroc/strongest", "inversion_psnr/insider"} <= metrics.keys()
    assert metrics["up_bytes_per_round"] == 6 * 4 * metrics["parameters"]
    assert (folder_of(tmp_path / "runs", config, 0) / "attack_membership.md").exists()
    only = ["--only", *(f"{key}={value}" for key, value in CHOSEN.items())]
    main(["reproduce", "waffle_factor_journal/table3", "--cached", "--runs", str(tmp_path / "runs"), *only])
    records, (cell,) = Records(Path("results")), select(table("waffle_factor_journal/table3"), CHOSEN)
    found = measure(records, cell)
    assert found is not None
    assert found.mean == pytest.approx(metrics["mia_auroc/server"], abs=1e-3)
    names = {path.name: path for path in draw(records, "waffle_factor_journal/table3", Path("docs"))}
    stem = "waffle_factor_journal-table3-cifar10-1000_samples_per_client"
    assert {f"{stem}-privacy.png", f"{stem}-fedavg-inversion.png"} <= names.keys()
    assert all(path.stat().st_size > 5000 for path in names.values())


def test_a_run_that_is_stopped_in_its_attack_attacks_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is that of the last round, so Lightning does not train again."""
    attack = {"class_path": "MembershipInferenceCallback", "init_args": {"shadows": 1, "clients": 2}}
    config = {**TINY, "trainer": {"max_epochs": EVERY, "callbacks": [attack]}}
    whole = run(tmp_path / "whole", config, 0)
    strikes: list[int] = []
    real = MembershipInferenceCallback.strike

    def killed(self: Any, *args: Any) -> Any:
        strikes.append(0)
        if len(strikes) == 1:
            raise RuntimeError("killed")
        return real(self, *args)

    monkeypatch.setattr(MembershipInferenceCallback, "strike", killed)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "part", config, 0)
    part = run(tmp_path / "part", config, 0)
    assert "mia_accuracy" in whole["metrics"]
    assert part["metrics"] == whole["metrics"]
    run(tmp_path / "again", config, 0)
    assert len(strikes) == 3  # once a run, though training and fit both end


def test_every_method_has_a_style_of_its_own() -> None:
    assert len(set(figures.STYLES)) == len(figures.STYLES) > 20
