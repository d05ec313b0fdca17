"""The wheel holds the package, all of it, and nothing else."""

from __future__ import annotations

import ast
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
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import fl_lightning
from fl_lightning import callbacks, datamodules, methods, nets
from fl_lightning.cli import main
from fl_lightning.requirements import check_requirements

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree: a build leaves files behind that would hide a missing one."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
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
    assert {"fl_lightning/py.typed", "fl_lightning/cli/report.html.j2"} <= package
    assert {name.split("/")[0] for name in package} == {"fl_lightning"}
    assert {name for name in package if name.endswith(".py")} == modules


@pytest.mark.slow
def test_wheel_carries_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    info = {name.split(".dist-info/")[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert wheel.read(info["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert "fl-lightning = fl_lightning.cli:main" in wheel.read(info["entry_points.txt"]).decode()


@pytest.mark.slow
def test_the_package_index_shows_readme_with_links_that_work(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    shown = wheel.read(name).decode()
    home = PROJECT["project"]["urls"]["Homepage"]
    assert "\n# fl_lightning\n" in shown
    assert f"]({home}/blob/main/docs/quickstart.md)" in shown
    assert f"]({home}/raw/main/docs/pictures/" in shown
    targets = re.findall(r"\]\(([^)\s]+)\)", shown)
    assert [target for target in targets if not target.startswith(("https:", "#"))] == []
    here = [target.partition("/main/")[2] for target in targets if target.startswith(f"{home}/")]
    assert [target for target in here if target and not (ROOT / target.partition("#")[0]).exists()] == []


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


def imported_by(folder: Path) -> set[str]:
    """The top-level names of other packages that the modules of a folder import, also late or by name."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"fl_lightning"}


def names_of(requirements: list[str]) -> set[str]:
    """The names of the distributions that are required."""
    return {canonical(Requirement(one).name) for one in requirements}


def test_imports_equal_the_declared_dependencies() -> None:
    called = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
    imported = {canonical(called.get(name, name)) for name in imported_by(ROOT / "fl_lightning")}
    extras = PROJECT["project"]["optional-dependencies"]
    users = [one for name, ones in extras.items() if name not in ("dev", "docs", "oracle") for one in ones]
    declared, optional = names_of(PROJECT["project"]["dependencies"]), names_of(users)
    assert imported - declared - optional == {"ipython"}, "imported in notebooks alone, which have it"
    assert declared - imported <= {"jsonargparse"}, "Lightning's command line needs jsonargparse"
    assert optional - imported <= {"pyarrow"}, "imported by its name"


def test_the_oldest_versions_are_the_declared_bounds() -> None:
    """``make test-oldest`` tests with them; every bound is the version that is tested, or a shorter way to write it.

    Flower is taken in one version alone, which says itself what it works with.
    """
    lines = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if not line.startswith("#")]
    oldest = {canonical(one.name): next(iter(one.specifier)).version for one in map(Requirement, lines)}
    extras = PROJECT["project"]["optional-dependencies"]
    users = [one for name, ones in extras.items() if name not in ("deploy", "dev", "docs", "oracle") for one in ones]
    for requirement in map(Requirement, [*PROJECT["project"]["dependencies"], *users]):
        (bound,) = (one.version for one in requirement.specifier if one.operator in (">=", "=="))
        assert Version(oldest[canonical(requirement.name)]).release[:2] == (*Version(bound).release, 0)[:2], requirement


def test_pre_commit_takes_the_pinned_versions() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in hooks}
    assert revisions["ruff-pre-commit"] == f"v{pinned['ruff']}"
    assert revisions["codespell"] == f"v{pinned['codespell']}"


def test_workflows_call_existing_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run", ROOT / "CONTRIBUTING.md"]
    called = {
        file.name: re.findall(r"(?:run: |^|`)make ((?:[a-z-]+ ?)+)", file.read_text(), re.MULTILINE) for file in files
    }
    assert {"ci.yml", "run", "CONTRIBUTING.md"} <= {name for name, found in called.items() if found}
    assert {one for found in called.values() for words in found for one in words.split()} - targets == set()
    for file in (ROOT / ".github").rglob("*.yml"):
        assert isinstance(yaml.safe_load(file.read_text()), dict), file


def test_a_version_that_is_not_declared_is_refused_in_a_sentence() -> None:
    check_requirements(["numpy>=2.0", "nosuchpackage>=3", "torch>=99; extra == 'gpu'"])
    with pytest.raises(ImportError, match=r"works with torch>=99, but torch [\d.+a-z]+ is installed: pip install"):
        check_requirements(["numpy>=2.0", "torch>=99"])


def test_classes_can_be_imported_from_the_package_itself() -> None:
    packages = (methods, datamodules, nets, callbacks)
    names = {name for package in packages for name in package.__all__ if name[0].isupper()}
    assert names <= set(dir(fl_lightning))
    assert sum(name[0].isupper() for package in packages for name in package.__all__) == len(names), "one meaning each"
    for package in packages:
        for name in names & set(package.__all__):
            assert getattr(fl_lightning, name) is getattr(package, name)
    with pytest.raises(AttributeError, match="no attribute 'FedNothing'"):
        _ = fl_lightning.FedNothing
    light = "import sys, fl_lightning; from fl_lightning import cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", light], cwd=ROOT).returncode == 0


def test_the_version_is_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    main(["--version"])
    assert capsys.readouterr().out == f"fl-lightning {fl_lightning.__version__}\n"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fl_lightning.__version__
    assert f"## {fl_lightning.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("link", ["callbacks", "datamodules", "cli"])
def test_root_links_lead_into_the_package(link: str) -> None:
    assert (ROOT / link).readlink() == Path("fl_lightning") / link
