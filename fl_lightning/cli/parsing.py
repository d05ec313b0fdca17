"""A parser that says in one sentence what is wrong with the command line or a configuration file."""

from __future__ import annotations

import difflib
import re
import sys
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.datamodules.partitions import PartitionScheme
from fl_lightning.methods.schedules import Schedule
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet

#: What an option of that name chooses among.
CHOICES: dict[str, tuple[str, type]] = {
    "model": ("method", FederatedModule),
    "data": ("data set", FederatedDataModule),
    "net": ("network", FedNet),
    "partition": ("partition", PartitionScheme),
    "omega": ("schedule", Schedule),
    "psi": ("schedule", Schedule),
}
_FRAME = re.compile(
    r"^(- )?(Does not validate against|Subtypes:|Errors:|Given value|Expected a path but"
    r"|Expected a <class 'NoneType'>$)"
)
_KEY = re.compile(r"Parser key \"([\w.]+)\":?\s*")
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':?\s*")


class FederatedArgumentParser(LightningArgumentParser):
    """LightningArgumentParser whose errors are a sentence, without the list of all options before it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the sentence and end with exit code 2."""
        print(f"fl-lightning: error: {explain(message)}", file=sys.stderr)
        raise SystemExit(2)


def explain(message: str) -> str:
    r"""One sentence out of jsonargparse's nested report.

    Example:
        >>> explain("Parser key \"lr\": Expected a <class 'float'>. Got value: abc")
        "lr: expected a value of type float, not 'abc'."
    """
    option = ".".join(_KEY.findall(message))
    classes = [path.rpartition(".")[2] for path in _CLASS.findall(message)]
    lines = (_CLASS.sub("", _KEY.sub("", line.strip())).strip() for line in message.splitlines())
    reasons = [line.removeprefix("- ").rstrip(".") for line in lines if line and not _FRAME.match(line)]
    reason = _plain(reasons[0] if reasons else " ".join(message.split()), option, classes)
    return f"{option}: {reason}." if option else f"{reason}."


def _plain(reason: str, option: str, classes: list[str]) -> str:
    unknown = re.search(r"Expected a dot import path string: (\S+)|Import path (\S+) does not correspond", reason)
    kind = option.rpartition(".")[2]
    if unknown and kind in CHOICES:
        return _unknown(next(filter(None, unknown.groups())), *CHOICES[kind])
    refused = re.search(r"(?:Option|Key) '([\w.]+)' is not (?:accepted|expected)", reason)
    if refused and classes:
        return f"{classes[-1]} has no option {refused[1]!r}"
    among = re.search(r"Expected an? typing\.Literal\[(.*?)\]\. Got value: (.*)", reason)
    if among:
        return f"expected one of {among[1].replace(chr(39), '')}, not {among[2]!r}"
    wanted = re.search(r"Expected an? <class '(\w+)'>\. Got value: (.*)", reason)
    return f"expected a value of type {wanted[1]}, not {wanted[2]!r}" if wanted else reason


def _unknown(name: str, noun: str, base: type) -> str:
    known = sorted(names(base))
    lower = {kind.lower(): kind for kind in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    hint = f"did you mean {lower[near[0]]}? There are" if near else "choose one of"
    return f"there is no {noun} {name!r}; {hint} {', '.join(known)}"


def names(base: type) -> list[str]:
    """Short names of the library's public classes that derive from ``base``."""
    found: set[type[Any]] = set()
    todo: list[type[Any]] = [base]
    while todo:
        for kind in todo.pop().__subclasses__():
            if kind not in found:
                found.add(kind)
                todo.append(kind)
    public = (
        kind for kind in found if kind.__module__.startswith("fl_lightning") and not kind.__name__.startswith("_")
    )
    return [kind.__name__ for kind in public if not getattr(kind, "__abstractmethods__", None)]
