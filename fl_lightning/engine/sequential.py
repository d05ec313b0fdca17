"""Sequential training: one client after the other, one autograd step at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fl_lightning import seeding, signals
from fl_lightning.engine.base import Engine, epochs_of, moves_of, steps_left, steps_of
from fl_lightning.engine.contract import Batch, Job, LocalMethod, Move, Phase, Result
from fl_lightning.engine.gradient import eager_gradient
from fl_lightning.engine.local import LocalStep
from fl_lightning.engine.schedule import ClientSchedule, batch_sizes, epoch_noise, scalars
from fl_lightning.federation import Federation
from fl_lightning.wire import State, fast_copy

#: Number of batches gathered at once.
BLOCK = 32


class SequentialEngine(Engine):
    """The reference engine: works with every net and is the fastest for large convolutions.

    Convolution weights are channels-last during training.
    """

    name = "sequential"

    def train(
        self,
        method: LocalMethod,
        federation: Federation,
        jobs: Sequence[Job],
        round: int,
        max_steps: int | None = None,
    ) -> list[Result]:
        """Train the jobs one by one; see ``Engine.train``."""
        return [_Client(method, federation, job, round, max_steps).train() for job in jobs]


class _Client:
    def __init__(
        self, method: LocalMethod, federation: Federation, job: Job, round: int, max_steps: int | None
    ) -> None:
        self.method, self.federation, self.max_steps = method, federation, max_steps
        self.schedule = ClientSchedule.of(method, federation, job.client, round)
        self.state = fast_copy(job.state)
        self.step = LocalStep(method.local)
        self.memory: State = fast_copy(job.optimizer)
        self.round = round
        size = torch.tensor(self.schedule.size, device=federation.device)
        self.scalars = scalars(size, round, method.compute_dtype, method.local.schedule is not None)
        self.loss = torch.zeros_like(size, dtype=torch.float64)
        self.steps = 0
        number = federation.number_of(job.client)
        self.seed = int(seeding.stream(method.seed, "net", round, number).integers(2**63))

    def train(self) -> Result:
        device = self.federation.device
        # Nets with random numbers other than our dropout also draw from a stream of the client.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            for phase in self.method.phases():
                opening, moves = moves_of(self.method, phase)
                before = self.steps
                for _ in range(epochs_of(phase, self.max_steps)):
                    left = steps_left(phase, self.steps - before, self.max_steps)
                    if left == 0:
                        break
                    for batch in self._epoch(left):
                        self._step(phase, opening if self.steps == before else moves, batch)
                    self.scalars["epoch"].add_(1)
        state = {name: value.contiguous() for name, value in self.state.items()}
        kept = self.memory if self.method.local.keep_optimizer else {}
        kept = {name: value.contiguous() for name, value in kept.items()}
        return Result(state, float(self.loss) / self.steps if self.steps else math.nan, self.steps, kept)

    def _step(self, phase: Phase, moves: list[Move], batch: Batch) -> None:
        signals.check()
        lr = self._rate()
        for i, move in enumerate(moves):
            update = move(self.state, batch, phase, eager_gradient)
            with torch.no_grad():
                self.step.prepare(update.grads, self.state, self.memory)
                self.step.apply(lr, update, self.state, self.memory)
            if i == 0:
                self.loss += update.loss
        self.steps += 1
        self.scalars["step"].add_(1)

    def _rate(self) -> float:
        """Return the learning rate of the next step."""
        local = self.method.local
        if local.schedule is None:
            return local.lr
        rate = local.rate(self.round, int(self.scalars["epoch"]), self.steps, self._all_steps)
        self.scalars["lr"].fill_(rate)
        return rate

    @cached_property
    def _all_steps(self) -> int:
        return steps_of(self.method, self.schedule.size)

    def _epoch(self, left: int) -> Iterator[Batch]:
        local, schedule = self.method.local, self.schedule
        order = schedule.order()
        full, rest = batch_sizes(schedule.size, local.batch_size, self.method.batch_statistics)
        steps = full + (rest > 0)
        noise: State = {}
        dropout: State = {}
        limit = min(steps, left)
        for step, (x, y) in enumerate(self._batches(order[: limit * local.batch_size], limit)):
            if step == 0:
                noise, dropout = epoch_noise(self.method, schedule, steps, x)
            drawn = {name: value[step] for name, value in noise.items()}
            drawn |= {name: value[step, : len(y)] for name, value in dropout.items()}
            yield Batch(x, y, drawn, self.scalars)

    def _batches(self, order: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches in order, gathered in blocks; augmentation gets one batch at a time."""
        schedule, size = self.schedule, self.method.local.batch_size
        block = 1 if self.federation.augment is not None else BLOCK
        for first in range(0, steps, block):
            index = order[first * size : (first + block) * size]
            x, y = self.federation.gather([schedule.client], index[None], self.method.compute_dtype, [schedule.augment])
            sizes = range(0, size * min(block, steps - first), size)
            yield from ((x[0, start : start + size], y[0, start : start + size]) for start in sizes)
