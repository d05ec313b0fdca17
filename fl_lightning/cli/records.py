"""Records of finished runs: small files kept beside the tables, so that tables and pictures outlive the runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fl_lightning.cli.cells import cached
from fl_lightning.cli.tables import Config, config_hash


class Records:
    """Results of runs: of those in a working folder, and of those of which only the record is left.

    Args:
        runs: folder in which runs work and leave their results.
        folder: folder of the records, one file for each configuration and seed.
    """

    def __init__(self, runs: Path, folder: Path) -> None:
        self.runs = runs
        self.folder = folder

    def result(self, config: Config, seed: int) -> dict[str, Any] | None:
        """The result of a finished run, or None; one in the working folder comes before a record."""
        return cached(self.runs, config, seed) or self._recorded(config, seed)

    def is_only_recorded(self, config: Config, seed: int) -> bool:
        """Whether a run is known by its record alone."""
        return cached(self.runs, config, seed) is None and self._recorded(config, seed) is not None

    def keep(self, config: Config, seed: int) -> None:
        """Record a run that is finished; one that is not leaves its record, if there is one, as it is."""
        result = cached(self.runs, config, seed)
        if result is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(config, seed)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps({"config": config, "seed": seed, "result": result}) + "\n")
        os.replace(partial, path)

    def _path(self, config: Config, seed: int) -> Path:
        return self.folder / f"{config_hash(config)}-seed{seed}.json"

    def _recorded(self, config: Config, seed: int) -> dict[str, Any] | None:
        try:
            result: dict[str, Any] = json.loads(self._path(config, seed).read_text())["result"]
        except (FileNotFoundError, json.JSONDecodeError, KeyError):
            return None
        return result
