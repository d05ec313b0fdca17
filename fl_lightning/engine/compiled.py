"""Captured steps compiled to machine code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fl_lightning.engine.captured import CapturedEngine, Trace
from fl_lightning.engine.stacked import Part
from fl_lightning.errors import FederationError


class CompiledEngine(CapturedEngine):
    """Captured training whose most frequent steps are compiled by ``torch.compile``; for long runs.

    Compiling a step takes between seconds and a minute, and needs a C++ compiler. Like tracing, the decision depends on
    the round and its clients alone.
    """

    name = "compiled"
    #: Number of steps that pay for compiling one.
    worth = 2000

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self._compiled: dict[Trace, Callable[..., Sequence[Tensor]]] = {}

    def reset(self) -> None:
        """Drop traces and compiled steps."""
        super().reset()
        self._compiled.clear()

    def runner(self, trace: Trace, part: Part) -> Callable[..., Sequence[Tensor]]:
        """Return the function that replays a trace, compiled if that pays off."""
        if part.often < self.worth:
            return super().runner(trace, part)
        if trace not in self._compiled:
            self._compiled[trace] = _compiled(trace.step.run)
        return self._compiled[trace]


def _compiled(run: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
    compiled: Callable[..., Sequence[Tensor]] = torch.compile(run, dynamic=False, fullgraph=True)

    def checked(*inputs: Tensor) -> Sequence[Tensor]:
        try:
            return compiled(*inputs)
        except torch._inductor.exc.InductorError as error:
            raise FederationError(
                "The engine 'compiled' could not compile a step, it needs a C++ compiler: use 'captured'."
            ) from error

    return checked
