"""In-place application of moves, for one client or a stack of clients."""

from __future__ import annotations

from collections.abc import Iterable

from fl_lightning.engine.contract import LocalTraining, Update
from fl_lightning.local_optim import Product, Rate
from fl_lightning.wire import State


class LocalStep:
    """Applies updates with the local optimizer.

    It works in place because a fresh copy of the weights at every step costs more than the step itself (page faults).

    Args:
        local: the settings.
        clients: ``(K,)`` for a stack of K clients, ``()`` for one client.
    """

    def __init__(self, local: LocalTraining, clients: tuple[int, ...] = ()) -> None:
        self.rule, self.clients = local.rule, clients
        self._prepared: set[str] = set()

    def prepare(self, names: Iterable[str], state: State, memory: State) -> bool:
        """Initialise the optimizer state of entries that will be stepped; return whether anything was added.

        Args:
            names: names of the entries.
            state: the entries.
            memory: the optimizer state.
        """
        new = [name for name in names if name not in self._prepared]
        if not new:
            return False
        self._prepared.update(new)
        known = len(memory)
        for name in new:
            for slot, value in self.rule.fresh(name, state[name], self.clients).items():
                memory.setdefault(slot, value)
        return len(memory) > known

    def apply(self, lr: Rate, update: Update, state: State, memory: State) -> None:
        """Apply one move's update in place; autograd must be off.

        Args:
            lr: learning rate.
            update: gradients and changed entries.
            state: the tensors to update.
            memory: the optimizer state of the entries that have gradients.
        """
        if update.grads:
            self.rule.step(lr, update.grads, state, memory)
        for name, value in update.replace.items():
            state[name].copy_(value)
        for name, value in update.add.items():
            if isinstance(value, Product):
                value.add_to(state[name], 1.0)
            else:
                state[name].add_(value)
