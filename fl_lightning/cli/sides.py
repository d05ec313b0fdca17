"""Arguments and checks that the commands of a real federation share: ``serve``, ``join`` and ``federation``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from fl_lightning.cli.lightning import FederatedCLI, given
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule

#: Where sites reach a server unless another port is said.
PORT = 8000


class SideCLI(FederatedCLI):
    """Method, data and Trainer as ``fit`` takes them, for one side of a federation."""

    def __init__(self, argv: list[str], **options: Any) -> None:
        super().__init__(args=given(argv, argv[1:]), run=False, **options)
        if self.config["dry_run"]:
            raise FederationError(f"--dry_run is an option of fit, not of {argv[0]}.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of both sides."""
        super().add_arguments_to_parser(parser)
        parser.add_argument("--insecure", action="store_true", help="without TLS and keys: for trials on one machine")

    def prepared(self) -> FederatedModule:
        """The method in the precision of the run, as a fit would have it."""
        method: FederatedModule = self.model
        trainer: Trainer = self.trainer
        if trainer.world_size > 1:
            raise FederationError("Each side of a federation is one process: set --trainer.devices 1.")
        trainer.strategy.precision_plugin.convert_module(method)
        return method


def talk(quiet: bool) -> None:
    """Let the library's own messages be seen, a line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    own = logging.getLogger("fl_lightning")
    own.handlers, own.propagate = [handler], False
    own.setLevel(logging.WARNING if quiet else logging.INFO)


def folder(path: str) -> Path:
    """A folder that can be written to, made if need be."""
    made = Path(path)
    try:
        made.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise FederationError(f"{made} cannot be written to ({error.strerror}): name another folder.") from error
    return made
