"""``fl-lightning partition``: build and show a partition, and write its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.cli.names import resolve
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.datamodules.manifest import Manifest
from fl_lightning.datamodules.summary import Summary


def build_parser() -> FederatedArgumentParser:
    """The command's options."""
    parser = FederatedArgumentParser(
        prog="fl-lightning partition",
        description="Divide a data set among clients, print the result, write a manifest and a picture.",
    )
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    parser.add_subclass_arguments(FederatedDataModule, "data", required=True, help="the data and its partition")
    parser.add_argument("--out", type=str, default="partition", help="folder for manifest.json and partition.png")
    parser.add_argument("--indices", type=bool, default=False, nargs="?", const=True, help="also write every index")
    parser.add_argument("--rows", type=int, default=10, help="number of clients to list, 0 for none")
    return parser


def main(argv: list[str]) -> None:
    """Run the command.

    Args:
        argv: its options, with or without ``partition`` before them.
    """
    parser = build_parser()
    options = parser.parse_args(resolve(argv[1:] if argv[:1] == ["partition"] else argv))
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.5x
    data: FederatedDataModule = instantiate(options).data
    partition = data.dealt
    summary = Summary.of(partition, data.samples.labels, data.num_classes or int(data.samples.labels.max()) + 1)
    _print(data, summary, options.rows)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    _write(data, summary, folder, options.indices)


def _write(data: FederatedDataModule, summary: Summary, folder: Path, indices: bool) -> None:
    """Write manifest and picture and print their paths."""
    from rich.console import Console

    from fl_lightning.datamodules.picture import draw_partition

    manifest = data.describe(indices)
    manifest.write(folder / "manifest.json")
    draw_partition(summary, folder / "partition.png", title(data, manifest))
    Console().print(f"wrote {folder / 'manifest.json'} and {folder / 'partition.png'}", highlight=False, soft_wrap=True)


def title(data: FederatedDataModule, manifest: Manifest) -> str:
    """One-line description of the partition."""
    return f"{manifest.data}, {manifest.scheme_call}, seed {manifest.seed}"


def _print(data: FederatedDataModule, summary: Summary, rows: int) -> None:
    """Print the summary by mode, then the first clients one by one."""
    from rich.console import Console

    console = Console()
    console.print(_summary_table(summary, title(data, data.describe())))
    if rows > 0:
        console.print(_client_table(summary, rows))


def _summary_table(summary: Summary, caption: str) -> Any:
    """Clients, samples, classes per client, label entropy and size spread, for all and by mode."""
    from rich.table import Table

    modes = np.unique(summary.modes)
    groups = {f"mode {mode}": summary.modes == mode for mode in modes} if len(modes) > 1 else {}
    everyone = np.ones(len(summary.modes), dtype=bool)
    columns = {name: _figures(summary, chosen) for name, chosen in {"all": everyone, **groups}.items()}
    table = Table("", title=caption, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for figure in columns["all"]:
        table.add_row(figure, *(column[figure] for column in columns.values()))
    table.add_row("global test samples", f"{summary.global_test:,}")
    return table


def _figures(summary: Summary, chosen: NDArray[np.bool_]) -> dict[str, str]:
    """The figures of some of the clients, by name."""
    sizes = summary.sizes[chosen]
    return {
        "clients": f"{chosen.sum():,}",
        "training samples": f"{summary.train[chosen].sum():,}",
        "test samples": f"{summary.test[chosen].sum():,}",
        "classes per client": _spread(summary.classes_per_client[chosen]),
        "label entropy (bits)": f"{summary.entropy[chosen].mean():.2f} of {np.log2(summary.train.shape[1]):.2f}",
        "training samples per client": _spread(sizes),
        "their spread (std / mean)": f"{sizes.std() / sizes.mean():.2f}",
    }


def _client_table(summary: Summary, rows: int) -> Any:
    """The first clients: mode, sizes, entropy and training samples of every class."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    clients, classes = summary.train.shape
    left_out = clients - min(rows, clients)
    note = f"and {left_out:,} more clients" if left_out else None
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=note, caption_justify="left")
    shown = range(min(classes, 12))
    for column in ("client", "mode", "train", "test", "bits", *map(str, shown)):
        table.add_column(column, justify="right")
    for client in range(min(rows, clients)):
        counts = (str(summary.train[client, c] or "") for c in shown)
        figures = (client, summary.modes[client], summary.train[client].sum(), summary.test[client].sum())
        table.add_row(*map(str, figures), f"{summary.entropy[client]:.2f}", *counts)
    return table


def _spread(values: NDArray[np.int64]) -> str:
    """One number if all are equal, else the range and the mean."""
    if values.min() == values.max():
        return str(values.min())
    return f"{values.min()} to {values.max()}, mean {values.mean():.1f}"
