"""Whatever a newcomer meets on the first day: nets to the measure of the data, folders, predictions, Ctrl-C."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import methods, quiet
from fl_lightning.cli import demo, main
from fl_lightning.cli.lightning import FederatedCLI
from fl_lightning.cli.lists import METHODS, plain
from fl_lightning.methods import FedAvg

RUN = ["--trainer.max_epochs=1", "--model.engine=stacked", "--trainer.enable_progress_bar=false"]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Lightning ignores further Ctrl-C for the rest of the process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Made(FederatedCLI):
    """Only makes the objects."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.mark.parametrize(
    ("data", "net", "expected"),
    [
        ("Digits", "MLP", {"in_features": 64, "num_classes": 10}),
        ("MNIST", "MLP", {"in_features": 784}),
        ("MNIST", "LeNet5", {"in_channels": 1}),
        ("CIFAR10", "LeNet5", {"in_channels": 3}),
        ("MNIST", "LeNet5Cifar", {"in_channels": 1}),
    ],
)
def test_a_net_by_name_fits_the_data(data: str, net: str, expected: dict[str, int]) -> None:
    made = Made(args=["fit", "--data", data, "--model", "FedAvg", "--model.net", net]).model
    arguments = made.net.spec["init_args"]  # type: ignore[operator, union-attr]
    assert {name: arguments[name] for name in expected} == expected
    assert made.hparams["net"]["init_args"] == arguments  # a checkpoint makes the same net


def test_what_is_set_stays() -> None:
    options = ["--model", "FedAvg", "--model.net", "MLP", "--model.net.in_features=33"]
    assert Made(args=["fit", "--data", "Digits", *options]).model.net.spec["init_args"]["in_features"] == 33  # type: ignore[operator, union-attr, index]


def test_fit_names_its_folder_and_predict_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    what = ["--data", "Digits", "--model", "FedAvg", "--model.net", "MLP", *RUN]
    main(["fit", *what])
    said = capsys.readouterr().out
    folder = Path("runs/FedAvg/version_0")
    (checkpoint,) = folder.rglob("last.ckpt")
    assert f"The run is in {folder}; test it with --ckpt_path {checkpoint}" in said
    main(["predict", *what, "--ckpt_path", str(checkpoint)])
    table = Path("runs/FedAvg/version_1/predictions.csv")
    assert f"Predictions of 10 clients: {table}" in capsys.readouterr().out
    assert table.read_text().startswith("client,sample,label,predicted,p0,")


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, interrupts: None) -> None:
    def stop(self: Any, round: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FedAvg, "cohort", stop)
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "quickstart", *RUN])
    assert end.value.code == 130


def test_help_names_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert "--use FILE.py" in capsys.readouterr().out


def test_every_method_has_a_plain_line() -> None:
    assert set(METHODS) == set(methods.__all__)
    assert all(len(line) < 90 and not set(line) & set("`^()") for line in METHODS.values())
    assert plain("A :class:`~a.b.C` of ``x`` (docs/partitions.md)") == "A C of x"


def test_the_demo_names_a_command_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert demo.tensorboard() == f"{sys.executable} -m tensorboard.main"
    monkeypatch.setattr(shutil, "which", lambda name: "there")
    assert demo.tensorboard() == "tensorboard"


def test_adverts_are_kept_back_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logging.getLogger("lightning_utilities.core.rank_zero"), "filters", [])
    monkeypatch.setenv("FL_LIGHTNING_NOISE", "1")
    quiet.hush()
    assert not logger.filters
    monkeypatch.delenv("FL_LIGHTNING_NOISE")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet.hush()
        for number in (1, 7):
            text = f"The number of training batches ({number}) is smaller than the logging interval"
            warnings.warn(text, stacklevel=1)
    assert ["(7)" in str(one.message) for one in seen] == [True]
    said = ["\N{ELECTRIC LIGHT BULB} Tip: buy", "Loss is 3", "... override existing callbacks passed to Trainer: Saver"]
    assert [text for text in said if logger.filter(logging.makeLogRecord({"msg": text}))] == said[1:]
