"""The commands of ``fl-lightning``; each is imported only when it runs, so that help is quick."""

from __future__ import annotations

import atexit
import difflib
import gc
import importlib
import os
import sys
import traceback
from typing import NamedTuple

from fl_lightning import __version__


class Command(NamedTuple):
    """Module, help text and examples of a command."""

    module: str
    help: str
    examples: tuple[str, ...] = ()


COMMANDS = {
    "fit": Command(
        "fl_lightning.cli.lightning",
        "train a federation",
        (
            "fl-lightning fit --config quickstart",
            "fl-lightning fit --config quickstart --dry_run",
            "fl-lightning fit --config quickstart --model FedProx --model.mu 0.1 --trainer.max_epochs 50",
            "fl-lightning fit --config quickstart --ckpt_path last",
        ),
    ),
    "validate": Command(
        "fl_lightning.cli.lightning",
        "evaluate every client on its validation samples",
        ("fl-lightning validate --config quickstart --ckpt_path runs/quickstart/version_0/checkpoints/last.ckpt",),
    ),
    "test": Command(
        "fl_lightning.cli.lightning",
        "evaluate every client on its test set",
        ("fl-lightning test --config quickstart --ckpt_path runs/quickstart/version_0/checkpoints/last.ckpt",),
    ),
    "predict": Command(
        "fl_lightning.cli.lightning",
        "predict every client's test set",
        ("fl-lightning predict --config quickstart --ckpt_path runs/quickstart/version_0/checkpoints/last.ckpt",),
    ),
    "serve": Command("fl_lightning.cli.serve", "run the server of a federation of real sites"),
    "join": Command("fl_lightning.cli.join", "join a federation as a site with its own data"),
    "federation": Command(
        "fl_lightning.cli.federation", "run a server and its sites on this machine, and compare with the simulation"
    ),
    "attack": Command(
        "fl_lightning.cli.attack",
        "run a privacy attack on a checkpoint",
        (
            "fl-lightning attack --config quickstart --ckpt_path runs/quickstart/version_0/checkpoints/last.ckpt "
            "--attack membership --view outsider",
        ),
    ),
    "reproduce": Command(
        "fl_lightning.cli.reproduce",
        "run a published table and compare the results",
        ("fl-lightning reproduce waffle_factor_journal/table2 --only dataset=mnist method=fedavg --seeds 0",),
    ),
    "compare": Command(
        "fl_lightning.cli.compare",
        "compare finished runs and write a report",
        (
            "fl-lightning compare runs/quickstart",
            "fl-lightning compare runs/a/version_0 runs/b/version_0 --out comparison",
        ),
    ),
    "board": Command(
        "fl_lightning.cli.board",
        "start TensorBoard with runs named by what differs",
        ("fl-lightning board runs/quickstart",),
    ),
    "partition": Command(
        "fl_lightning.cli.partition",
        "build and show a partition, and write its manifest",
        ("fl-lightning partition --data MNIST --data.partition Multimodal --out multimodal",),
    ),
    "methods": Command("fl_lightning.cli.lists", "list all methods, one line each"),
    "partitions": Command("fl_lightning.cli.lists", "list all partitions, one line each"),
    "tables": Command("fl_lightning.cli.lists", "list all published tables that can be reproduced"),
    "bench": Command(
        "fl_lightning.cli.bench",
        "measure training speed relative to a plain PyTorch loop",
        ("fl-lightning bench --only mnist-mlp --repeats 1",),
    ),
    "demo": Command(
        "fl_lightning.cli.demo",
        "compare Local, FedAvg and APFL on digits: about a minute",
        ("fl-lightning demo",),
    ),
    "completion": Command("fl_lightning.cli.completion", "print a shell completion script"),
}


#: Commands by other names for what they do.
MEANT = {"report": ["compare"], "train": ["fit"], "run": ["fit"], "evaluate": ["test"], "list": ["methods"]}


def main(argv: list[str] | None = None) -> None:
    """Run a command; user errors exit with one sentence and code 2, Ctrl-C with code 130."""
    if argv is None:  # at exit: a garbage collection of all objects would take seconds
        atexit.register(gc.freeze)
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    if arguments[0] == "--version":
        print(f"fl-lightning {__version__}")
        return
    if arguments[0] not in COMMANDS:
        near = MEANT.get(arguments[0]) or difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(COMMANDS)}."
        _refuse(f"There is no command {arguments[0]!r}: {hint}")
    _run(arguments)


def usage() -> str:
    """The help text of ``fl-lightning`` itself."""
    lines = [f"  {name:<12}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fl-lightning COMMAND [options]",
            "",
            "Personalised, fair and private federated learning on PyTorch Lightning.",
            "",
            *lines,
            "",
            "fl-lightning fit --config quickstart              a first run, from any folder",
            "fl-lightning fit --config quickstart --dry_run    steps, bytes and estimated time",
            "fl-lightning fit --model.help FedProx             the options of a method",
            "fl-lightning COMMAND --help                       the options of a command",
            "",
            "fit, validate, test, predict, attack and partition accept --use FILE.py, which makes your own methods,",
            "networks, data, partitions and callbacks available by class name. All but partition accept --quiet.",
        ]
    )


def _run(arguments: list[str]) -> None:
    command = importlib.import_module(COMMANDS[arguments[0]].module)
    try:
        command.main(arguments)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt as stop:
        print(f"fl-lightning: {stop or 'Stopped.'}", file=sys.stderr)
        raise SystemExit(130) from None
    except SystemExit as end:  # Lightning ends with 1 after Ctrl-C
        raise SystemExit(130 if isinstance(end.__context__, KeyboardInterrupt) else end.code) from None
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        _refuse(" ".join(sentence.split()))


def _sentence(error: Exception) -> str | None:
    """Message of an error that the user can fix; None for any other."""
    from fl_lightning.errors import FederationError

    # Commands without Lightning do not import it.
    fabric = sys.modules.get("lightning.fabric.utilities.exceptions")
    expected = (FederationError, *([fabric.MisconfigurationException] if fabric else []))
    cause: BaseException | None = error  # jsonargparse wraps what a constructor raises
    while cause is not None and not isinstance(cause, expected):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return str(cause)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written: {error.strerror}."
    # Lightning raises plain errors for some wrong names, such as an accelerator or a metric to monitor.
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    own = last.f_globals.get("__name__", "").startswith("lightning.")
    return str(error) if own and isinstance(error, ValueError | RuntimeError) else None


def _refuse(sentence: str) -> None:
    print(f"fl-lightning: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)
