"""Names on the command line: packaged configurations and user classes."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import traceback
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import FederationError

#: Modules that ``--use`` has imported: their classes have short names too.
USED: list[str] = []
#: Entries of a configuration, repetitions written out.
MOST = 100_000
#: Keys of a class in a configuration.
CLASS = {"class_path", "init_args", "dict_kwargs"}


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
    """Import a user's file or module to make its classes available by name."""
    path = Path(name)
    if not name:
        raise FederationError("--use takes a Python file or the name of a module.")
    if path.suffix == ".py" and not path.exists():
        raise FederationError(f"There is no file {name}: --use takes a Python file or the name of a module.")
    try:
        if path.suffix == ".py":
            folder, name = str(path.resolve().parent), path.stem
            if folder not in sys.path:  # a saved configuration names the class by file and class
                sys.path.insert(0, folder)
        importlib.import_module(name)
        USED.append(name)
    except Exception as error:  # whatever the user's code does
        where = f" in line {line}" if (line := _line(error, path)) else ""
        reason = " ".join(str(error).split()).rstrip(".")
        raise FederationError(f"{path} cannot be used: {type(error).__name__}{where}: {reason}.") from error


def _line(error: Exception, path: Path) -> int | None:
    """The line of a file in which an error was raised, the last one if there are several."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return lines[-1] if lines else None


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
        found = packaged().get(value.removesuffix(".yaml"))
        if found is None:
            raise FederationError(
                f"There is no file {value}; the library's own configurations are: {', '.join(packaged())}."
            )
        return found
    if Path(value).is_file():
        _check(Path(value))
    return value


def _check(path: Path) -> None:
    """Refuse an invalid configuration, and say where it is wrong."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise FederationError(f"{path} cannot be read as YAML{where}: {problem or error}.") from error
    if not isinstance(found, dict):
        raise FederationError(f"{path} holds no settings: see fl-lightning fit --print_config for an example.")
    if _size(found, {}) > MOST:
        raise FederationError(f"{path} expands to too many entries (YAML anchors): shorten it.")
    _check_classes(found, str(path), "")


def _size(value: Any, known: dict[int, float]) -> float:
    """Number of entries of a value with all anchors expanded; infinite if recursive."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(value)]


def _check_classes(value: Any, path: str, place: str) -> None:
    """Refuse options that are next to a class's init_args instead of inside them."""
    if isinstance(value, list):
        for number, part in enumerate(value):
            _check_classes(part, path, f"{place}[{number}]")
    if not isinstance(value, dict):
        return
    stray = sorted(map(str, value.keys() - CLASS)) if "class_path" in value else []
    if stray:
        name = str(value["class_path"]).rpartition(".")[2]
        raise FederationError(f"{path} has {place}.{stray[0]}, an option of {name}: move it under {place}.init_args.")
    for key, part in value.items():
        _check_classes(part, path, f"{place}.{key}".lstrip("."))
