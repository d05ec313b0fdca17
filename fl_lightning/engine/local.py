"""Local SGD on named tensors, in place: the same code for one client and for a stack of clients.

The update is elementwise, so a leading client dimension needs no special care. It works in place because a fresh
copy of the weights at every step costs more than the step itself (page faults).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.engine.contract import LocalTraining, Product, Update
from fl_lightning.wire import State


class LocalSGD:
    """SGD as ``torch.optim.SGD`` does it, over a dict of tensors.

    Args:
        local: learning rate, momentum and weight decay.
    """

    def __init__(self, local: LocalTraining) -> None:
        self.local = local

    def apply(self, update: Update, state: State, velocity: State) -> None:
        """Apply one move's update in place; autograd must be off.

        Args:
            update: gradients and changed entries.
            state: the tensors to write to.
            velocity: momentum buffers; those that are not there yet are made.
        """
        if update.grads:
            self._descend(update.grads, state, velocity)
        for name, value in update.replace.items():
            state[name].copy_(value)
        for name, value in update.add.items():
            if isinstance(value, Product):
                value.add_to(state[name], 1.0)
            else:
                state[name].add_(value)

    def _descend(self, grads: Mapping[str, Tensor | Product], state: State, velocity: State) -> None:
        """One step; products are multiplied straight into what they are added to."""
        lr, decay, momentum = self.local.lr, self.local.weight_decay, self.local.momentum
        whole = {name: grad for name, grad in grads.items() if isinstance(grad, Tensor)}
        products = {name: grad for name, grad in grads.items() if isinstance(grad, Product)}
        if momentum:
            for name in grads:
                if name not in velocity:
                    velocity[name] = torch.zeros_like(state[name])
        for name, product in products.items():
            if momentum:
                product.add_to(velocity[name], 1.0, beta=momentum, own=False)
                if decay or product.own:
                    velocity[name].add_(state[name], alpha=decay + product.own)
                state[name].add_(velocity[name], alpha=-lr)
            else:
                product.add_to(state[name], -lr, beta=1 - lr * decay)
        if not whole:
            return
        params, steps = [state[name] for name in whole], list(whole.values())
        if decay:
            steps = list(torch._foreach_add(steps, params, alpha=decay))
        if momentum:
            moving = [velocity[name] for name in whole]
            torch._foreach_mul_(moving, momentum)
            torch._foreach_add_(moving, steps)
            steps = moving
        torch._foreach_add_(params, steps, alpha=-lr)
