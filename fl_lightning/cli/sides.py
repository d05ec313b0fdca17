"""Shared arguments and checks of ``serve``, ``join`` and ``federation``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from fl_lightning.cli.lightning import FederatedCLI, about, given, hide_dry_run
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule

#: Default port of the server.
PORT = 8000


class SideCLI(FederatedCLI):
    """Method, data and Trainer as in ``fit``, for one side of a federation."""

    def __init__(self, argv: list[str], **options: Any) -> None:
        names = {"prog": f"fl-lightning {argv[0]}", **about(argv[0])}
        super().__init__(args=given(argv, argv[1:]), run=False, parser_kwargs=names, **options)
        if self.config["dry_run"]:
            raise FederationError(f"--dry_run is an option of fit, not of {argv[0]}.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of both sides."""
        super().add_arguments_to_parser(parser)
        hide_dry_run(parser)
        parser.add_argument(
            "--insecure", action="store_true", help="use no TLS and no keys: only for trials on one machine"
        )

    def prepared(self) -> FederatedModule:
        """The method in the precision of the run, as a fit would have it."""
        method: FederatedModule = self.model
        trainer: Trainer = self.trainer
        if trainer.world_size > 1:
            raise FederationError("Each side of a federation is one process: set --trainer.devices 1.")
        trainer.strategy.precision_plugin.convert_module(method)
        return method


def talk(quiet: bool) -> None:
    """Print the library's log messages, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    own = logging.getLogger("fl_lightning")
    own.handlers, own.propagate = [handler], False
    own.setLevel(logging.WARNING if quiet else logging.INFO)


def folder(path: str) -> Path:
    """A writable folder, created if necessary."""
    made = Path(path)
    try:
        made.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise FederationError(f"{made} is not writable ({error.strerror}): choose another folder.") from error
    return made
