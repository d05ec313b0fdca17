"""``fl-lightning methods``, ``partitions`` and ``tables``: one line per entry."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType

from fl_lightning.errors import FederationError

#: Short descriptions of methods.
METHODS = {
    "APFL": "Each client mixes its own model with the shared one, by a learned weight",
    "FedAvg": "One model for all: clients train it on their own data, the server averages the results",
    "FedBPS": "Each client keeps the parameters that differ most between clients and shares the others",
    "FedCluster": "One model that is trained by one group of clients after the other",
    "FedDAF": "FedAvg with client weights inferred from their normalisation statistics",
    "FedGN": "FedAvg with group normalisation instead of batch normalisation",
    "FedGroup": "One model per group; clients are grouped once by their first updates",
    "FedMA": "FedAvg that first aligns the hidden units of all clients",
    "FedPer": "The last layers stay with the client, the others are shared",
    "FedProx": "FedAvg with a penalty that keeps clients near the model they received",
    "FeSEM": "One model per cluster; clients are clustered by their weights in every round",
    "IFCA": "Several models; each client trains the one that fits its data best",
    "LGFedAvg": "The first layers stay with the client, the others are shared",
    "Local": "Each client trains alone and sends nothing, for comparison",
    "PFedMe": "Each client has its own model, kept near the shared one",
    "QFFL": "FedAvg that gives more weight to clients with a high loss, for fairness",
    "SCAFFOLD": "FedAvg with control variates that correct clients' steps for differing data",
    "WAFFLe": "Clients share a dictionary of weight factors and choose privately among them",
    "WAFFLEAvg": "SCAFFOLD that weights agents by the distance of their updates from one agent's",
    "WAFFLeL1": "WAFFLe with real scores and an L1 penalty, an ablation",
    "WeightErosion": "FedAvg for one agent; the others lose weight the more their updates differ",
}


def exported(module: ModuleType, base: type) -> dict[str, type]:
    """The concrete classes that a package exports, by name."""
    kinds = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in sorted(kinds.items(), key=lambda item: item[0].lower())
        if isinstance(kind, type) and issubclass(kind, base) and not inspect.isabstract(kind)
    }


def first_line(kind: type) -> str:
    """Describe a class in one line, by the first sentence of its docstring."""
    text = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    return plain(text.partition(". ")[0].rstrip(".:"))


def plain(text: str) -> str:
    r"""A line of a docstring without its markup.

    Example:
        >>> plain("Made of :func:`~fl_lightning.nets.group_norm` and ``eta`` (docs/partitions.md)")
        'Made of group_norm and eta'
    """
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    return re.sub(r" ?\(docs/[\w/.]+\)|``?", "", text)


def methods() -> dict[str, str]:
    """Every method with its line."""
    import fl_lightning.methods as package
    from fl_lightning.module import FederatedModule

    return {name: METHODS.get(name) or first_line(kind) for name, kind in exported(package, FederatedModule).items()}


def partitions() -> dict[str, str]:
    """Every partition scheme with its line."""
    import fl_lightning.datamodules.partitions as package
    from fl_lightning.datamodules.partitions import PartitionScheme

    return {name: first_line(kind) for name, kind in exported(package, PartitionScheme).items()}


def tables() -> dict[str, str]:
    """Every published table, with its paper and size."""
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
    "tables": "fl-lightning reproduce NAME runs one and compares the result.",
}


def main(argv: list[str]) -> None:
    """Print the list that ``argv`` begins with."""
    name, *rest = argv
    if rest and rest[0] in ("-h", "--help"):
        print(f"usage: fl-lightning {name}\n\nLists all {name}, one line each.")
        return
    if rest:
        raise FederationError(f"fl-lightning {name} takes no options, but {rest[0]!r} was given.")
    found = LISTS[name]()
    width = max(map(len, found)) + 2
    for entry, line in found.items():
        print(f"{entry:<{width}}{line}")
    print(f"\n{AFTER[name]}")
