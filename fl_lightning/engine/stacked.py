"""Many clients at once: their states stacked along a new first dimension, a step mapped over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from fl_lightning.engine.base import Engine, epochs_of, moves_of, steps_left
from fl_lightning.engine.contract import Batch, Job, LocalMethod, Move, Phase, Result, Update
from fl_lightning.engine.gradient import functional_gradient
from fl_lightning.engine.local import LocalSGD
from fl_lightning.engine.schedule import ClientSchedule, batch_sizes, epoch_noise, scalars
from fl_lightning.federation import Federation
from fl_lightning.wire import State

MappedMove = Callable[[State, Batch], Update]


class StackedEngine(Engine):
    """vmap(grad) over the clients of a stack; the fastest for small nets.

    Clients are sorted by size. Within an epoch all of them take their full batches in step, the active part of the
    stack shrinking to a prefix as the smaller ones run out; then come the last partial batches, those of equal size
    together. Where a phase has a number of steps the larger clients, which take more of them in an epoch, are the first
    to be done. Every call works on a contiguous slice of the stack, so nothing is copied, padded or masked.
    """

    name = "stacked"

    def train(
        self,
        method: LocalMethod,
        federation: Federation,
        jobs: Sequence[Job],
        round: int,
        max_steps: int | None = None,
    ) -> list[Result]:
        """Train the jobs together; see ``Engine.train``."""
        order = sorted(range(len(jobs)), key=lambda i: -len(federation.train[jobs[i].client]))
        stack = _Stack(self, method, federation, [jobs[i] for i in order], round, max_steps)
        results = dict(zip(order, stack.train(), strict=True))
        return [results[i] for i in range(len(jobs))]

    def mapped(self, move: Move, position: int, phase: Phase) -> MappedMove:
        """A phase's move, given with its position among the moves, mapped over the clients of a stack."""
        return map_move(move, phase)


class _Stack:
    def __init__(
        self,
        engine: StackedEngine,
        method: LocalMethod,
        federation: Federation,
        jobs: list[Job],
        round: int,
        max_steps: int | None,
    ) -> None:
        self.engine = engine
        self.method, self.federation, self.max_steps = method, federation, max_steps
        self.clients = [job.client for job in jobs]
        self.schedules = [ClientSchedule.of(method, federation, client, round) for client in self.clients]
        sizes = [s.size for s in self.schedules]
        counts = [batch_sizes(n, method.local.batch_size, method.batch_statistics) for n in sizes]
        self.full = [full for full, _ in counts]
        self.rest = [rest for _, rest in counts]
        self.state = {name: _stack([job.state[name] for job in jobs]) for name in jobs[0].state}
        self.sgd = LocalSGD(method.local, self.state)
        size = torch.tensor(sizes, device=federation.device)
        self.scalars = scalars(size, round, method.compute_dtype)
        self.loss = torch.zeros_like(size, dtype=torch.float64)
        self.steps = [0] * len(jobs)

    def train(self) -> list[Result]:
        for phase in self.method.phases():
            moves = [self.engine.mapped(move, i, phase) for i, move in enumerate(moves_of(self.method, phase))]
            before = list(self.steps)
            for _ in range(epochs_of(phase, self.max_steps)):
                taken = [now - then for now, then in zip(self.steps, before, strict=True)]
                left = [steps_left(phase, steps, self.max_steps) for steps in taken]
                done = left.count(0)
                if done == len(left):
                    break
                for start, stop, batch in self._epoch(done, left):
                    self._step(moves, start, stop, batch)
                self.scalars["epoch"][done:].add_(1)
        losses = self.loss.tolist()
        return [
            Result({name: value[k] for name, value in self.state.items()}, losses[k] / max(steps, 1), steps)
            for k, steps in enumerate(self.steps)
        ]

    def _step(self, moves: list[MappedMove], start: int, stop: int, batch: Batch) -> None:
        for i, move in enumerate(moves):
            update = move({name: value[start:stop] for name, value in self.state.items()}, batch)
            self.sgd.apply(update, start, stop)
            if i == 0:
                self.loss[start:stop] += update.loss
        self.scalars["step"][start:stop].add_(1)
        for k in range(start, stop):
            self.steps[k] += 1

    def _epoch(self, done: int, left: list[int]) -> Iterator[tuple[int, int, Batch]]:
        """Slices of the stack and their batches, as the class doc says.

        Args:
            done: how many clients, the first of the stack, have no step left; they draw nothing either.
            left: how many steps each client takes at most, increasing.
        """
        size = self.method.local.batch_size
        orders = torch.nn.utils.rnn.pad_sequence([s.order() for s in self.schedules[done:]], batch_first=True)
        noise: tuple[State, State] | None = None
        for start, stop, step, width in self._slices(left):
            rows = slice(start - done, stop - done)
            x, y = self._gather(start, stop, orders[rows, step * size : step * size + width])
            if noise is None:
                noise = self._noise(x[0], done)
            drawn = {name: value[rows, step] for name, value in noise[0].items()}
            drawn |= {name: value[rows, step, :width] for name, value in noise[1].items()}
            yield start, stop, Batch(x, y, drawn, {n: v[start:stop] for n, v in self.scalars.items()})

    def _slices(self, left: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop, step of the epoch, batch size) of every call of an epoch."""
        for step in range(max(self.full)):
            start, stop = sum(n <= step for n in left), sum(full > step for full in self.full)
            if start < stop:
                yield start, stop, step, self.method.local.batch_size
        for (rest, full, some), run in groupby(
            range(len(self.clients)), key=lambda k: (self.rest[k], self.full[k], left[k] > self.full[k])
        ):
            members = list(run)
            if rest and some:
                yield members[0], members[-1] + 1, full, rest

    def _gather(self, start: int, stop: int, index: Tensor) -> tuple[Tensor, Tensor]:
        streams = [s.augment for s in self.schedules[start:stop]]
        return self.federation.gather(self.clients[start:stop], index, self.method.compute_dtype, streams)

    def _noise(self, x: Tensor, done: int) -> tuple[State, State]:
        """Noise of the next epoch, stacked over clients that are not done and padded: (K, steps, ...)."""
        steps = [full + (rest > 0) for full, rest in zip(self.full, self.rest, strict=True)]
        drawn = [epoch_noise(self.method, s, n, x) for s, n in zip(self.schedules[done:], steps[done:], strict=True)]
        return _pad([noise for noise, _ in drawn]), _pad([dropout for _, dropout in drawn])


def map_move(move: Move, phase: Phase) -> MappedMove:
    """The move mapped over the stack; vmap is given flat tensors, nested ones cost it more than some steps."""

    def mapped(state: State, batch: Batch) -> Update:
        parts: tuple[State, ...] = ({"x": batch.x, "y": batch.y}, batch.noise, batch.scalars, state)

        def one(*leaves: Tensor) -> Update:
            left = iter(leaves)
            data, noise, scalars, own = ({name: next(left) for name in part} for part in parts)
            return move(own, Batch(data["x"], data["y"], noise, scalars), phase, functional_gradient)

        return torch.vmap(one, randomness="error")(*(value for part in parts for value in part.values()))

    return mapped


def _stack(values: list[Tensor]) -> Tensor:
    """Stack clients' tensors; one that all share is only repeated and copied when it is first written to."""
    first = values[0].detach()
    if len(values) > 1 and all(_same(value, first) for value in values):
        return first.expand(len(values), *first.shape)
    return torch.stack([value.detach() for value in values])


def _same(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()


def _pad(parts: list[State]) -> State:
    return {
        name: torch.nn.utils.rnn.pad_sequence([part[name] for part in parts], batch_first=True) for name in parts[0]
    }
