"""Stacked training: the states of many clients in one tensor each, and a step mapped over them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fl_lightning import signals
from fl_lightning.engine.base import Engine, epochs_of, moves_of, steps_left, steps_of
from fl_lightning.engine.contract import Batch, Job, LocalMethod, Move, Phase, Result, Update
from fl_lightning.engine.gradient import functional_gradient
from fl_lightning.engine.local import LocalStep
from fl_lightning.engine.memory import keep_memory
from fl_lightning.engine.schedule import ClientSchedule, StackSamples, batch_sizes, epoch_noise, scalars
from fl_lightning.federation import Federation
from fl_lightning.layout import StackLayout
from fl_lightning.local_optim import Rate
from fl_lightning.wire import State


class Part:
    """A contiguous range of clients of a stack that step together with equal batch sizes.

    Args:
        start: the first client.
        stop: one past the last.
        often: expected number of steps of this shape by the end of this round.
    """

    def __init__(self, start: int, stop: int, often: int) -> None:
        self.rows = slice(start, stop)
        self.often = often
        #: Views of the stack's tensors.
        self.state: State = {}
        self.memory: State = {}
        self.scalars: State = {}
        #: Losses of its steps.
        self.losses: list[Tensor] = []
        #: Prepared by an engine for the state's present memory, by the position of the move.
        self.prepared: dict[int, Any] = {}

    def look(self, state: State, memory: State) -> None:
        """Take new views of the stack's tensors after they moved in memory."""
        self.state = {name: value[self.rows] for name, value in state.items()}
        self.memory = {name: value[self.rows] for name, value in memory.items()}
        self.prepared = {}


MappedMove = Callable[[Part, Batch], Update]


class StackedEngine(Engine):
    """vmap(grad) over the clients of a stack; the fastest for small nets.

    Clients are sorted by size. Within an epoch they take their full batches in step, and the active part of the stack
    shrinks to a prefix as smaller clients run out; then come the last partial batches, grouped by size. In a phase with
    a fixed number of steps, larger clients finish first, since they take more steps per epoch. Every call works on a
    contiguous slice of the stack, so nothing is copied, padded or masked.
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
        keep_memory()
        order = sorted(range(len(jobs)), key=lambda i: -len(federation.train[jobs[i].client]))
        stack = _Stack(self, method, federation, [jobs[i] for i in order], round, max_steps)
        results = dict(zip(order, stack.train(), strict=True))
        return [results[i] for i in range(len(jobs))]

    def mapped(self, move: Move, position: int, phase: Phase) -> MappedMove:
        """Map a phase's move, given with its first position among the moves, over a stack's clients."""

        def mapped(part: Part, batch: Batch) -> Update:
            leaves = (*part.state.values(), batch.x, batch.y, *batch.noise.values(), *batch.scalars.values())
            return flat_move(move, phase, part.state, batch)(*leaves)

        return mapped


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
        self.step = LocalStep(method.local, (len(jobs),))
        self.memory = self._remembered(jobs)
        self.owned: set[str] = set()
        self.parts: dict[tuple[int, int, int], Part] = {}
        self.often: dict[tuple[int, int], int] = {}
        self.round, self.dtype = round, method.compute_dtype
        size = torch.tensor(sizes, device=federation.device)
        self.scalars = scalars(size, round, method.compute_dtype, method.local.schedule is not None)
        self.loss = torch.zeros_like(size, dtype=torch.float64)
        self.steps = [0] * len(jobs)
        again = sum(phase.epochs for phase in method.phases()) > 1
        self.samples = StackSamples(federation, self.schedules, self.dtype, again)

    def _remembered(self, jobs: list[Job]) -> State:
        """Stack the clients' optimizer states, with zeros where a client has no entry."""
        names = {name: value for job in jobs for name, value in job.optimizer.items()}
        return {
            name: torch.stack([job.optimizer.get(name, torch.zeros_like(like)) for job in jobs])
            for name, like in names.items()
        }

    @torch.no_grad()  # moves differentiate on their own
    def train(self) -> list[Result]:
        for phase in self.method.phases():
            epochs = epochs_of(phase, self.max_steps)
            opening, moves = moves_of(self.method, phase)
            first = [StackedEngine.mapped(self.engine, move, -1, phase) for move in opening]  # too rare to capture
            others = [self.engine.mapped(move, moves.index(move), phase) for move in moves]
            before = list(self.steps)
            self.parts = {}
            self._own(phase.trainable, phase.trainable)
            for epoch in range(epochs):
                taken = [now - then for now, then in zip(self.steps, before, strict=True)]
                left = [steps_left(phase, steps, self.max_steps) for steps in taken]
                done = left.count(0)
                if done == len(left):
                    break
                if epoch == 0:
                    self._count(epochs, left)
                for part, batch in self._epoch(done, left):
                    begun = self.steps[part.rows.start] > before[part.rows.start]
                    self._step(others if begun or opening == moves else first, part, batch)
                self.scalars["epoch"][done:].add_(1)
            for part in self.parts.values():
                self.loss[part.rows] += torch.stack(part.losses).sum(0, dtype=self.loss.dtype)
        sums = self.loss.tolist()
        kept = self.memory if self.method.local.keep_optimizer else {}
        return [
            Result(
                {n: value[k] for n, value in self.state.items()},
                sums[k] / steps if steps else math.nan,
                steps,
                {n: value[k] for n, value in kept.items()},
            )
            for k, steps in enumerate(self.steps)
        ]

    def _count(self, epochs: int, left: list[int]) -> None:
        """Estimate how often each step shape occurs by the end of this phase, assuming equal rounds."""
        shapes = Counter((stop - start, width) for start, stop, _, width in self._slices(left))
        self.often = {shape: epochs * (self.round + 1) * count for shape, count in shapes.items()}

    def _part(self, start: int, stop: int, width: int) -> Part:
        """Return the part of the stack for a step, cached."""
        key = (start, stop, width)
        if key not in self.parts:
            part = self.parts[key] = Part(start, stop, self.often.get((stop - start, width), 0))
            part.look(self.state, self.memory)
            part.scalars = {name: value[start:stop] for name, value in self.scalars.items()}
        return self.parts[key]

    def _own(self, names: Iterable[str], stepped: Iterable[str]) -> None:
        """Copy shared entries before the first write to them, and initialise their optimizer state.

        Args:
            names: the entries.
            stepped: the subset that the optimizer steps.
        """
        new = [name for name in names if name not in self.owned]
        for name in new:
            self.owned.add(name)
            self.state[name] = self.state[name].contiguous()
        if self.step.prepare(stepped, self.state, self.memory) or new:
            for part in self.parts.values():
                part.look(self.state, self.memory)

    def _step(self, moves: list[MappedMove], part: Part, batch: Batch) -> None:
        signals.check()
        lr = self._rate(part.rows)
        for i, move in enumerate(moves):
            update = move(part, batch)
            self._own((*update.grads, *update.replace, *update.add), update.grads)
            self.step.apply(lr, update, part.state, part.memory)
            if i == 0:
                part.losses.append(update.loss)
        part.scalars["step"].add_(1)
        for k in range(part.rows.start, part.rows.stop):
            self.steps[k] += 1

    def _rate(self, rows: slice) -> Rate:
        """Return the learning rate of the next step: one for all, or one per client of a part."""
        local = self.method.local
        if local.schedule is None:
            return local.lr
        epochs, clients = self.scalars["epoch"][rows].tolist(), range(rows.start, rows.stop)
        rates = [
            local.rate(self.round, int(epoch), self.steps[k], self._all_steps[k])
            for k, epoch in zip(clients, epochs, strict=True)
        ]
        all_rates = torch.tensor(rates, dtype=torch.float64, device=self.loss.device)
        self.scalars["lr"][rows] = all_rates.to(self.dtype)
        return rates[0] if len(set(rates)) == 1 else all_rates

    @cached_property
    def _all_steps(self) -> list[int]:
        return [steps_of(self.method, schedule.size) for schedule in self.schedules]

    def _epoch(self, done: int, left: list[int]) -> Iterator[tuple[Part, Batch]]:
        """Yield parts of the stack and their batches, in the order described at :class:`StackedEngine`.

        Args:
            done: number of clients, at the start of the stack, without steps left; they draw nothing either.
            left: maximum number of steps of each client, increasing.
        """
        size = self.method.local.batch_size
        orders = self.samples.orders(done, size)
        noise: tuple[State, State] | None = None
        for start, stop, step, width in self._slices(left):
            rows, places = slice(start - done, stop - done), orders[step]
            if stop - start < len(places) or width < size:
                places = places[rows, :width]
            x, y = self.samples.gather(start, stop, places)
            if noise is None:
                noise = self._noise(x[0], done)
            drawn = {name: value[step, rows] for name, value in noise[0].items()}
            drawn |= {name: value[step, rows, :width] for name, value in noise[1].items()}
            part = self._part(start, stop, width)
            yield part, Batch(x, y, drawn, part.scalars)

    def _slices(self, left: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield (start, stop, step of the epoch, batch size) of every call of an epoch."""
        start, stop = 0, len(self.clients)
        for step in range(max(self.full)):
            while start < stop and left[start] <= step:  # increasing
                start += 1
            while stop > start and self.full[stop - 1] <= step:  # decreasing
                stop -= 1
            if start < stop:
                yield start, stop, step, self.method.local.batch_size
        for (rest, full, some), run in groupby(
            range(len(self.clients)), key=lambda k: (self.rest[k], self.full[k], left[k] > self.full[k])
        ):
            members = list(run)
            if rest and some:
                # Clients of small groups step one by one, which saves traces of further shapes.
                width = len(members) if 2 * len(members) >= len(self.clients) else 1
                for start in range(members[0], members[-1] + 1, width):
                    yield start, start + width, full, rest

    def _noise(self, x: Tensor, done: int) -> tuple[State, State]:
        """Draw the noise of the next epoch, stacked over active clients and padded: (steps, K, ...)."""
        steps = [full + (rest > 0) for full, rest in zip(self.full, self.rest, strict=True)]
        drawn = [epoch_noise(self.method, s, n, x) for s, n in zip(self.schedules[done:], steps[done:], strict=True)]
        return _pad([noise for noise, _ in drawn]), _pad([dropout for _, dropout in drawn])


def flat_move(move: Move, phase: Phase, state: State, batch: Batch) -> Callable[..., Update]:
    """Map a move over the stack, as a function of the individual tensors of the state and of the batch.

    The tensors are passed flat because nested inputs cost vmap more time than some steps take.
    """
    names = (tuple(state), ("x", "y"), tuple(batch.noise), tuple(batch.scalars))

    def one(*leaves: Tensor) -> Update:
        left = iter(leaves)
        own, data, noise, scalars = ({name: next(left) for name in part} for part in names)
        with StackLayout():
            return move(own, Batch(data["x"], data["y"], noise, scalars), phase, functional_gradient)

    return torch.vmap(one, randomness="error")


def _stack(values: list[Tensor]) -> Tensor:
    """Stack clients' tensors; a tensor that all share is expanded, and copied when it is first written to."""
    first = values[0].detach()
    if len(values) > 1 and all(_same(value, first) for value in values):
        return first.expand(len(values), *first.shape)
    return torch.stack([value.detach() for value in values])


def _same(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()


def _pad(parts: list[State]) -> State:
    return {name: torch.nn.utils.rnn.pad_sequence([part[name] for part in parts]) for name in parts[0]}
