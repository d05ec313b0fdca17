"""Tables of options on the methods' pages: ``python docs/options.py`` writes them from the constructors.

A table stands between ``<!-- options: FedBPS -->`` and ``<!-- end of options -->``. Values are those that the
constructor declares, meanings those of its docstring.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fl_lightning import methods
from fl_lightning.arguments import in_words, options, parameters, settings
from fl_lightning.module import FederatedModule
from fl_lightning.ranges import ranges

PAGES = Path(__file__).parent / "methods"
BLOCK = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end of options -->)", re.DOTALL)
HEAD = "| option | values | default | meaning |\n|---|---|---|---|\n"
ROLE = re.compile(r":(?:class|func|meth|attr|mod):`~?(?:[\w.]*\.)?(\w+)`")


def meanings(kind: type) -> dict[str, str]:
    """Meanings of arguments in Markdown, from the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for one in kind.__mro__:
        text = inspect.cleandoc(one.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
        parts = re.split(r"^ {4}(\w+): ", text, flags=re.MULTILINE)
        for name, said in zip(parts[1::2], parts[2::2], strict=True):
            words = ROLE.sub(r"`\1`", " ".join(said.split())).replace("``", "`").rstrip(".")
            found.setdefault(name, words.replace("|", "\\|"))
    return found


def values(hint: Any) -> str:
    """The values that an option takes, where they are plain."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        said = [values(one) for one in inner if one is not types.NoneType]
        none = ["none"] if types.NoneType in inner else []
        return ", or ".join(dict.fromkeys([*said, *none])) if all(said) else ""
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in inner)
    if origin is Annotated:
        whole = "whole, " if inner[0] is int else ""
        return whole + ", ".join(one.words for one in ranges(hint))
    if hint in (bool, int, float, str):
        return "true, false" if hint is bool else in_words(hint)
    if isinstance(origin, type) and issubclass(origin, Collection):
        words = values(inner[-1] if issubclass(origin, Mapping) else inner[0])
        return f"{in_words(hint)}, each {words}" if words else in_words(hint)
    return ""


def default(value: Any) -> str:
    """A default as a configuration file has it."""
    if value is inspect.Parameter.empty:
        return ""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{value}`" if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)


def rows(kind: type, base: type | None = None) -> Iterator[str]:
    """A line for every option that a class adds to those of its base, those of settings under ``laplace.samples``."""
    hints, said, inner = options(kind), meanings(kind), settings(kind)
    own = [inspect.signature(vars(one)["__init__"]).parameters for one in kind.__mro__ if _speaks(one, base)]
    for name in parameters(kind):
        first = next((found[name] for found in own if name in found), None)
        if first is None or name == "net":
            continue
        if name in inner:
            for row in rows(inner[name]):
                yield row.replace("| `", f"| `{name}.", 1)
            continue
        yield f"| `{name}` | {values(hints.get(name))} | {default(first.default)} | {said.get(name, '')} |\n"


def _speaks(kind: type, base: type | None) -> bool:
    return "__init__" in vars(kind) and kind is not base and kind.__module__.startswith("fl_lightning")


def table(name: str) -> str:
    """The table of a method's own options, and of FedAvg those that all methods have."""
    kind = getattr(methods, name)
    return HEAD + "".join(rows(kind, None if kind is methods.FedAvg else FederatedModule))


def written(text: str) -> str:
    """A page with its tables."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{table(match[2])}\n{match[3]}", text)


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
