"""Stacked steps traced once per shape and replayed, without the overhead of autograd and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fl_lightning.engine.contract import Batch, Move, Phase, Update
from fl_lightning.engine.graph import OptimizedStep, optimize
from fl_lightning.engine.stacked import MappedMove, Part, StackedEngine, flat_move
from fl_lightning.wire import State


class CapturedEngine(StackedEngine):
    """Stacked training in which each distinct step is traced once and then replayed.

    Steps are distinct if their phase, move, or the names or shapes of their tensors differ. Values that change between
    steps must therefore reach a move as tensors (``Batch.scalars``, ``Batch.noise``, the state): Python numbers are
    frozen in the trace until the next run. Weight gradients that are matrix products are multiplied directly into the
    weights; apart from the rounding of that, the arithmetic is that of ``stacked``.

    A trace costs as much as it saves in dozens of steps. Steps with rare shapes, such as last partial batches, run as
    in ``stacked`` until enough rounds have passed for a trace to pay off. That depends on the round and its clients
    alone, so a resumed run does the same.
    """

    name = "captured"
    #: Number of steps that pay for a trace, and its factor for convolutions, where a trace saves less.
    seldom, convolved = 10, 5

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self._traces: dict[Any, Trace] = {}

    def reset(self) -> None:
        """Drop the traces."""
        self._traces.clear()

    def mapped(self, move: Move, position: int, phase: Phase) -> MappedMove:
        """Return the move mapped over the stack, by replay."""
        plain = super().mapped(move, position, phase)

        def replay(part: Part, batch: Batch) -> Update:
            if part.often < self.seldom * (self.convolved if _convolves(part.state) else 1):
                return plain(part, batch)
            bound = part.prepared.get(position)
            if bound is None:
                trace = self._trace(move, position, phase, part.state, batch)
                bound = part.prepared[position] = _Bound(trace, self.runner(trace, part), part)
            return bound(batch)

        return replay

    def runner(self, trace: Trace, part: Part) -> Callable[..., Sequence[Tensor]]:
        """Return the function that replays a trace."""
        return trace.step.run

    def _trace(self, move: Move, position: int, phase: Phase, state: State, batch: Batch) -> Trace:
        leaves = [*state.values(), *_leaves(batch)]
        looks = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
        key = (position, phase, tuple(state), tuple(batch.noise), looks)
        if key not in self._traces:
            self._traces[key] = Trace(move, phase, state, batch)
        return self._traces[key]


def _convolves(state: State) -> bool:
    return any(value.dim() > 4 for value in state.values())  # weights of shape (clients, out, in, height, width)


def _leaves(batch: Batch) -> list[Tensor]:
    return [batch.x, batch.y, *batch.noise.values(), *batch.scalars.values()]


class Trace:
    """The operations of a mapped move, and the names of their outputs."""

    def __init__(self, move: Move, phase: Phase, state: State, batch: Batch) -> None:
        names: list[Sequence[str]] = []
        mapped = flat_move(move, phase, state, batch)

        def flat(*leaves: Tensor) -> list[Tensor]:
            update = mapped(*leaves)
            names[:] = [tuple(part) for part in update[1:]]
            return [update.loss, *(value for part in update[1:] for value in part.values())]

        trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)  # the net may have constants
        graph = trace(*state.values(), *_leaves(batch))
        self.names = names
        number = {name: i for i, name in enumerate(state)}
        grads, replaced, added = names
        outputs = list(enumerate((*grads, *replaced, *added), start=1))
        changes = {i: number[name] for i, name in outputs if not 0 <= i - 1 - len(grads) < len(replaced)}
        self.step: OptimizedStep = optimize(graph, len(state), changes, [number[name] for name in replaced])


class _Bound:
    """A trace bound to the memory of one part of the stack."""

    def __init__(self, trace: Trace, run: Callable[..., Sequence[Tensor]], part: Part) -> None:
        self.trace, self.run = trace, run
        self.given = [*trace.step.bind(*part.state.values()), *part.state.values()]

    def __call__(self, batch: Batch) -> Update:
        step = self.trace.step
        returned = iter(step.outputs(self.run(*self.given, *_leaves(batch))))
        loss = next(returned)
        parts = [dict(zip(names, islice(returned, len(names)), strict=True)) for names in self.trace.names]
        return Update(loss, *parts)  # type: ignore[arg-type]
