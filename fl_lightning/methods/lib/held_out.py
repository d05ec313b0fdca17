"""Selection of a method's option on held-out training samples."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from fl_lightning import seeding
from fl_lightning.federation import ClientIndex, Federation
from fl_lightning.module import FederatedModule
from fl_lightning.quiet import quiet_trainer


def best_on_held_out(
    method: FederatedModule, option: str, values: Sequence[Any], rounds: int, share: float = 0.1
) -> int:
    """Run a method with every value of an option for a few rounds and return the best on held-out samples.

    Trials start from the method's current weights and seed, and change neither. Each client is scored on its own
    samples that no trial trains on: its validation samples, else a fraction of its training samples. Test samples are
    not used.

    Args:
        method: the method, attached to a Trainer.
        option: name of a constructor argument.
        values: candidate values.
        rounds: number of rounds of each trial.
        share: fraction of every client's training samples to hold out if the data has no validation samples.

    Returns:
        The index of the value with the best mean accuracy over clients; the first one among equals.
    """
    scores = []
    for value in values:
        trial = _again(method, {option: value})
        data = copy.copy(method.datamodule)
        data.__dict__.pop("fingerprint", None)
        data.federation = held_out(method.federation, share, method.seed)
        with _quiet():
            _trainer(method, rounds).fit(trial, datamodule=data)
        scores.append(float(trial.evaluator.scores["val"].nanmean()))
        rank_zero_info(f"Trial of {option} = {value}: {scores[-1]:.2%} on held-out samples after {rounds} rounds.")
    best = max(range(len(values)), key=lambda i: (scores[i], -i))
    rank_zero_info(f"Chose {option} = {values[best]}.")
    return best


def held_out(federation: Federation, share: float, seed: int) -> Federation:
    """Move a fraction of every client's training samples to ``val``, at least one and never all."""
    if federation.val is not None:
        return federation
    train, val = [], []
    for client, index in enumerate(federation.train):
        order = seeding.permutation(seeding.stream(seed, "held out", 0, client), len(index))
        count = min(max(1, round(share * len(index))), len(index) - 1)
        own = index.cpu()[order]
        val.append(own[:count].sort().values)
        train.append(own[count:].sort().values)
    device = federation.device
    return replace(federation, train=ClientIndex.of(train).to(device), val=ClientIndex.of(val).to(device))


def _again(method: FederatedModule, changes: dict[str, Any]) -> FederatedModule:
    """Rebuild the method with some arguments changed and a copy of its net."""
    made = {name: value for name, value in method.hparams.items() if not name.startswith("_")}  # entries of the CLI
    made |= {
        "net": copy.deepcopy(method.net),
        "server_optimizer": method.server_optimizer,
        "aggregation": method.aggregation,
    }
    return type(method)(**{**made, **changes})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's info messages; keep warnings."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


def _trainer(method: FederatedModule, rounds: int) -> Trainer:
    """Build a silent Trainer on the method's device that validates after the last round only."""
    outer, device = method.trainer, method.device
    return quiet_trainer(
        max_epochs=rounds,
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        precision=outer.precision,
        fast_dev_run=bool(outer.fast_dev_run),  # type: ignore[attr-defined]
        check_val_every_n_epoch=rounds,
    )
