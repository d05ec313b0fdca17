"""Measure a workload: rounds through ``Trainer.fit`` and the plain loop, taking turns."""

from __future__ import annotations

import logging
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from fl_lightning.bench.data import features
from fl_lightning.bench.workloads import Workload, seeded
from fl_lightning.datamodules import TensorFederation
from fl_lightning.module import FederatedModule


class Clock(Callback):
    """Time and local steps of the rounds after the warm-up, and the shares of validation and server in such a round.

    Args:
        warm_up: rounds that are not timed: the first chooses the engine, and all of them trace what they see first.
    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.validating = self.serving = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock after the warm-up."""
        if trainer.current_epoch == self.warm_up:
            self.began, self.before = time.perf_counter(), steps_of(pl_module)
            self.validating = self.serving = 0.0

    def on_round_end(self, trainer: Trainer, pl_module: Any, messages: Any) -> None:
        """Add what the server took of the round."""
        self.serving += pl_module.summary["time/server"]

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Stop the clock."""
        self.validating -= time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Let it run on."""
        self.validating += time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Steps per second, and seconds per round, without validation, which the plain loop has not."""
        elapsed = time.perf_counter() - self.began - self.validating
        self.speed = (steps_of(pl_module) - self.before) / elapsed
        self.seconds = elapsed / (trainer.current_epoch - self.warm_up)
        self.share = self.validating / (self.validating + elapsed)
        self.server_share = self.serving / elapsed


def steps_of(module: FederatedModule) -> int:
    """Local steps that all clients have taken."""
    return sum(module.snapshots[client].steps for client in module.snapshots)


def federated(workload: Workload, data: TensorFederation, options: dict[str, Any]) -> tuple[Clock, FederatedModule]:
    """Rounds through ``Trainer.fit``, with the CSV logger."""
    clock, method = Clock(workload.warm_up), seeded(lambda: workload.method(**options))
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            max_epochs=workload.warm_up + workload.rounds,
            check_val_every_n_epoch=workload.validate_every,
            accelerator="cpu",
            logger=CSVLogger(folder),
            callbacks=[clock],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        ).fit(method, datamodule=data)
    return clock, method


def measure(workload: Workload, repeats: int, **options: Any) -> dict[str, Any]:
    """Ratios of the two speeds.

    Args:
        workload: what to measure.
        repeats: how often both take a turn.
        options: further options of the method, such as its engine and workers.
    """
    with silent():
        data = workload.data()
        x, clocks, plain = features(data.federation), [], []
        for repeat in range(repeats):
            clock, method = federated(workload, data, options)
            clocks.append(clock)
            options["engine"] = method.engine.choice  # probed once: probes are not timed, and take their time
            began = time.perf_counter()
            steps = workload.loop(method, data.federation, x, data.cohort(repeat))
            plain.append(steps / (time.perf_counter() - began))
    ratios = [clock.speed / speed for clock, speed in zip(clocks, plain, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "steps_per_second": round(statistics.median(clock.speed for clock in clocks), 1),
        "plain_steps_per_second": round(statistics.median(plain), 1),
        "validation_share": round(statistics.median(clock.share for clock in clocks), 3),
        "server_share": round(statistics.median(clock.server_share for clock in clocks), 3),
        "engine": method.engine.choice,
        "workers": options.get("workers", 1),
        "threads": torch.get_num_threads(),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


@contextmanager
def silent() -> Iterator[None]:
    """Keep Lightning's notes out of the result."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
