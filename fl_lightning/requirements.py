"""Supported versions of dependencies, and the exported names; neither needs to import torch."""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

#: Packages whose classes are exported by ``fl_lightning`` itself.
EXPORTING = ("methods", "datamodules", "nets", "callbacks")


def check_requirements(wanted: list[str] | None = None) -> None:
    """Raise ImportError if an installed version is not one that the package declares.

    Requirements are those of the installed distribution; a source tree that is not installed has none.
    """
    if wanted is None:
        try:
            wanted = requires("fl-lightning") or []
        except PackageNotFoundError:
            return
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            continue  # code that needs it raises its own error
        if not requirement.specifier.contains(found, prereleases=True):
            plain = f"{requirement.name}{requirement.specifier}"
            raise ImportError(
                f"fl_lightning works with {plain}, but {requirement.name} {found} is installed: pip install '{plain}'."
            )


@cache
def exported() -> dict[str, str]:
    """Return the package of every exported class, read from ``__all__`` without importing the packages."""
    found: dict[str, str] = {}
    for package in reversed(EXPORTING):
        tree = ast.parse((Path(__file__).parent / package / "__init__.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {name: package for name in ast.literal_eval(node.value) if name[0].isupper()}
    return found
