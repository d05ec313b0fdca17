"""Marks in generated files, so that no other file is ever overwritten."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fl_lightning.errors import FederationError

#: The mark in every page and figure.
MARK = "written by fl-lightning reproduce"
#: Last line of a page.
COMMENT = f"<!-- {MARK} -->"


def write_text(path: Path, text: str) -> Path:
    """Write a page; refuse to overwrite a file without the mark."""
    check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text.rstrip()}\n\n{COMMENT}\n", encoding="utf-8")
    return path


def save(figure: Any, path: Path) -> Path:
    """Save a figure; refuse to overwrite a file without the mark."""
    check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": MARK})
    return path


def copy(source: Path, path: Path) -> Path:
    """Copy a marked figure; refuse to overwrite a file without the mark."""
    check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.read_bytes())
    return path


def adopt(source: Path, path: Path) -> Path:
    """Copy a figure and mark it."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    info = PngInfo()
    info.add_text("Software", MARK)
    with Image.open(source) as image:
        image.save(path, pnginfo=info)
    return path


def is_marked(path: Path) -> bool:
    """Whether a file has the mark."""
    return MARK.encode() in path.read_bytes()


def check(path: Path) -> None:
    """Refuse to overwrite a file without the mark."""
    if path.exists() and not is_marked(path):
        raise FederationError(f"{path} was not {MARK}: move it away, or choose another folder.")


def remove_others(folders: Iterable[Path], written: Iterable[Path]) -> list[Path]:
    """Remove and return marked files that were not written this time."""
    kept = {path.resolve() for path in written}
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.rglob("*")) if path.is_file()]
    old = [path for path in files if path.resolve() not in kept and path.suffix in (".md", ".png") and is_marked(path)]
    for path in old:
        path.unlink()
    return old
