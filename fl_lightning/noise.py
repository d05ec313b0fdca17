"""Messages of Lightning that say nothing of a federated run: adverts, and notes on how rounds look to a Trainer."""

from __future__ import annotations

import logging
import os
import re
import warnings

#: Warnings about versions of libraries, and about rounds, each of which is one batch to the Trainer.
WARNINGS = (
    r".*recommended to use `self\.log\('(train|val|test|comm|clients|time)/.*sync_dist",  # the same on every rank
    r".*treespec, LeafSpec",  # Lightning 2.6 with newer torch
    r".*The number of training batches \(1\) is smaller than the logging interval",
)
_ADVERT = re.compile(r"^💡|override existing callbacks passed to Trainer: (\w*ProgressBar|SignalsCallback)$")


class _NoAdverts(logging.Filter):
    """Lets everything pass but advertisements."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is worth reading."""
        return not _ADVERT.search(str(record.msg))


def hush() -> None:
    """Keep these messages back, in the whole process; the environment's ``FL_LIGHTNING_NOISE=1`` leaves them."""
    if os.environ.get("FL_LIGHTNING_NOISE"):
        return
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).addFilter(_NoAdverts())
