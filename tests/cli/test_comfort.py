"""Lists, completion, dry runs, names from anywhere: what makes the command line pleasant."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fl_lightning import methods
from fl_lightning.cli import main
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.completion import script
from fl_lightning.cli.lists import LISTS
from fl_lightning.cli.names import packaged, resolve
from fl_lightning.cli.plan import plan
from fl_lightning.datamodules import partitions
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedPer
from fl_lightning.papers.tables import tables
from tests.support import blobs, fit, mlp


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", LISTS)
def test_lists_have_one_line_each(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([name])
    shown = capsys.readouterr().out.split("\n\n")[0].splitlines()
    entries = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1] for line in shown}
    base = partitions.PartitionScheme
    expected = {
        "methods": set(methods.__all__),
        "partitions": {n for n in partitions.__all__ if issubclass(getattr(partitions, n), base)} - {base.__name__},
        "tables": set(tables()),
    }[name]
    assert set(entries) == expected
    assert all(len(line) > 10 for line in entries.values())


def test_tables_need_neither_torch_nor_lightning() -> None:
    code = "import sys; from fl_lightning.cli import main; main(['tables']); assert 'torch' not in sys.modules"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=root)


@pytest.fixture(scope="module")
def bash_script() -> str:
    return script("bash")


def completed(text: str, *words: str) -> list[str]:
    """Return the words that bash offers after some others."""
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("no bash")
    line = " ".join(f"'{word}'" for word in words)
    code = f'{text}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _fl_lightning; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_completion_of_commands_options_and_names(bash_script: str) -> None:
    assert completed(bash_script, "fl-lightning", "pa") == ["partition", "partitions"]
    assert set(COMMANDS) <= set(completed(bash_script, "fl-lightning", ""))
    assert set(methods.__all__) <= set(completed(bash_script, "fl-lightning", "fit", "--model", ""))
    assert "FedProx" in completed(bash_script, "fl-lightning", "fit", "--model", "FedP")
    assert "--model.mu" in completed(bash_script, "fl-lightning", "fit", "--model.m")
    assert "--trainer.max_epochs" in completed(bash_script, "fl-lightning", "fit", "--trainer.max")
    assert "--dry_run" in completed(bash_script, "fl-lightning", "fit", "--d")
    assert completed(bash_script, "fl-lightning", "fit", "--config", "q") == ["quickstart"]
    assert "--seeds" in completed(bash_script, "fl-lightning", "reproduce", "x", "--se")
    assert completed(bash_script, "fl-lightning", "completion", "z") == ["zsh"]


def test_completion_says_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion"])
    assert "source <(fl-lightning completion bash)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    assert "choose bash or zsh" in capsys.readouterr().err


def test_a_dry_run_says_what_the_run_then_does() -> None:
    data, rounds = blobs(fraction=0.5), 5

    def method() -> FedPer:
        return FedPer(mlp(), lr=0.1, batch_size=8, epochs=2, engine="stacked")

    planned = plan(method(), data, rounds, accelerator="cpu", precision="64-true")
    real = method()
    fit(real, blobs(fraction=0.5), rounds)
    assert planned.steps * rounds == sum(real.snapshots[client].steps for client in real.snapshots)
    assert (planned.up * rounds, planned.down * rounds) == (real.bytes_up, real.bytes_down)
    assert (planned.clients, planned.cohort, planned.parameters) == (4, 2, (336, 68))
    assert planned.seconds > 0


def test_dry_run_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "quickstart", "--dry_run"])
    shown = capsys.readouterr().out
    for words in ("10, 5 per round", "rounds           20", "per round", "estimated time"):
        assert words in shown
    assert list(Path().iterdir()) == []
    with pytest.raises(SystemExit):
        main(["test", "--config", "quickstart", "--dry_run"])
    assert "--dry_run is an option of fit" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fit", "test", "serve", "join", "federation", "attack"])
def test_help_shows_a_dry_run_where_there_is_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert ("--dry_run" in capsys.readouterr().out) == (command == "fit")


def test_quiet_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "quickstart", "--quiet", "--trainer.max_epochs=1", "--model.engine=stacked"])
    assert capsys.readouterr().out == ""
    (record,) = Path("runs").rglob("run.json")
    saved = yaml.safe_load((record.parent / "config.yaml").read_text())
    assert saved["quiet"] is True


def test_packaged_configurations_are_found_by_name_and_own_files_come_first() -> None:
    assert resolve(["fit", "--config", "quickstart"]) == ["fit", "--config", packaged()["quickstart"]]
    assert resolve(["fit", "-c", "quickstart"]) == ["fit", "--config", packaged()["quickstart"]]
    assert resolve(["fit", "--config=quickstart.yaml"]) == ["fit", "--config", packaged()["quickstart"]]
    Path("quickstart").write_text("{}")
    assert resolve(["fit", "--config", "quickstart"]) == ["fit", "--config", "quickstart"]


@pytest.mark.parametrize(
    ("name", "sentence"), [("", "takes a Python file"), ("no.py", "no file no.py"), ("n.o", "'n'")]
)
def test_what_cannot_be_used_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        resolve(["fit", "--use", name])
