"""The command line: what parses, what runs, what is refused and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from fl_lightning import methods
from fl_lightning.cli import main, parsing
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.compare import experiments_of
from fl_lightning.cli.lightning import FederatedCLI
from fl_lightning.cli.lists import LISTS
from fl_lightning.cli.parsing import explain, names
from fl_lightning.cli.runs import find
from fl_lightning.methods import FedAvg
from fl_lightning.module import FederatedModule
from fl_lightning.nets import NETS
from tests.support import Idle
from tests.support.commands import CONFIGS, QUICKSTART, QUIET, refused


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_parses(path: Path) -> None:
    class Parsed(FederatedCLI):
        def instantiate_classes(self) -> None:
            """Only parse."""

        def _run_subcommand(self, subcommand: str) -> None:
            """Only parse."""

    assert Parsed(args=["fit", "--config", str(path)]).config["fit"]["model"]["class_path"]


def test_fit_test_and_resume(capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", "--config", QUICKSTART, *QUIET]
    main([*fit, "--trainer.max_epochs=2"])
    folder = Path("runs/quickstart/version_0")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["class_path"] == "fl_lightning.FedAvg"
    assert saved["trainer"]["max_epochs"] == 2
    last = str(folder / "checkpoints" / "last.ckpt")
    main(["test", "--config", QUICKSTART, *QUIET, "--ckpt_path", last])
    assert "test/acc_worst10" in capsys.readouterr().out
    main(["predict", "--config", QUICKSTART, *QUIET, "--ckpt_path", last])
    main(["validate", "--config", QUICKSTART, *QUIET, "--ckpt_path", last])
    main([*fit, "--trainer.max_epochs=4", "--ckpt_path", last])
    main([*fit, "--trainer.max_epochs=4"])
    resumed, whole = (
        torch.load(f"runs/quickstart/version_{v}/checkpoints/last.ckpt", weights_only=True) for v in (4, 5)
    )
    assert resumed["epoch"] == whole["epoch"] == 3
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], value)
    loaded = FedAvg.load_from_checkpoint("runs/quickstart/version_5/checkpoints/last.ckpt")
    assert (loaded.local.epochs, loaded.net.head.out_features) == (5, 10)  # type: ignore[union-attr]


def test_print_config_round_trip(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config", QUICKSTART, "--model.server_optimizer=Yogi", "--model.momentum=0.5"]
    texts = []
    for argv in (options, ["--config", "printed.yaml"]):
        with pytest.raises(SystemExit) as end:
            main(["fit", *argv, "--print_config"])
        assert end.value.code in (0, None)
        texts.append(capsys.readouterr().out)
        Path("printed.yaml").write_text(texts[-1])
    assert texts[0] == texts[1]
    assert yaml.safe_load(texts[0])["model"]["init_args"]["server_optimizer"]["class_path"] == "fl_lightning.optim.Yogi"


def test_seeds_of_a_run_with_a_server_optimizer_are_one_experiment() -> None:
    options = ["--config", QUICKSTART, "--quiet", "--trainer.max_epochs=1", "--model.engine=stacked"]
    for seed, lr in ((0, 0.1), (1, 0.1), (1, 0.2)):
        server = ["--model.server_optimizer=Yogi", f"--model.server_optimizer.lr={lr}"]
        main(["fit", *options, *server, f"--seed_everything={seed}"])
    runs = find(["runs"])
    assert [len(one.runs) for one in experiments_of(runs)] == [2, 1]
    assert runs[0].settings["server_optimizer"] == "Yogi(lr=0.1, betas=(0.9, 0.99), tau=0.001)"
    assert not any(key.startswith("_") for key in runs[0].settings)


def test_options_reach_the_method() -> None:
    class Made(FederatedCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            """Only make the objects."""

    options = ["--model", "FedProx", "--model.net", "MLP", "--model.net.in_features=64", "--model.mu=0.7"]
    cli = Made(args=["fit", "--data", "Digits", *options, "--model.lr=0.3", "--seed_everything=5"])
    assert (cli.model.mu, cli.model.local.lr, cli.model.seed, cli.datamodule.seed) == (0.7, 0.3, 5, 5)  # type: ignore[union-attr]
    assert cli.model.net.head.out_features == 10  # type: ignore[union-attr]
    weights = cli.model.net.head.weight  # type: ignore[union-attr]
    again = Made(args=["fit", "--data", "Digits", *options, "--seed_everything=5"]).model.net.head.weight  # type: ignore[union-attr]
    other = Made(args=["fit", "--data", "Digits", *options, "--seed_everything=6"]).model.net.head.weight  # type: ignore[union-attr]
    assert torch.equal(weights, again)
    assert not torch.equal(weights, other)


def test_schedules_are_named_by_class_or_by_any_import_path() -> None:
    class Made(FederatedCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            """Only make the objects."""

    options = ["--model.omega", "Linear", "--model.omega.start=0.8", "--model.psi", "math.cos"]
    model = ["--model", "WAFFLEAvg", "--model.net", "MLP", "--model.agent_of_interest=all"]
    made = Made(args=["fit", "--data", "Digits", *model, *options]).model
    assert (made.omega(0.0), made.psi(0.0), made.everyone) == (0.8, 1.0, True)  # type: ignore[operator]


#: Options without which a method cannot be made, or not with the quickstart's learning rate.
NEEDED = {
    "FedDAF": ["--model.feature_stats=true", "--model.warmup=1", "--model.inference.steps=10"],
    "PFedMe": ["--model.lr=0.05"],
    "WAFFLe": ['--model.factors={"fc1": 8}'],
    "WAFFLeL1": ['--model.factors={"fc1": 8}'],
}
#: Methods in which all clients train in every round.
FULL = ("Local", "WAFFLEAvg", "WeightErosion")


@pytest.mark.parametrize("name", methods.__all__)
def test_every_method_is_fitted_tested_and_loaded(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    saver = '[{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "saved", "filename": "run"}}]'
    options = ["--config", QUICKSTART, *QUIET, "--model", name, "--model.engine=stacked", *NEEDED.get(name, [])]
    main(["fit", *options, "--trainer.max_epochs=2", f"--trainer.callbacks={saver}"])
    main(["test", *options, "--ckpt_path", "saved/run.ckpt"])
    assert "test/acc" in capsys.readouterr().out
    loaded = getattr(methods, name).load_from_checkpoint("saved/run.ckpt")
    assert len(loaded.snapshots) == (10 if name in FULL else 8)
    assert loaded.local.epochs == 5


def test_a_proportion_that_is_chosen_is_kept_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = '[{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "saved", "filename": "run"}}]'
    auto = [
        "--model.p=auto",
        "--model.trials.values=[0.2, 0.8]",
        "--model.trials.rounds=1",
        "--model.server_optimizer=Yogi",
    ]
    options = ["--config", QUICKSTART, *QUIET, "--model", "FedBPS", "--model.server_optimizer=Yogi", *auto]
    main(["fit", *options, "--trainer.max_epochs=1", f"--trainer.callbacks={saver}"])
    chosen = methods.FedBPS.load_from_checkpoint("saved/run.ckpt").p
    assert chosen in (0.2, 0.8)
    monkeypatch.setattr("fl_lightning.methods.fedbps.best_on_held_out", lambda *a: pytest.fail("chosen again"))
    main(["fit", *options, "--trainer.max_epochs=2", "--ckpt_path", "saved/run.ckpt"])
    main(["test", *options, "--ckpt_path", "saved/run.ckpt"])


@pytest.mark.parametrize("net", NETS)
def test_every_net_can_be_named_and_gets_the_classes_of_the_data(net: str) -> None:
    class Made(FederatedCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            """Only make the objects."""

    name = NETS[net].__name__
    cli = Made(args=["fit", "--data", "Digits", "--model", "FedAvg", "--model.net", name])
    assert type(cli.model.net) is NETS[net]  # type: ignore[union-attr]
    assert cli.model.net.head.out_features == 10  # type: ignore[union-attr]
    assert cli.model.hparams["net"]["init_args"]["num_classes"] == 10  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "FedProxx"], "there is no method 'FedProxx'; did you mean FedProx?"),
        (["--data", "Mnist"], "there is no data set 'Mnist'; did you mean MNIST?"),
        (["--model.net", "LeNet6"], "there is no network 'LeNet6'; did you mean LeNet5?"),
        (["--data.partition", "Nope"], "there is no partition 'Nope'; choose one of"),
        (["--model", "WAFFLEAvg", "--model.psi", "Liner"], "there is no schedule 'Liner'; did you mean Linear?"),
        (["--model", "WAFFLEAvg", "--model.agent_of_interest", "10"], "must be one of 0 to 9 or all, not 10"),
        (["--model.lr", "fast"], "lr: expected a value of type float, not 'fast'"),
        (["--model.lrr", "3"], "Option 'lrr' is not accepted; did you mean lr?"),
        (["--data.partition.clientz", "3"], "Option 'clientz' is not accepted; did you mean clients?"),
        (["--model", "FedBPS", "--model.laplace_samples", "10"], "did you mean laplace.samples?"),
        (
            ["--model", "FedBPS", "--model.laplace", "3"],
            "laplace: expected a dict, or its options one by one: laplace.c",
        ),
        (["--model.weighting", "size"], "weighting: expected one of samples, uniform, not 'size'"),
        (["--trainer.rounds", "3"], "unrecognized arguments: --trainer.rounds"),
        (["--trainer.max_epocs", "3"], "did you mean --trainer.max_epochs?"),
        (["--config", "nope.yaml"], "There is no file nope.yaml"),
        (["--data.fraction", "0"], "fraction must be greater than 0 and at most 1, not 0.0"),
        (["--data.fraction", "1.5"], "fraction must be greater than 0 and at most 1, not 1.5"),
        (["--data.partition.clients", "5000"], "use at most 870 clients"),
        (["--data.partition.classes_per_client", "11"], "classes_per_client must lie between 1 and the 10 classes"),
        (["--model.net", "LeNet5"], "LeNet5 cannot take inputs of shape (1, 8, 8)"),
        (["--model.engine", "warp"], "There is no engine 'warp'"),
        (["--trainer.gradient_clip_val", "1"], "use the method's clip_norm"),
        (["--ckpt_path", "nope.ckpt"], "There is no checkpoint nope.ckpt"),
        (["--ckpt_path", "best"], "--ckpt_path best is not known here"),
        (["--trainer.accelerator", "nope"], "invalid accelerator name: `accelerator='nope'`"),
        (["--seed_everything", "-1"], "seed_everything must be between 0 and 4294967295, not -1"),
        (["--seed_everything", "4294967296"], "seed_everything must be between"),
        (["--data", "MNIST", "--data.root", "nowhere", "--data.download", "false"], "nowhere/MNIST/raw"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refused(capsys, "fit", "--config", QUICKSTART, *QUIET, *argv)


NO_UNION = "Does not validate against any of the Union subtypes\n  Errors:\n"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            f"Parser key \"model\":\n  - {NO_UNION}    - Problem with given class_path 'nope.Class':\n"
            "        No module named 'nope'",
            "model: No module named 'nope'.",
        ),
        (
            "Parser key \"seeds\" element 1:\n  Expected a <class 'int'>. Got value: none",
            "seeds: expected a value of type int, not 'none'.",
        ),
        (
            f"Parser key \"base\":\n  {NO_UNION}    - Expected a typing.Literal['A', 'B']\n"
            "    - Expected a <class 'list'>\n  Given value type: <class 'str'>\n  Given value: Z",
            "base: expected one of A, B or a value of type list, not 'Z'.",
        ),
        (
            "Parser key \"hidden\":\n  Expected a <class 'collections.abc.Sequence'>. Got value: 3",
            "hidden: expected a value of type Sequence, not '3'.",
        ),
        ("Option 'mu' is not accepted", "Option 'mu' is not accepted."),
        ("Option 'grop' is not accepted", "Option 'grop' is not accepted; did you mean group?"),
        (
            'Parser key "trainer.callbacks":\n  Expected a dot import path string: FairnessCallbak',
            "trainer.callbacks: there is no callback 'FairnessCallbak'; did you mean FairnessCallback?",
        ),
        (
            'Parser key "trainer.callbacks":\n  Expected a dot import path string: EarlyStoping',
            "trainer.callbacks: there is no callback 'EarlyStoping'; did you mean EarlyStopping?",
        ),
        (
            'Parser key "server_optimizer":\n  Expected a dot import path string: Xyz',
            "server_optimizer: there is no optimizer 'Xyz'; give the import path of its class.",
        ),
    ],
)
def test_reports_of_the_parser_become_one_sentence(message: str, sentence: str) -> None:
    assert explain(message) == sentence


def test_help_of_a_misspelt_name_names_the_one_that_was_meant() -> None:
    said = explain("--model.help: Expected a dot import path string: FedProxx")
    assert said.startswith("model: there is no method 'FedProxx'; did you mean FedProx?")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"model: [1, 2\n", "bad.yaml cannot be read as YAML, line 2, column 1: "),
        (b"\xff\xfe\x00", "bad.yaml cannot be read as YAML: "),
        (b"", "bad.yaml holds no settings"),
        (b"- a\n", "bad.yaml holds no settings"),
    ],
)
def test_damaged_configurations(content: bytes, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_bytes(content)
    assert sentence in refused(capsys, "fit", "--config", "bad.yaml")
    assert "--config takes a YAML file" in refused(capsys, "fit", "--config")


def test_bad_input_of_other_commands_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("best", "last"):
        said = refused(capsys, "test", "--config", QUICKSTART, "--ckpt_path", name)
        assert f"--ckpt_path {name} is not known here" in said
    assert "--rounds must be 1 or more, not 0" in refused(capsys, "demo", "--rounds", "0")
    for option in ("--jobs", "--rounds"):
        said = refused(capsys, "reproduce", "waffle_factor_journal/table2", option, "0")
        assert f"{option} must be 1 or more, not 0" in said
    for option in ("--repeats", "--workers", "--threads"):
        assert f"{option} must be 1 or more, not 0" in refused(capsys, "bench", option, "0")
    for name in LISTS:
        assert f"{name} takes no options" in refused(capsys, name, "--nope")
    Path("file").write_text("")
    said = refused(capsys, "partition", "--data=Digits", "--data.partition=IID", "--out=file")
    assert "file cannot be read or written: File exists" in said


def test_damaged_and_foreign_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.ckpt").write_bytes(b"not a checkpoint")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, "foreign.ckpt")
    for command in ("fit", "test"):
        options = (command, "--config", QUICKSTART, *QUIET, "--ckpt_path")
        assert "cannot be read" in refused(capsys, *options, "bad.ckpt")
        told = "contains only a model" if command == "fit" else "not written by fl_lightning"
        assert told in refused(capsys, *options, "foreign.ckpt")


def test_a_checkpoint_does_not_replace_what_was_asked_for() -> None:
    class Made(FederatedCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            """Only make the objects."""

    net = {"class_path": "fl_lightning.nets.MLP", "init_args": {"hidden": [8]}}
    torch.save({"hyper_parameters": {"_class_path": "fl_lightning.methods.FedAvg", "net": net, "lr": 0.5}}, "run.ckpt")
    options = ["--config", QUICKSTART, *QUIET, "--ckpt_path=run.ckpt"]
    made = Made(args=["fit", *options, "--model=FedProx", "--model.lr=0.3"]).model
    assert (type(made), made.local.lr, made.net.head.in_features) == (methods.FedProx, 0.3, 64)  # type: ignore[union-attr]


def test_a_model_that_was_never_trained_is_evaluated_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LightningCLI, "_run_subcommand", lambda *_: None)
    for options, said in (([], True), (["--ckpt_path=last.ckpt"], False)):
        main(["test", "--config", QUICKSTART, *QUIET, *options])
        assert ("the model is untrained" in capsys.readouterr().err) is said


def test_only_methods_are_offered_as_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "USED", [])  # other tests use modules of their own
    assert set(names(FederatedModule)) == set(methods.__all__)


def test_a_module_that_is_used_offers_its_own_classes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those of modules whose names begin alike."""
    monkeypatch.setattr(parsing, "USED", ["test"])
    assert set(names(FederatedModule)) == set(methods.__all__)
    monkeypatch.setattr(parsing, "USED", ["tests.support"])
    assert Idle.__name__ in names(FederatedModule)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'fit'?" in refused(capsys, "fitt")
    assert "choose one of fit" in refused(capsys, "xyz")


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = "import sys; from fl_lightning.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CONFIGS.parent)
    assert all(f"  {name}" in done.stdout for name in COMMANDS)


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = "from fl_lightning.cli import main; main(['reproduce', '--list'])"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=CONFIGS.parent
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait() == 0


def test_demo_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from fl_lightning.cli import demo

    runs = demo.demo(Path("demo"), rounds=2, clients=10)
    assert [run.name for run in runs] == ["Local", "FedAvg", "APFL"]
    assert [len(run.curve.accuracy) for run in runs] == [2, 2, 2]
    assert Path("demo/accuracy.png").stat().st_size > 5000
    shown = capsys.readouterr().out
    assert "worst tenth" in shown
    assert "--logdir demo" in " ".join(shown.split())
    assert "APFL" in Path("demo/report.html").read_text()
