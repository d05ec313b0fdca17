"""The command line: ``fl-lightning COMMAND``."""

from fl_lightning.cli.commands import main

__all__ = ["main"]
