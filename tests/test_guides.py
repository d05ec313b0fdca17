"""The commands and the Python of README and the guides."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_lightning.cli import main, names
from fl_lightning.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "methods").glob("*.md"))]
LIGHTNING = ("fit", "validate", "test", "predict")
pytestmark = pytest.mark.filterwarnings("ignore")


def commands() -> Iterator[tuple[str, str]]:
    """Every command line of the pages, and of the commands' own examples, once, with where it stands first."""
    seen: set[str] = set()
    texts = {page.name: page.read_text() for page in PAGES} | {
        name: "\n".join(f"    {one}" for one in command.examples) for name, command in COMMANDS.items()
    }
    for name, text in texts.items():
        joined = text.replace("\\\n", " ")
        for line in re.findall(r"^(?: {4}|)?(fl-lightning \w+[^\n`]*)", joined, re.MULTILINE):
            command = re.sub(r"\s+(# .*|&)$", "", line.strip())
            if command not in seen and not re.search(r"\.\.\.|COMMAND|\| ", command):
                seen.add(command)
                yield name, command


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    yield
    names.USED.clear()


def test_commands_are_found() -> None:
    found = [command for _, command in commands()]
    assert "fl-lightning fit --config quickstart --dry_run" in found
    assert len(found) > 40


@pytest.mark.slow
@pytest.mark.parametrize(("place", "line"), list(commands()), ids=lambda text: text.replace("fl-lightning ", "")[:60])
def test_every_command_is_one_that_can_be_given(place: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its options are parsed, its classes found and their arguments checked; nothing is run."""
    argv = shlex.split(re.sub(r"\{\d\}|\$\w+", "1", line))[1:]
    assert argv[0] in COMMANDS, f"{place}: {line}"
    if argv[0] in LIGHTNING:
        if not any(option.endswith("help") for option in argv[1:]):
            argv.append("--print_config")
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code in (0, None), f"{place}: {capsys.readouterr().err}"
    else:
        module = importlib.import_module(COMMANDS[argv[0]].module)
        if hasattr(module, "build_parser"):
            module.build_parser().parse_args(argv[1:])


@pytest.mark.parametrize("page", ["cheat-sheet", "sweeps"])
def test_python_of_the_guides_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL))
    if "optuna" in code:
        pytest.importorskip("optuna", reason="optuna is not installed: pip install optuna")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": page})
