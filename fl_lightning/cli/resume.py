"""Find the run that ``fit --ckpt_path last`` resumes: the newest with the same configuration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback

#: Options that may differ in a resumed run of the same configuration.
FREE = ("ckpt_path", "weights_only", "quiet", "dry_run", "config")
FREE_OF_TRAINER = ("max_epochs", "max_time", "logger", "enable_progress_bar", "enable_model_summary", "devices")


def newest(trainer: Trainer) -> Path | None:
    """The newest checkpoint of sibling runs with the same configuration; None if there is none.

    Where ModelCheckpoint writes to a folder of its own, Lightning finds the last checkpoint there.

    Args:
        trainer: the Trainer, with the callback by which LightningCLI saves the configuration.
    """
    saver = next((one for one in trainer.callbacks if isinstance(one, SaveConfigCallback)), None)  # type: ignore[attr-defined]
    savers = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]  # type: ignore[attr-defined]
    if saver is None or trainer.log_dir is None or any(one.dirpath is not None for one in savers):
        return None
    wanted = _settings(yaml.safe_load(saver.parser.dump(saver.config, skip_none=False)))
    runs = (path.parent for path in Path(trainer.log_dir).parent.glob("*/config.yaml") if _same(path, wanted))
    found = (path for run in runs for path in (run / "checkpoints").glob("*.ckpt"))
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _same(path: Path, wanted: dict[str, Any]) -> bool:
    try:
        return _settings(yaml.safe_load(path.read_text(encoding="utf-8"))) == wanted
    except (OSError, yaml.YAMLError, AttributeError):
        return False


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the settings that may differ."""
    kept = _without(config, FREE)
    return {**kept, "trainer": _without(kept.get("trainer") or {}, FREE_OF_TRAINER)}


def _without(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
