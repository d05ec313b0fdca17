"""``fl-lightning fit --dry_run``: steps, bytes and estimated time of a run, without running it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer

from fl_lightning.engine.schedule import batch_sizes
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.quiet import quiet_trainer
from fl_lightning.view import duration

#: Number of cohorts to average the steps of a round over.
LOOK = 50
#: Number of timed rounds; the first one also selects and prepares the engine.
TRIED = 2


class Probe(Callback):
    """Times rounds of the first clients of a cohort, and counts their bytes.

    Args:
        most: clients that are tried.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.seconds = self.validation = 0.0
        self.steps = self.clients = 0
        self._began = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Limit the number of clients that train."""
        whole = pl_module.cohort
        pl_module.cohort = lambda round: whole(round)[: self.most]

    def on_round_start(self, trainer: Trainer, pl_module: Any, round: int, cohort: list[int]) -> None:
        """Start the clock."""
        self.clients, self.steps = len(cohort), -_steps(pl_module)
        self._began = time.perf_counter()

    def on_round_end(self, trainer: Trainer, pl_module: Any, messages: Any) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self._began
        self.steps += _steps(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Stop the clock."""
        self.validation = time.perf_counter() - self._began

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Let all clients train again."""
        pl_module.__dict__.pop("cohort", None)


@dataclass(frozen=True)
class Plan:
    """Plan of a run.

    Args:
        clients: clients of the federation.
        cohort: clients that train in a round.
        rounds: rounds.
        steps: local steps of all clients in a round, on average.
        up: bytes that clients send in a round.
        down: bytes that the server sends in a round.
        seconds: estimate of the whole run's time.
        engine: the engine that would be used.
        parameters: values that a client shares, and values that it keeps.
    """

    clients: int
    cohort: int
    rounds: int
    steps: float
    up: float
    down: float
    seconds: float
    engine: str
    parameters: tuple[int, int]

    def lines(self) -> list[str]:
        """The plan in words."""
        shared, kept = self.parameters
        return [
            f"clients          {self.clients:,}, {self.cohort:,} per round",
            f"rounds           {self.rounds:,}",
            f"local steps      {self.steps:,.0f} per round, {self.steps * self.rounds:,.0f} in total",
            f"parameters       {shared:,} shared, {kept:,} kept by each client",
            f"bytes up         {_size(self.up)} per round, {_size(self.up * self.rounds)} in total",
            f"bytes down       {_size(self.down)} per round, {_size(self.down * self.rounds)} in total",
            f"estimated time   {duration(self.seconds)} with the engine {self.engine}",
        ]


def plan(module: FederatedModule, datamodule: Any, rounds: int, **options: Any) -> Plan:
    """Run two rounds of a few clients and estimate the cost of the whole run.

    Args:
        module: the method; it is trained a little, so make a new one for the run itself.
        datamodule: the data.
        rounds: rounds of the whole run.
        options: of the Trainer: accelerator, precision and the like.
    """
    if rounds is None or rounds < 1:
        raise FederationError("A dry run needs a number of rounds: set --trainer.max_epochs.")
    datamodule.setup("fit")
    probe = Probe(module.engine.width)
    trainer = quiet_trainer(max_epochs=TRIED, callbacks=[probe], **options)
    trainer.fit(module, datamodule=datamodule)
    looked = range(min(rounds, LOOK))
    cohorts = [module.cohort(round) for round in looked]
    clients = statistics.fmean(len(cohort) for cohort in cohorts)
    steps = statistics.fmean(sum(local_steps(module, client) for client in cohort) for cohort in cohorts)
    tried = max(probe.steps, 1)
    traffic = {way: module.summary[f"comm/{way}_bytes"] / max(probe.clients, 1) for way in ("up", "down")}
    state = module.server_state()
    return Plan(
        clients=module.federation.num_clients,
        cohort=round(clients),
        rounds=rounds,
        steps=steps,
        up=traffic["up"] * clients,
        down=traffic["down"] * clients,
        seconds=rounds * (probe.seconds * steps / tried + probe.validation),
        engine=getattr(module.engine, "choice", None) or module.engine.name,
        parameters=(
            sum(state[name].numel() for name in module.shared_names),
            sum(state[name].numel() for name in module.private_names),
        ),
    )


def local_steps(module: FederatedModule, client: int) -> int:
    """Minibatches per client and round."""
    size = len(module.federation.train[client])
    full, rest = batch_sizes(size, module.local.batch_size, module.batch_statistics)
    return sum(phase.epochs * (full + bool(rest)) for phase in module.phases())


def _steps(module: Any) -> int:
    return sum(module.snapshots[client].steps for client in module.snapshots)


def _size(count: float) -> str:
    """Bytes in a readable unit.

    Example:
        >>> _size(123.0), _size(4_500_000)
        ('123 B', '4.5 MB')
    """
    power = 0
    while count >= 1000 and power < 4:
        count, power = count / 1000, power + 1
    return f"{count:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
