"""``fl-lightning methods``, ``partitions`` and ``tables``: what there is, one line each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

from fl_lightning.errors import FederationError


def exported(module: ModuleType, base: type) -> dict[str, type]:
    """The classes that a package exports and that can be made, by name."""
    kinds = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in sorted(kinds.items(), key=lambda item: item[0].lower())
        if isinstance(kind, type) and issubclass(kind, base) and not inspect.isabstract(kind)
    }


def first_line(kind: type) -> str:
    """What a class is in one line: the first sentence of its docstring."""
    text = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".:")


def methods() -> dict[str, str]:
    """Every method with its line."""
    import fl_lightning.methods as package
    from fl_lightning.module import FederatedModule

    return {name: first_line(kind) for name, kind in exported(package, FederatedModule).items()}


def partitions() -> dict[str, str]:
    """Every partition scheme with its line."""
    import fl_lightning.datamodules.partitions as package
    from fl_lightning.datamodules.partitions import PartitionScheme

    return {name: first_line(kind) for name, kind in exported(package, PartitionScheme).items()}


def tables() -> dict[str, str]:
    """Every published table that can be run again, with its paper and its size."""
    from fl_lightning.papers import tables as published

    titles = published.papers()
    return {
        name: f"{titles.get(cells[0]['paper'], cells[0]['paper'])}: {len(cells)} cells"
        for name, cells in published.tables().items()
    }


LISTS: dict[str, Callable[[], dict[str, str]]] = {"methods": methods, "partitions": partitions, "tables": tables}
AFTER = {
    "methods": "fl-lightning fit --config quickstart --model NAME runs one; --model.help NAME lists its options.",
    "partitions": "fl-lightning partition --data MNIST --data.partition NAME shows one.",
    "tables": "fl-lightning reproduce NAME runs one and puts the result beside it.",
}


def main(argv: list[str]) -> None:
    """Print the list that ``argv`` begins with."""
    name, *rest = argv
    if rest and rest[0] in ("-h", "--help"):
        print(f"usage: fl-lightning {name}\n\nLists all {name}, one line each.")
        return
    if rest:
        raise FederationError(f"fl-lightning {name} takes no options, and {rest[0]!r} was given.")
    found = LISTS[name]()
    width = max(map(len, found)) + 2
    for entry, line in found.items():
        print(f"{entry:<{width}}{line}")
    print(f"\n{AFTER[name]}")
