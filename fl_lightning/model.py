"""The net of a method as named tensors: its entries, which side has them, and the net as a pure function."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fl_lightning.engine import FunctionalNet, LocalTraining, entries
from fl_lightning.nets import LossNet
from fl_lightning.tasks import Task
from fl_lightning.wire import State

BufferPolicy = Literal["average", "keep", "reset"]


class NamedModel:
    """A net and the names of its entries. Client and server each have one, with the same structure."""

    net: nn.Module
    task: Task
    local: LocalTraining
    buffers_policy: BufferPolicy
    #: Initial values of the net's buffers.
    initial_buffers: State

    def is_private(self, name: str) -> bool:
        """Return whether an entry of the net stays with the client."""
        return False

    def stays(self, name: str) -> bool:
        """Return whether an entry stays with the client, by ``is_private`` or by the ``buffers`` policy."""
        return self.is_private(name) or (self.buffers_policy == "keep" and name in self.initial_buffers)

    def resets(self, name: str) -> bool:
        """Return whether an entry is reset every round, so that it need not be sent down for training."""
        return self.buffers_policy == "reset" and name in self.initial_buffers

    @property
    def entry_names(self) -> tuple[str, ...]:
        """Names of the net's entries: parameters and buffers."""
        known: tuple[nn.Module, tuple[str, ...]] | None = self.__dict__.get("_names")
        if known is None or known[0] is not self.net:
            known = self.__dict__["_names"] = (self.net, tuple(entries(self.net)))
        return known[1]

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """Names of the net's trainable parameters."""
        return tuple(name for name, p in self.net.named_parameters() if p.requires_grad)

    @property
    def frozen_names(self) -> frozenset[str]:
        """Names of the net's frozen parameters: both sides have them from the start."""
        return frozenset(name for name, p in self.net.named_parameters() if not p.requires_grad)

    @property
    def private_names(self) -> tuple[str, ...]:
        """Entries of the net that stay with the client."""
        frozen = self.frozen_names
        return tuple(name for name in self.entry_names if name not in frozen and self.stays(name))

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Entries of the net that cross the wire."""
        frozen = self.frozen_names
        return tuple(name for name in self.entry_names if name not in frozen and not self.stays(name))

    @property
    def functional(self) -> FunctionalNet:
        """The net as a pure function; built lazily, neither saved nor sent to other processes."""
        if self.__dict__.get("_functional") is None:
            self.__dict__["_functional"] = FunctionalNet(self.net)
        functional: FunctionalNet = self.__dict__["_functional"]
        return functional

    def forget_net(self) -> None:
        """Drop everything derived from the net, because its tensors or shapes changed."""
        self.__dict__["_functional"] = self.__dict__["_names"] = None

    def call(self, state: State, x: Tensor, noise: State | None = None, training: bool = True) -> tuple[Tensor, State]:
        """Return the net's output under ``state``, and in training the new values of its buffers."""
        return self.functional(state, x, noise or {}, training)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the task's loss of a batch."""
        return self.task.loss(output, target)

    def batch_loss(
        self, state: State, x: Tensor, y: Tensor, noise: State | None = None, training: bool = True
    ) -> tuple[Tensor, State]:
        """Return the loss of a batch under ``state`` (or the net's own loss), and in training the new buffers."""
        if isinstance(self.net, LossNet):
            return self.functional(state, (x, y), noise or {}, training)
        output, buffers = self.call(state, x, noise, training)
        return self.loss(output, y), buffers

    def hold(self, key: str, tensors: State) -> None:
        """Register tensors so that checkpoints and device moves include them; :meth:`held` returns them."""
        kept = nn.Module()
        for name, value in tensors.items():
            kept.register_buffer(name.replace(".", "/"), value.detach().clone())
        setattr(self, key, kept)

    def held(self, key: str) -> State:
        """Return the tensors registered by :meth:`hold`, by name."""
        return {name.replace("/", "."): value for name, value in getattr(self, key).named_buffers()}

    @property
    def trainable(self) -> State:
        """The net's trainable parameters by name."""
        return {name: p.detach() for name, p in self.net.named_parameters() if p.requires_grad}

    # ---- needed by engines ----------------------------------------------------------------------------------

    @property
    def batch_statistics(self) -> bool:
        """Whether the net normalises over the batch."""
        return self.functional.batch_statistics

    @property
    def compute_dtype(self) -> torch.dtype:
        """The net's floating precision."""
        return next((p.dtype for p in self.net.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def dropout_shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the noise entries of the net's dropout layers."""
        return self.functional.dropout_shapes(x)
