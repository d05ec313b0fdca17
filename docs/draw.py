"""``make pictures``: the pictures of docs/ and the table of README.md, drawn again from data, runs and results.

Partitions are drawn of MNIST; the dashboard and the report are runs on the digits data, looked at with Chromium.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.datamodules import (
    IID,
    MNIST,
    ByUser,
    ConceptShift,
    Digits,
    Dirichlet,
    DominantClass,
    FederatedDataModule,
    LabelSkew,
    MajorMinor,
    Multimodal,
    PartitionScheme,
    Unimodal,
)
from fl_lightning.datamodules.picture import draw_partition
from fl_lightning.datamodules.summary import Summary
from fl_lightning.papers.pages import readme_table
from fl_lightning.papers.records import Records

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
#: Pictures of partitions, by the end of their file names.
PARTITIONS: dict[str, PartitionScheme] = {
    "iid": IID(clients=20),
    "unimodal": Unimodal(clients=100, classes_per_client=2),
    "multimodal": Multimodal("mnist"),
    "label-skew-c": LabelSkew("C"),
    "concept-shift": ConceptShift(LabelSkew("A")),
    "dominant-class": DominantClass(clients=50, eta=0.5),
    "major-minor": MajorMinor(clients=20, similarity=0.2),
    "dirichlet": Dirichlet(clients=50, alpha=0.3),
}
MARKS = ("<!-- results: written by make pictures -->", "<!-- end of results -->")


def draw_partitions(folder: Path, kind: type[FederatedDataModule] = MNIST, only: tuple[str, ...] = ()) -> list[Path]:
    """One picture per scheme."""
    drawn = []
    for name, scheme in PARTITIONS.items():
        if not only or name in only:
            drawn.append(folder / f"partition-{name}.png")
            kind(partition=scheme, seed=0).picture().savefig(drawn[-1])
    if not only or "by-user" in only:
        drawn.append(draw_users(folder))
    return drawn


def draw_users(folder: Path) -> Path:
    """``ByUser`` on the digits, dealt to made-up users who write a few classes each, some much and some little."""
    rng, samples = np.random.default_rng(0), Digits().samples
    labels = samples.targets.numpy()
    share = rng.dirichlet(np.full(10, 0.3), 40) * (1 / np.arange(1, 41))[:, None]
    users = np.array([rng.choice(40, p=share[:, label] / share[:, label].sum()) for label in labels])
    scheme = ByUser(clients=20, min_samples=20)
    partition = scheme(samples.targets, seed=0, users=torch.from_numpy(users))
    path = folder / "partition-by-user.png"
    draw_partition(Summary.of(partition, samples.targets, 10), path, f"Digits with made-up users, {scheme}, seed 0")
    return path


def fit_runs(folder: Path, rounds: int) -> None:
    """Three methods on digits with two sub-populations, one of them twice."""
    from fl_lightning.callbacks import FactorsCallback
    from fl_lightning.methods import FedAvg, FedProx, WAFFLe

    scheme = Multimodal([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]], [24, 8])
    methods: tuple[tuple[Any, dict[str, Any]], ...] = (
        (FedAvg, {}),
        (FedProx, {"mu": 0.1}),
        (FedProx, {"mu": 1.0}),
        (WAFFLe, {"factors": {"fc1": 24}}),
    )
    for kind, options in methods:
        fit(folder, kind, options, scheme, rounds, [FactorsCallback()] if kind is WAFFLe else [])


def fit(
    folder: Path, kind: Any, options: dict[str, Any], scheme: PartitionScheme, rounds: int, more: Sequence[Any] = ()
) -> None:
    """A run on half of the digits, watched by the dashboard."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    from fl_lightning.callbacks import Dashboard, FairnessCallback, RoundProgress, RunRecord
    from fl_lightning.nets import MLP

    torch.manual_seed(0)
    method = kind(MLP(in_features=64, hidden=(32,)), lr=0.1, epochs=5, seed=0, **options)
    trainer = Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=TensorBoardLogger(folder, name=kind.__name__),
        callbacks=[FairnessCallback(), *more, Dashboard(), RunRecord(), RoundProgress()],
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    trainer.fit(method, Digits(partition=scheme, fraction=0.5, seed=0))


def draw_pages(folder: Path, rounds: int = 25) -> list[Path]:
    """The dashboard and the report as a browser shows them."""
    from fl_lightning.cli.compare import experiments_of
    from fl_lightning.cli.report import write_report
    from fl_lightning.cli.runs import find
    from fl_lightning.methods import FedAvg
    from tests.support.browser import screenshot

    names = ("dashboard", "dashboard-images", "report", "dashboard-100-clients")
    drawn = [folder.resolve() / f"{name}.png" for name in names]
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        runs = Path("runs")
        fit_runs(runs, rounds)
        board = linked(runs, Path("by what differs"))  # TensorBoard shows the folder's name
        screenshot(board.url + "#custom_scalars", drawn[0], 1500, 1300)
        screenshot(board.url + "#images", drawn[1], 1500, 1100)
        write_report(runs / "report.html", experiments_of(find([str(runs)])), "Three methods, two sub-populations")
        screenshot(f"file://{name}/runs/report.html", drawn[2], 1366, 1900)
        fit(Path("many"), FedAvg, {}, Dirichlet(clients=100, alpha=0.3, min_samples=5), rounds)
        screenshot(linked(Path("many"), Path("100 clients")).url + "#images", drawn[3], 1366, 860)
    for path in drawn:
        shrink(path)
    return drawn


def linked(runs: Path, folder: Path) -> Any:
    """TensorBoard as ``fl-lightning board`` shows these runs."""
    from fl_lightning.cli.board import link
    from fl_lightning.cli.runs import find
    from tests.support.browser import Board

    folder.mkdir()
    board = Board(folder)
    board.wait("data/plugin/images/tags", runs=len(link(find([str(runs)]), folder)))
    return board


def shrink(path: Path) -> None:
    """A screenshot in few colours: a third of the size, and looks the same."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128)
    small.save(path, optimize=True)


def with_table(readme: str) -> str:
    """README with its table as the results have it."""
    pattern = re.compile(f"{re.escape(MARKS[0])}.*?{re.escape(MARKS[1])}", re.DOTALL)
    return pattern.sub(f"{MARKS[0]}\n\n{readme_table(Records(ROOT / 'results'))}\n{MARKS[1]}", readme)


def main(folder: Path = PICTURES) -> None:
    """Draw everything."""
    import pytest

    (ROOT / "README.md").write_text(with_table((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
    drawn = draw_partitions(folder)
    try:
        drawn += draw_pages(folder)
    except pytest.skip.Exception as reason:
        print(f"left out: {reason}", file=sys.stderr)
    print(*drawn, sep="\n")


if __name__ == "__main__":
    main()
