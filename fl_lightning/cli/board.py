"""``fl-lightning board RUN...``: TensorBoard with runs named by what differs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.cli.runs import Run, find
from fl_lightning.errors import FederationError


def build_parser() -> FederatedArgumentParser:
    """The command's options."""
    parser = FederatedArgumentParser(
        prog="fl-lightning board",
        description="Start TensorBoard on finished or running fits. Runs are named by method and by the settings that "
        "differ, not by folder. A folder stands for all runs in it.",
    )
    parser.add_argument("runs", nargs="+", type=str, help="log folders of fits")
    parser.add_argument("--port", type=int, default=6006, help="port to listen on; 0 chooses a free one")
    parser.add_argument(
        "--host",
        type=str,
        default="127.0.0.1",
        help="address to listen on; the default is only reachable from this machine",
    )
    return parser


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    options = build_parser().parse_args(argv[1:])
    with tempfile.TemporaryDirectory(prefix="fl-lightning-board-") as folder:
        link(find(options.runs), Path(folder))
        address = launch(Path(folder), options.host, options.port)
        print(f"{address}#custom_scalars   (stop with Ctrl-C)", flush=True)
        Event().wait()


def launch(folder: Path, host: str = "127.0.0.1", port: int = 0) -> str:
    """Start TensorBoard in this process, and return its address.

    Args:
        folder: the folder of the runs.
        host: address to serve at.
        port: port to serve at; 0 takes any that is free.
    """
    from tensorboard import program

    board = program.TensorBoard()
    options = ["--logdir", str(folder), "--host", host, "--port", str(port), "--load_fast=false"]
    board.configure(argv=["tensorboard", *options, "--window_title", "fl_lightning"])
    try:
        return str(board.launch())
    except program.TensorBoardServerException as error:
        raise FederationError(f"TensorBoard cannot start at {host}:{port}: {error.msg} Try --port 0.") from error


def link(runs: Sequence[Run], folder: Path) -> list[str]:
    """Link every run under its name, and return the names; repetitions get their seeds, then numbers.

    Args:
        runs: with names by what differs.
        folder: an empty folder.
    """
    names: list[str] = []
    for run in runs:
        name = re.sub(r"[/\\\\]", "-", run.name)
        if any(other is not run and other.name == run.name for other in runs):
            name += f", seed {run.settings.get('seed', '?')}"
        number = sum(known == name or known.startswith(f"{name} #") for known in names)
        names.append(f"{name} #{number + 1}" if number else name)
        (folder / names[-1]).symlink_to(run.path.resolve(), target_is_directory=True)
    return names
