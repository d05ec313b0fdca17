"""Every example runs, and does what it says."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from fl_lightning.cli import main, names
from fl_lightning.cli.parsing import names as class_names
from fl_lightning.methods import FedAvg, Local
from fl_lightning.module import FederatedModule
from fl_lightning.wire import Message
from tests.support import blobs, fit, largest_difference, mlp, weights

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    names.USED.clear()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = set(re.findall(r'load\("(\w+)"\)', Path(__file__).read_text()))
    assert found == tested


def test_own_module() -> None:
    example = load("own_module")
    assert example.main(rounds=6) > 0.6
    source = inspect.getsource(example.main).partition("# These are")[2].partition("accuracy =")[0]
    assert len([line for line in source.splitlines()[1:] if line.strip()]) < 10


def test_ordinary_project() -> None:
    scores = load("ordinary_project").main(epochs=3)
    assert scores["everyone"] > 0.7
    assert scores["client 3"] > 0.8


def test_fair_central_model(tmp_path: Path) -> None:
    logged = load("fair_central_model").main(str(tmp_path / "out"), epochs=4)
    assert logged["val/acc_group_0"] > 0.8 > logged["val/acc_group_2"]
    assert logged["val/gap"] == pytest.approx(logged["val/acc_group_0"] - logged["val/acc_group_2"])
    table = (tmp_path / "out" / "fairness_val.md").read_text()
    assert table.count("\n| group_") == 3


def test_factorized_layers() -> None:
    whole, half = load("factorized_layers").main(epochs=2)
    assert whole > 0.7
    assert half < whole


def test_own_method_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    use = ["--use", str(EXAMPLES / "own_method.py")]
    options = ["--model.share", "0.2", "--model.engine=stacked", "--trainer.max_epochs=2", "--quiet"]
    main(["fit", "--config", "quickstart", *use, "--model", "Trimmed", *options])
    (saved,) = Path("runs").rglob("config.yaml")
    model = yaml.safe_load(saved.read_text())["model"]
    assert model["class_path"] == "own_method.Trimmed"
    assert model["init_args"]["share"] == 0.2
    assert "Trimmed" in class_names(FederatedModule)
    with pytest.raises(SystemExit):
        main(["fit", "--config", "quickstart", *use, "--model", "Trimed"])
    assert "did you mean Trimmed?" in capsys.readouterr().err


def test_own_method_is_a_trimmed_mean() -> None:
    kind = load("own_method").Trimmed
    method = kind(mlp(), share=0.25, lr=0.1, engine="stacked")
    fit(method, blobs(), 1)
    name = method.shared_names[0]
    state, values = method.server_state(), enumerate((1.0, 2.0, 4.0, 100.0))
    messages = [Message(k, {n: torch.full_like(state[n], v) for n in method.shared_names}, 1) for k, v in values]
    assert float(method.aggregate(messages)[name].flatten()[0]) == 3.0


def test_ditto_from_scratch() -> None:
    """Its shared model is FedAvg's; without the pull its own models are Local's; with a strong one they are near w."""
    settings: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 8, "seed": 1}
    plain, local = FedAvg(mlp(), engine="stacked", **settings), Local(mlp(), engine="stacked", **settings)
    fit(plain, blobs(), 2)
    fit(local, blobs(), 2)
    distances = {}
    for engine, lam in (("stacked", 0.0), ("sequential", 0.0), ("stacked", 5.0)):
        ditto = load("ditto").Ditto(mlp(), lam=lam, engine=engine, **settings)
        fit(ditto, blobs(), 2)
        assert largest_difference(weights(ditto), weights(plain)) < 1e-12
        gaps = [largest_difference(ditto.personal_state(c), local.personal_state(c)) for c in range(4)]
        distances[engine, lam] = max(gaps)
    assert distances["stacked", 0.0] < 1e-12
    assert distances["sequential", 0.0] < 1e-12
    assert distances["stacked", 5.0] > 0.01


@pytest.mark.parametrize("name", ["ditto", "own_method"])
def test_a_method_of_ones_own_is_short(name: str) -> None:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    doc = {id(node.body[0]) for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
           and ast.get_docstring(node)}  # fmt: skip
    lines = {n.lineno for n in ast.walk(tree) if isinstance(n, ast.stmt) and id(n) not in doc
             and not isinstance(n, ast.Import | ast.ImportFrom)}  # fmt: skip
    assert len(lines) < 30


def test_hospitals() -> None:
    errors = load("hospitals").main(rounds=10)
    assert errors["FedAvg"] < errors["Local"]
    assert errors["FedAvg"] < 77  # the deviation of what is to be predicted


def test_breast_cancer() -> None:
    scores = load("breast_cancer").main(rounds=5)
    assert float(scores["FedAvg"].mean()) > 0.7


def test_segmentation() -> None:
    found = load("segmentation").main(rounds=12)
    assert max(found.values()) > 0.6  # all background has less than a half


def test_next_character() -> None:
    found = load("next_character").main(rounds=2)
    assert max(found.values()) < 64  # of 128 characters
    assert found["adapters kept at home"] < found["one model"]


def test_next_character_of_tweets(tmp_path: Path) -> None:
    """In the columns of Sentiment140; the eight busiest users are its clients."""
    rows = [f'"0","{i}","now","q","user{i % 10}","{"tweet number " * (i % 10)}{i}"' for i in range(200)]
    rows += [f'"0","{i}","now","q","user9","more of the same {i}"' for i in range(9)]
    (tmp_path / "tweets.csv").write_text("\n".join(rows), encoding="latin-1")
    example = load("next_character")
    found = example.texts(str(tmp_path / "tweets.csv"))
    assert len(found) == 8
    assert next(iter(found)) == "user9"
    codes, authors = example.lines(str(tmp_path / "tweets.csv"))
    assert codes.shape == (len(authors), example.LENGTH + 1)
    assert set(authors) <= set(found)


def test_own_optimizer() -> None:
    example = load("own_optimizer")
    found = example.main(rounds=4)
    assert found["FedPer"]["f1"] > found["FedAvg"]["f1"]
    assert found["FedPer"]["acc"] > 0.6
    source = inspect.getsource(example.main).partition("# These are")[2].partition("trainer =")[0]
    assert len([line for line in source.splitlines()[1:] if line.strip()]) < 10


def test_attack_any_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    load("attack_any_classifier").main()
    printed = capsys.readouterr().out.splitlines()
    assert float(re.findall(r"(\d+) dB", printed[0])[0]) > 100
    told = dict(line.split(": ", 1) for line in printed if ": " in line)
    strength = {
        name: float(re.findall(r"AUROC (\d\.\d+)", told[name])[0]) for name in ("loss", "LiRA offline", "LiRA online")
    }
    assert strength["LiRA online"] > max(0.55, strength["loss"])
    seen, images = map(int, re.findall(r"(\d+) of (\d+) images", told["model inversion"])[0])
    assert seen == images
    for attack in ("discriminant", "ridge"):
        guess, truth = re.findall(r"(True|False), in truth (True|False)", told[f"property by {attack}"])[0]
        assert guess == truth
    assert told["crafted layer"].startswith("16 of 16 images at 40 dB")
