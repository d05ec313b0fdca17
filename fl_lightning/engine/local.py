"""Local SGD on named tensors, in place: the same code for one client and for a stack of clients.

The update is elementwise, so a leading client dimension needs no special care. It works in place because a fresh
copy of the weights at every step costs more than the step itself (page faults).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.engine.contract import LocalTraining, Update
from fl_lightning.wire import State


class LocalSGD:
    """SGD as ``torch.optim.SGD`` does it, over a dict of tensors.

    Args:
        local: learning rate, momentum and weight decay.
        state: the tensors to update; momentum buffers are made when first needed.
    """

    def __init__(self, local: LocalTraining, state: State) -> None:
        self.local = local
        self.state = state
        self.velocity: State = {}

    @torch.no_grad()
    def apply(self, update: Update, start: int | None = None, stop: int | None = None) -> None:
        """Apply one move's update in place.

        Args:
            update: gradients and changed entries.
            start: first client of the stack that the update is for; None when the state is not stacked.
            stop: one past the last.
        """
        rows = None if start is None else slice(start, stop)
        if update.grads:
            self._descend(update.grads, rows)
        for name, value in update.replace.items():
            self._target(name, rows).copy_(value)
        for name, value in update.add.items():
            self._target(name, rows).add_(value)

    def _target(self, name: str, rows: slice | None) -> Tensor:
        value = self.state[name]
        if rows is None:
            return value
        if len(value) > 1 and value.stride(0) == 0:  # shared by the stack until now: copied on the first write
            value = self.state[name] = value.contiguous()
        return value[rows]

    def _descend(self, gradients: State, rows: slice | None) -> None:
        params = [self._target(name, rows) for name in gradients]
        grads = list(gradients.values())
        if self.local.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=self.local.weight_decay))
        if self.local.momentum:
            grads = self._accelerate(list(gradients), grads, rows)
        torch._foreach_add_(params, grads, alpha=-self.local.lr)

    def _accelerate(self, names: list[str], grads: list[Tensor], rows: slice | None) -> list[Tensor]:
        for name in names:
            if name not in self.velocity:
                self.velocity[name] = torch.zeros_like(self.state[name])
        velocity = [self.velocity[name] if rows is None else self.velocity[name][rows] for name in names]
        torch._foreach_mul_(velocity, self.local.momentum)
        torch._foreach_add_(velocity, grads)
        return velocity
