"""The wheel holds the package, all of it, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree: a build leaves files behind that would hide a missing one."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "fl_lightning", tree / "fl_lightning", ignore=shutil.ignore_patterns("__pycache__"))
    for link in (path for path in ROOT.iterdir() if path.is_symlink()):
        shutil.copy(link, tree, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.mark.slow
def test_wheel_holds_every_module_and_nothing_outside(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    package = {name for name in names if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fl_lightning").rglob("*.py")}
    assert modules <= package
    assert "fl_lightning/py.typed" in package
    assert {name.split("/")[0] for name in package} == {"fl_lightning"}
    assert {name for name in package if name.endswith(".py")} == modules


@pytest.mark.slow
def test_wheel_carries_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    info = {name.split(".dist-info/")[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert wheel.read(info["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert "fl-lightning = fl_lightning.cli:main" in wheel.read(info["entry_points.txt"]).decode()


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment_runs_the_quickstart(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The wheel alone is installed; its dependencies are those of this environment, found by path and not as a site."""
    home = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    wheel.extractall(own)
    (anywhere := tmp_path / "anywhere").mkdir()
    (own / "depends.pth").write_text(sysconfig.get_path("purelib") + "\n")  # no .pth in there is read: nothing editable
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    start = (
        "import sys, fl_lightning; from fl_lightning.cli import main; print(fl_lightning.__file__); main(sys.argv[1:])"
    )
    options = ["--trainer.max_epochs=1", "--model.engine=stacked"]
    command = [str(home / "bin" / "python"), "-c", start, "fit", "--config", "quickstart", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=anywhere, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(own))
    assert [path.parent.name for path in anywhere.rglob("run.json")] == ["version_0"]


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "fl_lightning").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_constraints_pin_what_the_project_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []
    pinned = {canonical(line.split("==")[0]) for line in lines}
    assert len(pinned) == len(lines)
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["docs"], *extras["text"]]
    names = {canonical(re.match(r"[A-Za-z0-9._-]+", requirement).group()) for requirement in wanted}  # type: ignore[union-attr]
    assert names - pinned == set()


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("link", ["callbacks", "datamodules", "cli"])
def test_root_links_lead_into_the_package(link: str) -> None:
    assert (ROOT / link).readlink() == Path("fl_lightning") / link
