"""How pictures, settings and names go to the loggers of a Trainer, in the one way that each of them takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from fl_lightning import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Settings that a run is called by, where its logger wants a name and was given none.
NAMED_BY = ("method", "net", "data", "partition")
#: A name that MLflow or Weights & Biases made up, such as ``bold-fox-12``, or none.
_GENERATED = re.compile(r"([a-z]+-[a-z]+-\d+)?")


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def step_of(trainer: Trainer) -> int:
    """The step under which Lightning logs a validation's numbers."""
    steps: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return steps


def show(trainer: Trainer, name: str, figure: Figure, step: int, files: bool = True) -> None:
    """Give a picture to every logger: as an image, as an artifact, or as a file in the logger's folder.

    Args:
        trainer: whose loggers are meant.
        name: of the picture, such as ``clients/accuracy_by_round``.
        figure: the picture.
        step: the number of rounds.
        files: whether a logger that takes no pictures has a file written to its folder.
    """
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        given: Any = logger
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, pictures.pixels(figure), step, dataformats="HWC")
        elif hasattr(logger, "log_image"):  # Weights & Biases and those that do as it does
            given.log_image(key=name, images=[pictures.pixels(figure)], step=step)
        elif isinstance(logger, MLFlowLogger):
            given.experiment.log_figure(logger.run_id, figure, f"pictures/{name}-{step}.png")
        elif files and (folder := logger.log_dir or logger.save_dir) is not None:
            path = Path(folder) / "pictures" / f"{name}-{step}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)


def note_settings(trainer: Trainer, settings: Mapping[str, Any]) -> None:
    """Give a run's settings and its name to the loggers other than TensorBoard, which has a table of its own.

    Args:
        trainer: whose loggers are meant.
        settings: by name, of a :class:`~fl_lightning.callbacks.RunRecord`.
    """
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        given: Any = logger
        if isinstance(logger, TensorBoardLogger):
            continue
        if isinstance(logger, MLFlowLogger):  # which refuses to change what it has, and would end a resumed run
            known = given.experiment.get_run(logger.run_id)
            logger.log_hyperparams(_unknown(settings, known.data.params))
            if _GENERATED.fullmatch(known.info.run_name or ""):
                given.experiment.set_tag(logger.run_id, "mlflow.runName", title_of(settings))
            continue
        logger.log_hyperparams(dict(settings))
        if isinstance(logger, WandbLogger) and _GENERATED.fullmatch(given.experiment.name or ""):
            given.experiment.name = title_of(settings)


def _unknown(settings: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Settings that a logger does not have yet; ``run.seed`` where it has another ``seed``.

    Example:
        >>> _unknown({"lr": 0.1, "seed": 0, "net": "MLP"}, {"lr": "0.1", "seed": "None"})
        {'run.seed': 0, 'net': 'MLP'}
    """
    named = {f"run.{name}" if name in known else name: value for name, value in settings.items()}
    same = {f"run.{name}" for name, value in settings.items() if known.get(name) == str(value)}
    return {name: value for name, value in named.items() if name not in known and name not in same}


def title_of(settings: Mapping[str, Any]) -> str:
    """A run's name: its method, net, data and partition.

    Example:
        >>> title_of({"method": "FedAvg", "net": "MLP", "data": "Digits", "partition": "Unimodal(clients=10)"})
        'FedAvg, MLP, Digits, Unimodal'
    """
    texts = (str(settings[name]).partition("(")[0] for name in NAMED_BY if settings.get(name))
    return ", ".join(texts)
