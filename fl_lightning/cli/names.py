"""Names on the command line: packaged configurations, and classes of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib import resources
from pathlib import Path

import yaml

from fl_lightning.errors import FederationError

#: Modules that ``--use`` has imported: their classes have short names too.
USED: list[str] = []


def resolve(arguments: list[str]) -> list[str]:
    """The arguments with ``--use FILE`` carried out and names of packaged configurations replaced by their paths.

    ``--use`` takes a Python file or the name of a module. Its methods, networks, DataModules, partitions and callbacks
    can then be called by their class names.
    """
    left: list[str] = []
    todo = list(arguments)
    while todo:
        word = todo.pop(0)
        option, equals, value = word.partition("=")
        if option in ("--use", "--config", "-c") and not equals:
            value = todo.pop(0) if todo else ""
        if option == "--use":
            use(value)
        elif option in ("--config", "-c"):
            left += ["--config", _config(value)]
        else:
            left.append(word)
    return left


def use(name: str) -> None:
    """Import a user's file or module, so that its classes are found by name."""
    path = Path(name)
    if not name:
        raise FederationError("--use takes a Python file or the name of a module.")
    try:
        if path.suffix == ".py":
            if not path.exists():
                raise FederationError(f"There is no file {name} to use.")
            folder, name = str(path.resolve().parent), path.stem
            if folder not in sys.path:  # a saved configuration names the class by file and class
                sys.path.insert(0, folder)
        USED.append(name)
        importlib.import_module(name)
    except ImportError as error:
        raise FederationError(f"{path} cannot be used: {error}.") from error


def packaged() -> dict[str, str]:
    """Paths of the packaged configurations by name."""
    files = resources.files("fl_lightning.configs").iterdir()
    return {Path(file.name).stem: str(file) for file in files if file.name.endswith(".yaml")}


def _config(value: str) -> str:
    if not value:
        raise FederationError(
            f"--config takes a YAML file, or the name of one of the library's: {', '.join(packaged())}."
        )
    if not Path(value).exists():
        return packaged().get(value.removesuffix(".yaml"), value)
    if Path(value).is_file():
        _check(Path(value))
    return value


def _check(path: Path) -> None:
    """Refuse a configuration that is not one, and say where."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise FederationError(f"{path} cannot be read as YAML{where}: {problem or error}.") from error
    if not isinstance(found, dict):
        raise FederationError(f"{path} holds no settings: fl-lightning fit --print_config shows what they look like.")
