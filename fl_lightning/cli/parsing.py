"""A parser with one-sentence errors for the command line and configuration files."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from fl_lightning.arguments import Settings, fixed_options, hint, limits, nearest, parameters
from fl_lightning.cli.names import USED
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.datamodules.partitions import PartitionScheme
from fl_lightning.local_optim import LocalOptimizer
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.schedules import Schedule
from fl_lightning.tasks import Task

#: Base class of an option's choices, by name.
CHOICES: dict[str, tuple[str, type]] = {
    "model": ("method", FederatedModule),
    "data": ("data set", FederatedDataModule),
    "net": ("network", FedNet),
    "partition": ("partition", PartitionScheme),
    "omega": ("schedule", Schedule),
    "psi": ("schedule", Schedule),
    "lr_schedule": ("schedule", Schedule),
    "optimizer": ("local optimizer", LocalOptimizer),
    "task": ("task", Task),
}
#: The same where Lightning and PyTorch have classes too, which need not be listed.
OTHERS: dict[str, tuple[str, type]] = {
    "callbacks": ("callback", Callback),
    "logger": ("logger", Logger),
    "server_optimizer": ("optimizer", Optimizer),
}
#: Place of an option's type in its help.
RANGE = "type: %(type)s"
set_parsing_settings(subclasses_disabled=[Settings])  # their options stand among those of the class that has them
_FRAME = re.compile(
    r"^(- ?)?($|Does not validate against|Subtypes:|Errors:|Given value|Expected a path but"
    r"|Expected a <class 'NoneType'>$)"
)
_KEY = re.compile(r"(?:Parser key \"([\w.]+)\"(?: element \d+)?|^--([\w.]+)\.help):?\s*")
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':?\s*")


class FederatedArgumentParser(LightningArgumentParser):
    """LightningArgumentParser with one-sentence errors, without the usage text, and ranges of options in the help."""

    def add_class_arguments(self, theclass: Any, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Add a class's options, each with the range that its constructor declares."""
        added = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        said = limits(theclass) if isinstance(theclass, type) else {}
        for action in self._actions:
            words = said.get(action.dest.removeprefix(f"{nested_key}."))
            if words and action.help is not None and RANGE not in action.help:
                first = "required, " if action.required else ""
                last = "" if action.required and action.default is None else ", default: %(default)s"
                action.help = f"{action.help} ({first}{RANGE}, {words}{last})"
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and exit with code 2."""
        options = [text for action in self._actions for text in action.option_strings]
        print(f"fl-lightning: error: {explain(message, options)}", file=sys.stderr)
        raise SystemExit(2)


def explain(message: str, options: Collection[str] = ()) -> str:
    r"""One sentence out of jsonargparse's nested report.

    Args:
        message: the report.
        options: all options that there are, to name the one that was meant.

    Example:
        >>> explain("Parser key \"lr\": Expected a <class 'float'>. Got value: abc")
        "lr: expected a value of type float, not 'abc'."
    """
    option = ".".join(dict.fromkeys(key or helped for key, helped in _KEY.findall(message)))
    classes = [path.rpartition(".")[2] for path in _CLASS.findall(message)]
    lines = (_CLASS.sub("", _KEY.sub("", line.strip())).strip() for line in message.splitlines())
    reasons = [line.removeprefix("- ").rstrip(".") for line in lines if line and not _FRAME.match(line)]
    reason = _wanted(reasons, message) or _plain(
        reasons[0] if reasons else " ".join(message.split()), option, classes, options
    )
    wrong = re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", reason)
    reason += nearest(wrong[1], options).rstrip(".") if wrong else ""
    if reason.endswith("?"):
        return f"{option}: {reason}" if option else reason
    return f"{option}: {reason}." if option else f"{reason}."


def _plain(reason: str, option: str, classes: list[str], options: Collection[str]) -> str:
    unknown = re.search(r"Expected a dot import path string: (\S+)|Import path (\S+) does not correspond", reason)
    kind = option.rpartition(".")[2]
    if unknown and kind in CHOICES:
        return _unknown(next(filter(None, unknown.groups())), *CHOICES[kind])
    if unknown and kind in OTHERS:
        name, (noun, base) = next(filter(None, unknown.groups())), OTHERS[kind]
        near = nearest(name, names(base, ("lightning.pytorch", "torch.optim")))
        return f"there is no {noun} {name!r}{near or '; give the import path of its class'}"
    if re.search(r"required: net$|[Kk]ey \"net\" is required", reason):
        return f"a method needs a network: add --model.net, one of {', '.join(sorted(names(FedNet)))}"
    missing = re.match(r"the following arguments are required: (.*fit\.)?(.*model|.*data)$", reason)
    if missing:
        return _missing(reason.partition(": ")[2])
    if reason.startswith("Unable to load config"):  # settings
        inner = ", ".join(text.removeprefix("--") for text in options if text.startswith(f"--{option}."))
        return f"expected a dict, or its options one by one: {inner}"
    refused = re.search(r"(?:Option|Key) '([\w.]+)' is not (?:accepted|expected)", reason)
    if refused:
        every = [kind for _, base in (*CHOICES.values(), *OTHERS.values()) for kind in known(base)]
        kinds = [kind for kind in every if kind.__name__ in classes[-1:]] or _read(every, options) or every
        said = f"{classes[-1]} has no option {refused[1]!r}" if classes else reason
        fixed = {kind.__name__: fixed_options(kind)[refused[1]] for kind in kinds if refused[1] in fixed_options(kind)}
        if fixed:
            return f"{said}: leave it out, as with " + "; ".join(f"{name} {why}" for name, why in fixed.items())
        return said + hint(refused[1], kinds)
    return reason


def _missing(names: str) -> str:
    """Say which options to add; those of a subcommand are reported under its name."""
    found = [f"--{name.rpartition('.')[2]}" for name in names.split(", ")]
    words = " and ".join([*([", ".join(found[:-1])] if found[1:] else []), found[-1]])
    return f"add {words}" + (", or --config quickstart for a first run" if "--model" in found else "")


def _read(kinds: Sequence[type], options: Collection[str]) -> list[type]:
    """Return the classes whose options a parser reads: all of theirs, and of no other class more."""
    found = [kind for kind in kinds if all(f"--{name}" in options for name in parameters(kind))]
    most = max((len(parameters(kind)) for kind in found), default=0)
    return [kind for kind in found if most and len(parameters(kind)) == most]


def _wanted(reasons: Sequence[str], message: str) -> str:
    """Expected value, choices and given value; empty if this does not apply."""
    kinds = [re.match(r"Expected an? (?:typing\.Literal\[(.*?)\]|<class '([\w.]+)'>)", reason) for reason in reasons]
    given = re.search(r"Got value: (.*)", reasons[0] if reasons else "") or re.search(r"Given value: (.*)", message)
    if not kinds or kinds[0] is None or given is None:
        return ""
    told = dict.fromkeys(
        f"one of {kind[1].replace(chr(39), '')}" if kind[1] else f"a value of type {kind[2].rpartition('.')[2]}"
        for kind in kinds
        if kind is not None
    )
    return f"expected {' or '.join(told)}, not {given[1].rstrip('.')!r}"


def _unknown(name: str, noun: str, base: type) -> str:
    known = sorted(names(base))
    lower = {kind.lower(): kind for kind in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    hint = f"did you mean {lower[near[0]]}? There are" if near else "choose one of"
    return f"there is no {noun} {name!r}; {hint} {', '.join(known)}"


def names(base: type, more: tuple[str, ...] = ()) -> list[str]:
    """Short names of the public subclasses of ``base``: the library's, those of ``--use`` and others."""
    return [kind.__name__ for kind in known(base, more)]


def _modules() -> tuple[str, ...]:
    return ("fl_lightning", *USED)


def known(base: type, more: tuple[str, ...] = ()) -> list[type[Any]]:
    """The concrete public subclasses of ``base``."""
    found: set[type[Any]] = set()
    todo: list[type[Any]] = [base]
    while todo:
        for kind in todo.pop().__subclasses__():
            if kind not in found:
                found.add(kind)
                todo.append(kind)
    modules = (*_modules(), *more)
    inside = tuple(f"{name}." for name in modules)
    public = (k for k in found if f"{k.__module__}.".startswith(inside) and not k.__name__.startswith("_"))
    return sorted(
        (kind for kind in public if not getattr(kind, "__abstractmethods__", None)), key=lambda kind: kind.__name__
    )
