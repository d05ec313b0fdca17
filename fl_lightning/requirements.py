"""Versions that the package works with, and the names that it exports; neither needs torch to be imported."""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

#: Packages whose classes can be imported from ``fl_lightning`` itself.
EXPORTING = ("methods", "datamodules", "nets", "callbacks")


def check_requirements(wanted: list[str] | None = None) -> None:
    """Raise ImportError, in one sentence, where an installed version is not one that the package declares.

    Requirements are the installed package's own; a source tree that is not installed has none.
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
            continue  # whoever needs it says so, by name
        if not requirement.specifier.contains(found, prereleases=True):
            plain = f"{requirement.name}{requirement.specifier}"
            raise ImportError(
                f"fl_lightning works with {plain}, but {requirement.name} {found} is installed: pip install '{plain}'."
            )


@cache
def exported() -> dict[str, str]:
    """The package of every exported class; the packages' ``__all__`` is read without importing them."""
    found: dict[str, str] = {}
    for package in reversed(EXPORTING):
        tree = ast.parse((Path(__file__).parent / package / "__init__.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {name: package for name in ast.literal_eval(node.value) if name[0].isupper()}
    return found
