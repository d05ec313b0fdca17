"""The engine that picks an engine: time a few real steps and keep the fastest that agrees with the sequential one."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from fl_lightning.engine.base import Engine, steps_left
from fl_lightning.engine.captured import CapturedEngine
from fl_lightning.engine.compiled import CompiledEngine
from fl_lightning.engine.contract import Job, LocalMethod, Result
from fl_lightning.engine.schedule import batch_sizes
from fl_lightning.engine.sequential import SequentialEngine
from fl_lightning.engine.stacked import StackedEngine
from fl_lightning.federation import Federation
from fl_lightning.local_optim import SGD

ENGINES: dict[str, type[SequentialEngine] | type[StackedEngine]] = {
    engine.name: engine for engine in (SequentialEngine, StackedEngine, CapturedEngine, CompiledEngine)
}
#: Engines that are tried against the sequential one, in this order.
CANDIDATES = ("stacked", "captured")
#: Relative difference of the probed weights that rounding can explain.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
#: A faster engine must win by this factor; smaller differences are noise.
MARGIN = 1.05
#: Steps of a short and a long probe, to separate the set-up cost of a round from the cost per step.
SHORT, LONG = 1, 5
#: Stacked steps of this many seconds are dominated by arithmetic, so capturing cannot help. If they are also slower
#: than sequential ones by this factor, tracing is skipped.
LENGTHY, CLEARLY = 0.5, 1.15


class AutoEngine(Engine):
    """Probes a few real steps of the first round and then delegates to the engine it chose.

    Args:
        width: maximum number of clients trained together.
    """

    name = "auto"

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.reason = ""
        self._engine: Engine | None = None

    @property
    def choice(self) -> str | None:
        """Name of the chosen engine, None before the first round."""
        return None if self._engine is None else self._engine.name

    def settle(self, choice: str) -> None:
        """Use the named engine from now on, without a probe."""
        self._engine, self.reason = ENGINES[choice](self.width), "chosen by the run that wrote the checkpoint"

    def reset(self) -> None:
        """Release what the chosen engine prepared; the choice stays."""
        if self._engine is not None:
            self._engine.reset()

    def train(
        self,
        method: LocalMethod,
        federation: Federation,
        jobs: Sequence[Job],
        round: int,
        max_steps: int | None = None,
    ) -> list[Result]:
        """Train with the chosen engine; see ``Engine.train``."""
        return self.choose(method, federation, jobs, round).train(method, federation, jobs, round, max_steps)

    def choose(self, method: LocalMethod, federation: Federation, jobs: Sequence[Job], round: int) -> Engine:
        """Return the chosen engine; on the first call, choose it by a probe of these clients."""
        if self._engine is None:
            self._engine, self.reason = self._probe(method, federation, jobs, round)
            rank_zero_info(f"Engine: {self._engine.name} ({self.reason}).")
        return self._engine

    def _probe(
        self, method: LocalMethod, federation: Federation, jobs: Sequence[Job], round: int
    ) -> tuple[Engine, str]:
        def probe(name: str) -> Probe:
            return Probe(ENGINES[name](self.width), method, federation, jobs[: self.width], round)

        sequential = probe("sequential")
        if len(jobs) == 1:
            return sequential.engine, "one client at a time has nothing to stack"
        steps = round_steps(method, federation, jobs)
        if not steps:
            return sequential.engine, "no client takes a step"
        agreed, refused = [sequential], ""
        reference = sequential.plain().run()
        for name in CANDIDATES:
            candidate = probe(name)
            if isinstance(candidate.engine, CapturedEngine):
                candidate.engine.seldom = 0  # trace at once, as a probe has few steps
            refused = candidate.refusal(reference)
            if refused:
                break  # a move that cannot be stacked cannot be captured either
            agreed.append(candidate)
            if name == "stacked" and (hopeless := _skip_capture(sequential, candidate)):
                return sequential.engine, hopeless
        if len(agreed) == 1:
            return sequential.engine, refused
        name, reason = _fastest(agreed, steps)
        return ENGINES[name](self.width), reason


class Probe:
    """A few steps of the given clients with one engine."""

    def __init__(
        self, engine: Engine, method: LocalMethod, federation: Federation, jobs: Sequence[Job], round: int
    ) -> None:
        self.engine, self.method, self.federation, self.jobs, self.round = engine, method, federation, jobs, round

    def run(self, steps: int = 2) -> list[Result]:
        """Train every client for a few steps of each phase, from the jobs' initial states."""
        return self.engine.train(self.method, self.federation, self.jobs, self.round, max_steps=steps)

    def plain(self) -> Probe:
        """Return this probe with plain SGD: adaptive optimizers amplify rounding errors."""
        local = self.method.local
        if type(local.rule) is SGD:
            return self
        method = copy.copy(self.method)
        method.local = replace(local, optimizer=None, momentum=0.0, weight_decay=0.0, schedule=None)
        return Probe(self.engine, method, self.federation, self.jobs, self.round)

    def refusal(self, reference: Sequence[Result]) -> str:
        """Return why this engine cannot be used, empty if it can: it fails, or disagrees with the reference."""
        try:
            results = self.plain().run()
        except Exception as error:  # the net does something that vmap or tracing cannot
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return f"the net cannot be {self.engine.name}: {first}"
        difference = disagreement(reference, results)
        if difference <= TOLERANCE.get(self.method.compute_dtype, 0.05):
            return ""
        return f"{self.engine.name} training differs from sequential training by {difference:.1e}"


def _skip_capture(sequential: Probe, stacked: Probe) -> str:
    """Return why captured steps cannot be faster than sequential ones, empty if they may be."""
    one, other = fastest_runs([sequential, stacked], SHORT, repeats=2)
    if other < LENGTHY or other < CLEARLY * one:
        return ""
    return f"stacked steps are long and run at {one / other:.2f} of its speed"


def _fastest(probes: Sequence[Probe], steps: int) -> tuple[str, str]:
    """Return the fastest engine for a round of ``steps`` and the reason; without a clear winner, the simplest one.

    Captured steps run the stacked engine's operations with less overhead, so they may lose by noise only.
    """
    seconds = race(probes, steps)
    best = 0
    for i in range(1, len(probes)):
        stacked = probes[best].engine.name == "stacked"
        if seconds[best] > (1 / MARGIN if stacked else MARGIN) * seconds[i]:
            best = i
    if best == 0:
        speeds = ", ".join(
            f"{p.engine.name} {seconds[0] / s:.2f}" for p, s in zip(probes[1:], seconds[1:], strict=True)
        )
        return probes[0].engine.name, f"the others run at these shares of its speed: {speeds}"
    return probes[best].engine.name, f"{seconds[0] / seconds[best]:.2f} times the speed of sequential training"


def race(probes: Sequence[Probe], steps: int, budget: float = 1.0, repeats: int = 10) -> list[float]:
    """Estimate the seconds that each probe needs for ``steps`` steps of every phase.

    Engines have set-up costs per round, so time is not proportional to steps. Probes alternate, at least twice, so that
    other load of the machine affects all of them alike. The best times count.
    """
    best = [(float("inf"), float("inf")) for _ in probes]
    began = time.perf_counter()
    for repeat in range(repeats):
        short = fastest_runs(probes, SHORT)
        # For long steps, set-up is negligible.
        long = [LONG / SHORT * s for s in short] if min(short) >= LENGTHY else fastest_runs(probes, LONG)
        best = [(min(a, s), min(b, t)) for (a, b), s, t in zip(best, short, long, strict=True)]
        if repeat > 0 and time.perf_counter() - began > budget:
            break
    return [predicted(short, long, steps) for short, long in best]


def fastest_runs(probes: Sequence[Probe], steps: int, repeats: int = 1) -> list[float]:
    """Return the seconds of each probe's fastest run of ``steps`` steps; probes alternate."""
    best = [float("inf")] * len(probes)
    for _ in range(repeats):
        for i, probe in enumerate(probes):
            began = time.perf_counter()
            probe.run(steps=steps)
            best[i] = min(best[i], time.perf_counter() - began)
    return best


def predicted(short: float, long: float, steps: int) -> float:
    """Extrapolate the seconds of ``steps`` steps from a short and a long probe.

    If the long probe was not slower than the short one, the machine was busy, and set-up is ignored.
    """
    if long <= short:
        return long * steps / LONG
    return short + (long - short) * max(steps - SHORT, 0) / (LONG - SHORT)


def round_steps(method: LocalMethod, federation: Federation, jobs: Sequence[Job]) -> int:
    """Return how many steps the largest of these clients takes in the longest phase of a round."""
    size = max(len(federation.train[job.client]) for job in jobs)
    full, rest = batch_sizes(size, method.local.batch_size, method.batch_statistics)
    return max(min(phase.epochs * (full + (rest > 0)), steps_left(phase, 0, None)) for phase in method.phases())


def disagreement(left: Sequence[Result], right: Sequence[Result]) -> float:
    """Return the largest difference between two engines' states, relative to the largest entry of each tensor.

    NaN equals NaN only, and integers must be equal; any other difference of this kind counts as infinite.
    """
    pairs = ((value, b.state[name]) for a, b in zip(left, right, strict=True) for name, value in a.state.items())
    return max((_difference(value, other) for value, other in pairs), default=0.0)


def _difference(value: Tensor, other: Tensor) -> float:
    exact = not (value.is_floating_point() or value.is_complex())
    if exact or not value.numel():
        return 0.0 if torch.equal(value, other) else math.inf
    same = (value == other) | (value.isnan() & other.isnan())
    worst = float((value - other).abs().masked_fill(same, 0.0).max())  # NaN if there is one
    scale = float(value.abs().nan_to_num(0.0, 0.0).max()) + 1e-12
    return math.inf if math.isnan(worst) else worst / scale


def settled(engine: Engine) -> Engine:
    """Return the engine for work outside of rounds: the one chosen by ``auto``, or sequential before the choice."""
    return SequentialEngine(engine.width) if engine.choice is None else engine
