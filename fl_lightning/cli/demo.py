"""Compare Local, FedAvg and APFL on scikit-learn's digits; takes about a minute."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from rich.table import Table

from fl_lightning.callbacks import Dashboard, RoundProgress, RunRecord
from fl_lightning.cli.compare import experiments_of
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.cli.report import write_report
from fl_lightning.cli.runs import find
from fl_lightning.datamodules import Digits, Unimodal
from fl_lightning.errors import FederationError
from fl_lightning.methods import APFL, FedAvg, Local
from fl_lightning.module import FederatedModule
from fl_lightning.nets import MLP
from fl_lightning.pictures import STYLES

ROUNDS = 30
#: Clients and classes of each: few samples of many classes, which are too few to learn from alone.
CLIENTS, CLASSES = 50, 4
FOLDER = Path("runs/demo")


@dataclass
class Curve(Callback):
    """Keeps the mean accuracy over clients after every round, on samples held out of training."""

    accuracy: list[float] = field(default_factory=list)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the round's accuracy."""
        self.accuracy.append(100 * float(trainer.callback_metrics["val/acc"]))


@dataclass
class Run:
    """The table's row of a finished run."""

    name: str
    curve: Curve
    mean: float
    worst: float
    megabytes: float
    seconds: float


def method(kind: type[FederatedModule], **options: Any) -> FederatedModule:
    """A method on a small network, all from the same initial weights."""
    torch.manual_seed(0)
    return kind(MLP(in_features=64, hidden=(64,)), lr=0.1, epochs=5, batch_size=10, **options)


def run(name: str, module: FederatedModule, data: Digits, folder: Path, rounds: int) -> Run:
    """Fit and test one method with a stock Trainer."""
    curve = Curve()
    loggers = [TensorBoardLogger(folder, name=name, version=""), CSVLogger(folder, name=name, version="csv")]
    trainer = Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=loggers,
        callbacks=[curve, RunRecord(), Dashboard(tsne=False), RoundProgress()],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    start = time.perf_counter()
    trainer.fit(module, datamodule=data)
    seconds = time.perf_counter() - start
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    mean, worst = (100 * float(tested[f"test/{score}"]) for score in ("acc", "acc_worst10"))
    return Run(name, curve, mean, worst, (module.bytes_up + module.bytes_down) / 1e6, seconds)


def table(runs: list[Run], title: str) -> Table:
    """The runs side by side."""
    shown = Table(title=title)
    shown.add_column("method")
    for heading in ("mean %", "worst tenth %", "rounds", "MB sent", "seconds"):
        shown.add_column(heading, justify="right")
    for one in runs:
        figures = (one.mean, one.worst, len(one.curve.accuracy), one.megabytes, one.seconds)
        shown.add_row(
            one.name, *(f"{value:.{digits}f}" for value, digits in zip(figures, (1, 1, 0, 2, 1), strict=True))
        )
    return shown


def picture(runs: list[Run], path: Path) -> None:
    """Accuracy by round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for one, (colour, style) in zip(runs, STYLES, strict=False):
        rounds = range(1, len(one.curve.accuracy) + 1)
        axes.plot(rounds, one.curve.accuracy, color=colour, linestyle=style, linewidth=2, label=one.name)
    axes.set(xlabel="round", ylabel="mean accuracy on held-out samples (%)", ylim=(0, 101))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    parser = FederatedArgumentParser(prog="fl-lightning demo", description=__doc__)
    parser.add_argument("--out", type=str, default=str(FOLDER), help="output folder for runs, picture and report")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds per run")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="number of clients")
    parser.add_argument("--classes", type=int, default=CLASSES, help="classes per client, out of ten")
    options = parser.parse_args(argv[1:])
    if options.rounds < 1:
        raise FederationError(f"--rounds must be 1 or more, not {options.rounds}.")
    demo(Path(options.out), options.rounds, options.clients, options.classes)


def demo(folder: Path = FOLDER, rounds: int = ROUNDS, clients: int = CLIENTS, classes: int = CLASSES) -> list[Run]:
    """Fit, print the table, save picture and report, print the TensorBoard command."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # nets as small as these gain nothing from more
    console = Console()
    runs = []
    for kind in (Local, FedAvg, APFL):
        data = Digits(partition=Unimodal(clients=clients, classes_per_client=classes), fraction=0.5)
        console.print(f"[bold]{kind.__name__}[/bold]: {rounds} rounds")
        runs.append(run(kind.__name__, method(kind), data, folder, rounds))
    title = f"Digits, {clients} clients with {classes} classes each: accuracy on the clients' own test samples"
    console.print(table(runs, title))
    samples = len(data.federation.train.flat) // clients
    console.print(
        f"A client trains on about {samples} samples of {classes} classes. Sharing pays if these are too few to "
        "learn from alone; APFL mixes the shared model with the client's own. If a client's own samples suffice, "
        "Local is as good and sends nothing: try --clients 20 --classes 2.",
        soft_wrap=True,
    )
    picture(runs, folder / "accuracy.png")
    console.print(f"Accuracy by round: {folder / 'accuracy.png'}")
    write_report(folder / "report.html", experiments_of(find([str(folder)])), "Three methods on the digits data")
    console.print(f"Report:            {folder / 'report.html'}")
    console.print(f"All curves:        {tensorboard()} --logdir {folder}")
    return runs


def tensorboard() -> str:
    """The command that starts TensorBoard, by its script if found, otherwise by this Python."""
    return "tensorboard" if shutil.which("tensorboard") else f"{sys.executable} -m tensorboard.main"


if __name__ == "__main__":
    demo()
