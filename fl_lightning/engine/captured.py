"""The stacked step captured once per shape and replayed: no autograd, no vmap, only the operations that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fl_lightning.engine.contract import Batch, Move, Phase, Update
from fl_lightning.engine.stacked import MappedMove, StackedEngine, map_move
from fl_lightning.wire import State


class _Captured(NamedTuple):
    """The operations of a step, and how to read what they return."""

    run: Callable[..., list[Tensor]]
    spec: TreeSpec


class CapturedEngine(StackedEngine):
    """As ``stacked``, with each different step traced once and replayed from then on.

    A step is different if its phase, its move, the names of its tensors or their shapes are. Whatever changes between
    steps must therefore reach a move as a tensor (``Batch.scalars``, ``Batch.noise``, the state): Python numbers are
    frozen in the trace until the next run. A trace costs as much as it saves in dozens of steps, so shapes that are
    seldom seen, as those of last partial batches, are first run as ``stacked`` runs them. The operations are the same,
    and so are the results, bit for bit.
    """

    name = "captured"
    #: How often a different step is run before it is traced.
    seldom = 40

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self._traces: dict[Any, _Captured] = {}
        self._seen: Counter[Any] = Counter()

    def reset(self) -> None:
        """Forget the traces."""
        self._traces.clear()
        self._seen.clear()

    def mapped(self, move: Move, position: int, phase: Phase) -> MappedMove:
        """The move mapped over the stack, by replay."""
        plain = map_move(move, phase)

        def replay(state: State, batch: Batch) -> Update:
            leaves, layout = tree_flatten((state, batch))
            key = (position, phase, layout, tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves))
            if key not in self._traces:
                self._seen[key] += 1
                if self._seen[key] <= self.seldom:
                    return plain(state, batch)
                self._traces[key] = _capture(plain, leaves, layout)
            run, spec = self._traces[key]
            with torch.no_grad():
                return tree_unflatten(run(*leaves), spec)  # type: ignore[no-any-return]

        return replay


def _capture(step: MappedMove, leaves: list[Tensor], layout: TreeSpec) -> _Captured:
    spec: list[TreeSpec] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        outputs, shape = tree_flatten(step(*tree_unflatten(inputs, layout)))
        spec[:] = [shape]
        return outputs

    graph = make_fx(flat, tracing_mode="fake")(*leaves)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return _Captured(graph, spec[0])
