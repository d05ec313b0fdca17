"""Silence for Lightning messages that do not apply to federated runs, and for Trainers inside other work."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: Warnings about library versions, and about rounds, which have one batch each for the Trainer.
WARNINGS = (
    r".*recommended to use `self\.log\('(train|val|test|comm|clients|time)/.*sync_dist",  # the same on every rank
    r".*treespec, LeafSpec",  # Lightning 2.6 with newer torch
    r".*The number of training batches \(1\) is smaller than the logging interval",
    r"\s*Dump of a value that does not round-trip: a tuple",  # a list in a configuration is as good
    r"The dirpath has changed from",  # every run has a folder of its own
)
_ADVERT = re.compile(r"^💡|override existing callbacks passed to Trainer: (\w*ProgressBar|SignalsCallback)$")


class _NoAdverts(logging.Filter):
    """Drops advertisements."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep a record."""
        return not _ADVERT.search(str(record.msg))


def hush() -> None:
    """Silence these messages in the whole process, unless the environment has ``FL_LIGHTNING_NOISE=1``."""
    if os.environ.get("FL_LIGHTNING_NOISE"):
        return
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).addFilter(_NoAdverts())


@contextmanager
def silence(warned: bool = True) -> Iterator[None]:
    """Silence Lightning's notes within the context.

    Args:
        warned: whether warnings are still shown.
    """
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        if not warned:
            warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def quiet_trainer(**options: Any) -> Trainer:
    """Return a Trainer on the CPU without logs, checkpoints or output, unless options override this."""
    from lightning.pytorch import Trainer

    plain: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**plain, **options})
