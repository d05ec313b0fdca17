"""The wheel holds the package, all of it, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
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


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "fl_lightning").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_constraints_pin_what_the_project_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []
    pinned = {canonical(line.split("==")[0]) for line in lines}
    assert len(pinned) == len(lines)
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["text"]]
    names = {canonical(re.match(r"[A-Za-z0-9._-]+", requirement).group()) for requirement in wanted}  # type: ignore[union-attr]
    assert names - pinned == set()


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("link", ["callbacks", "datamodules", "cli"])
def test_root_links_lead_into_the_package(link: str) -> None:
    assert (ROOT / link).readlink() == Path("fl_lightning") / link
