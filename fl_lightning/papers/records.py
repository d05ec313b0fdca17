"""Records of finished runs, the source of every page: one JSON Lines file per table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_lightning.errors import FederationError
from fl_lightning.papers.tables import Config, config_hash

Result = dict[str, Any]
Key = tuple[str, int]
SUFFIX = ".jsonl"
#: Keys of a line.
PARTS = {"run", "seed", "config", "result"}


class Records:
    """Results of finished runs by configuration and seed.

    A run needed by several tables is recorded once, in the file of the table it was made for.

    Args:
        folder: folder of the files; None keeps records in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @cached_property
    def files(self) -> dict[str, dict[Key, dict[str, Any]]]:
        """The records of every file, by the file's stem."""
        paths = sorted(self.folder.glob(f"*{SUFFIX}")) if self.folder is not None else []
        return {path.stem: {(line["run"], line["seed"]): line for line in _read(path)} for path in paths}

    def lines(self) -> Iterator[dict[str, Any]]:
        """All records, file by file."""
        for found in self.files.values():
            yield from found.values()

    def result(self, config: Config, seed: int) -> Result | None:
        """Return the result of a finished run, or None."""
        key = (config_hash(config), seed)
        found: Result | None = next((file[key]["result"] for file in self.files.values() if key in file), None)
        return found

    def seeds(self, config: Config) -> list[int]:
        """Return the recorded seeds of a configuration."""
        run = config_hash(config)
        return sorted(seed for file in self.files.values() for name, seed in file if name == run)

    def keep(self, name: str, config: Config, seed: int, result: Mapping[str, Any]) -> None:
        """Record a run, in the file that already has it or else in the table's file."""
        key = (config_hash(config), seed)
        stem = next((stem for stem, file in self.files.items() if key in file), name.replace("/", "_"))
        line = {"run": key[0], "seed": seed, "config": config, "result": dict(result)}
        self.files.setdefault(stem, {})[key] = json.loads(json.dumps(line))
        self._write(stem)

    def _write(self, stem: str) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{stem}{SUFFIX}"
        partial = path.with_suffix(".part")
        partial.write_text("".join(_text(line) for _, line in sorted(self.files[stem].items())))
        os.replace(partial, path)


def _text(line: Mapping[str, Any]) -> str:
    """Format a record as a line: name first, keys sorted, no blanks."""
    head = {key: line[key] for key in ("run", "seed")}
    rest = {key: line[key] for key in ("config", "result")}
    compact = {"separators": (",", ":")}
    return f"{json.dumps(head, **compact)[:-1]},{json.dumps(rest, sort_keys=True, **compact)[1:]}\n"  # type: ignore[arg-type]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if not isinstance(line, dict) or line.keys() != PARTS:
            raise FederationError(f"{path}, line {number}, is not a record: remove the line and run its cell again.")
        yield line
