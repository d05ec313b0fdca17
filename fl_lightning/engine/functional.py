"""A net as a pure function of its state."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from fl_lightning.nets.dropout import StreamDropout, noise_shapes, stream_dropout
from fl_lightning.wire import State


def entries(net: nn.Module) -> State:
    """Return a net's parameters and persistent buffers by name; tied weights appear once."""
    passing = {id(m._buffers[key]) for m in net.modules() for key in m._non_persistent_buffers_set}
    buffers = {name: value for name, value in net.named_buffers() if id(value) not in passing}
    return {**dict(net.named_parameters()), **buffers}


class FunctionalNet:
    """``net(state, x)`` as a pure function, independent of the original net.

    It has a copy of the net as a skeleton, in which every dropout layer takes its noise as an input, and sets the
    tensors of a state in the skeleton during a call. ``torch.func.functional_call`` does the same at a multiple of the
    cost per call, which matters if a step takes a few hundred microseconds. Other state that a call may change
    (non-persistent buffers and metrics) is restored afterwards, so that it cannot leak from one client to another.

    Args:
        net: the network; copied.
    """

    def __init__(self, net: nn.Module) -> None:
        self.skeleton = stream_dropout(copy.deepcopy(net))
        #: Whether several models can be mapped over in one pass, as far as is known.
        self.stackable = True
        norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
        self.batch_statistics = bool(norms)
        #: Whether samples of a batch affect each other's outputs even in eval mode.
        self.always_batch_statistics = any(norm.running_mean is None for norm in norms)
        names = {id(value): name for name, value in entries(self.skeleton).items()}
        self._parameters: list[tuple[dict[str, Any], str, str]] = []
        self._buffers: list[tuple[dict[str, Any], str, str]] = []
        self._noise: list[tuple[dict[str, Any], str, str]] = []
        self._passing: list[tuple[dict[str, Any], str]] = []
        for path, module in self.skeleton.named_modules():
            slots: dict[str, Any] = module._parameters
            self._parameters += [(slots, key, names[id(v)]) for key, v in slots.items() if v is not None]
            slots = module._buffers
            self._buffers += [(slots, key, names[id(v)]) for key, v in slots.items() if id(v) in names]
            if isinstance(module, StreamDropout):
                self._noise.append((slots, "noise", f"{path}.noise" if path else "noise"))
            else:
                self._passing += [(slots, k) for k, v in slots.items() if v is not None and id(v) not in names]
        self._metrics = [module for module in self.skeleton.modules() if isinstance(module, Metric)]
        self._recurrent = [module for module in self.skeleton.modules() if isinstance(module, nn.RNNBase)]
        self._shapes: dict[tuple[int, ...], dict[str, tuple[int, ...]]] = {}

    def __call__(self, state: State, x: Tensor | tuple[Any, ...], noise: State, training: bool) -> tuple[Any, State]:
        """Run the net.

        Args:
            state: at least all :func:`entries` of the net; other names are ignored.
            x: inputs, shape (B, ...), or a tuple, such as (inputs, targets), for a net that computes its own loss.
            noise: the noise of the dropout layers when training.
            training: train or eval mode.

        Returns:
            The output and, in training, the new values of the buffers.
        """
        if self.skeleton.training != training:
            self.skeleton.train(training)
        own = [(slots, key, slots[key]) for slots, key, _ in (*self._parameters, *self._buffers, *self._noise)]
        own += [(slots, key, slots[key]) for slots, key in self._passing]
        counted = [(metric, dict(vars(metric))) for metric in self._metrics]
        try:
            self._fill(state, noise, training)
            output = self.skeleton(x)
            # Read from the slots: a net may write to its buffers or replace them.
            return output, {name: slots[key] for slots, key, name in self._buffers} if training else {}
        finally:
            for slots, key, value in own:
                slots[key] = value
            for metric, values in counted:
                vars(metric).clear()
                vars(metric).update(values)
            self._sync_recurrent()

    def _fill(self, state: State, noise: State, training: bool) -> None:
        """Set the tensors of a call in the skeleton, as copies where the call may write to them."""
        for slots, key, name in self._parameters:
            slots[key] = state[name]
        for slots, key, name in self._buffers:
            slots[key] = state[name].clone() if training else state[name]
        for slots, key, name in self._noise:
            if name in noise:  # a layer may be unused
                slots[key] = noise[name]
        for slots, key in self._passing:
            slots[key] = slots[key].clone()
        for metric in self._metrics:
            vars(metric).update({k: [] if isinstance(v, list) else v.clone() for k, v in metric._defaults.items()})
        self._sync_recurrent()

    def _sync_recurrent(self) -> None:
        """Update the list of weights that recurrent layers compute with."""
        for layer in self._recurrent:
            layer._flat_weights = [layer._parameters.get(name) for name in layer._flat_weights_names]

    def dropout_shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        """Return the noise entries of the dropout layers with their shapes, without the batch dimension."""
        if not self._noise:
            return {}
        key = tuple(x.shape[1:])
        if key not in self._shapes:
            self._shapes[key] = {name: shape[1:] for name, shape in noise_shapes(self.skeleton, x).items()}
        return self._shapes[key]
