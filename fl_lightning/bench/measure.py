"""Measurement of a workload: rounds through ``Trainer.fit`` and the plain loop, alternating."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from fl_lightning.bench.data import features
from fl_lightning.bench.workloads import Workload, seeded
from fl_lightning.datamodules import TensorFederation
from fl_lightning.module import FederatedModule
from fl_lightning.quiet import quiet_trainer, silence


class Turn(NamedTuple):
    """Measurements of some rounds, excluding validation, which the plain loop lacks, and of the loop after them."""

    speed: float
    """Local steps per second."""
    seconds: float
    """Duration of a round."""
    validating: float
    """Share of validation in the duration of a round with it."""
    serving: float
    """Share of the server in the duration of a round."""
    plain: float
    """Steps per second of the plain loop."""


class Clock(Callback):
    """Times some rounds and then the plain loop, alternating.

    Args:
        warm_up: rounds before timing starts: the first chooses the engine, and further ones may trace steps.
        rounds: rounds per turn.
        loop: runs the plain loop in the given turn and returns its number of steps.
    """

    def __init__(self, warm_up: int, rounds: int, loop: Callable[[FederatedModule, int], int] | None = None) -> None:
        self.warm_up, self.rounds, self.loop = warm_up, rounds, loop
        self.turns: list[Turn] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """End the current turn if it is complete, and start the next."""
        over = trainer.current_epoch - self.warm_up
        if over >= 0 and over % self.rounds == 0:
            if over > 0:
                self._end(pl_module)
            self.began, self.before = time.perf_counter(), steps_of(pl_module)
            self.validating = self.serving = 0.0

    def on_round_end(self, trainer: Trainer, pl_module: Any, messages: Any) -> None:
        """Add the server's time in the round."""
        if trainer.current_epoch >= self.warm_up:
            self.serving += pl_module.summary["time/server"]

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start timing the validation."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Add the duration of the validation."""
        if trainer.current_epoch >= self.warm_up:
            self.validating += time.perf_counter() - self._paused

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """End the last turn."""
        self._end(pl_module)

    def _end(self, module: FederatedModule) -> None:
        whole = time.perf_counter() - self.began
        elapsed, steps = whole - self.validating, steps_of(module) - self.before
        shares = self.validating / whole, self.serving / elapsed
        self.turns.append(Turn(steps / elapsed, elapsed / self.rounds, *shares, self._plain(module)))

    def _plain(self, module: FederatedModule) -> float:
        if self.loop is None:
            return 0.0
        began = time.perf_counter()
        with torch.enable_grad():
            steps = self.loop(module, len(self.turns))
        return steps / (time.perf_counter() - began)


def steps_of(module: FederatedModule) -> int:
    """Return the number of local steps that all clients have taken."""
    return sum(module.snapshots[client].steps for client in module.snapshots)


def federated(
    workload: Workload,
    data: TensorFederation,
    options: dict[str, Any],
    repeats: int = 1,
    loop: Callable[[FederatedModule, int], int] | None = None,
) -> tuple[Clock, FederatedModule]:
    """Train through ``Trainer.fit`` with the CSV logger."""
    clock = Clock(workload.warm_up, workload.rounds, loop)
    method = seeded(lambda: workload.method(**options))
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(
            max_epochs=workload.warm_up + repeats * workload.rounds,
            check_val_every_n_epoch=workload.validate_every,
            logger=CSVLogger(folder),
            callbacks=[clock],
        ).fit(method, datamodule=data)
    return clock, method


def measure(workload: Workload, repeats: int, **options: Any) -> dict[str, Any]:
    """Measure the ratios of the two speeds.

    Args:
        workload: the workload.
        repeats: number of turns.
        options: further options of the method, such as its engine and workers.
    """
    with silence(warned=False):
        data = workload.data()
        x = features(data.federation)

        def loop(method: FederatedModule, turn: int) -> int:
            return workload.loop(method, data.federation, x, data.cohort(turn))

        clock, method = federated(workload, data, options, repeats, loop)
    ratios = [turn.speed / turn.plain for turn in clock.turns]

    def median(values: Iterable[float], digits: int) -> float:
        return round(statistics.median(values), digits)

    return {
        "ratio": median(ratios, 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "steps_per_second": median((turn.speed for turn in clock.turns), 1),
        "plain_steps_per_second": median((turn.plain for turn in clock.turns), 1),
        "validation_share": median((turn.validating for turn in clock.turns), 3),
        "server_share": median((turn.serving for turn in clock.turns), 3),
        "engine": method.engine.choice,
        "workers": options.get("workers", 1),
        "threads": torch.get_num_threads(),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
