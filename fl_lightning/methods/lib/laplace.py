"""Diagonal Laplace approximation of the posterior of a trained net's weights.

At a minimum, the posterior of the weights is approximated by a Gaussian whose precision is the diagonal of the
curvature of the negative log posterior: with n samples, mean curvature h of their losses and a prior of precision
delta, the variance of a weight is 1 / (n h + delta).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.arguments import NamedArguments
from fl_lightning.engine import FunctionalNet
from fl_lightning.errors import FederationError
from fl_lightning.nets import LossNet
from fl_lightning.parties import LocalData, together
from fl_lightning.wire import State

CurvatureKind = Literal["fisher", "ggn", "hessian"]
#: ``loss(outputs, targets)``: mean loss of a batch.
Loss = Callable[[Tensor, Tensor], Tensor]
#: ``labels(outputs, uniform)``: labels drawn from the net's predictions; shapes (B, C), (B,) and (B,).
Labels = Callable[[Tensor, Tensor], Tensor]


def categorical(outputs: Tensor, uniform: Tensor) -> Tensor:
    """Draw classes from the softmax of logits, by inversion, shape (B,)."""
    cumulative = outputs.softmax(-1).cumsum(-1)
    return (cumulative[..., :-1] <= uniform[..., None]).sum(-1)


def check_curvature(net: nn.Module, kind: str) -> None:
    """Refuse drawn labels for a net that brings its own loss, and second derivatives that PyTorch does not have."""
    if kind == "ggn" and isinstance(net, LossNet):
        raise FederationError(
            "curvature='ggn' draws labels from the net's scores, which is impossible for a net with its own loss: use "
            "fisher or hessian."
        )
    recurrent = [name for name, layer in net.named_modules() if isinstance(layer, nn.RNNBase)]
    if kind == "hessian" and recurrent:
        raise FederationError(
            f"curvature='hessian' differentiates twice, which PyTorch cannot do per sample for a recurrent layer "
            f"({recurrent[0]}): use fisher or ggn."
        )


class DiagonalCurvature(NamedArguments):
    """Diagonal of the curvature of a net's loss with respect to its weights, summed over samples, for stacked models.

    The net is in eval mode, so that samples are independent. There are three kinds:

    - ``fisher``, the empirical Fisher: squares of every sample's own gradient;
    - ``ggn``, the generalised Gauss-Newton matrix (the true Fisher matrix): the same, at labels drawn from the net's
      predictions;
    - ``hessian``: Hutchinson's estimate z * Hz with random signs z. It may be negative.

    Squares of a minibatch's mean gradient would not do: per-sample gradients are needed, and those of a hundred samples
    take as much memory as a hundred nets. A fully connected layer does not need them: the gradient of a sample is the
    outer product of output gradient g and input a, and sum_n (g_n a_n^T)^2 = (g^2)^T (a^2), one matrix product. For all
    other parameters, per-sample gradients are computed by ``torch.func``, one chunk at a time.

    Args:
        net: the network; copied.
        names: the parameters; None means all trainable ones.
        loss: mean loss of a batch; ignored for a net with its own loss (:class:`~fl_lightning.nets.LossNet`).
        kind: the kind of curvature.
        labels: function that draws labels for ``ggn``.
    """

    def __init__(
        self,
        net: nn.Module,
        names: Sequence[str] | None = None,
        loss: Loss = F.cross_entropy,
        kind: CurvatureKind = "fisher",
        labels: Labels = categorical,
    ) -> None:
        check_curvature(net, kind)
        self.net, self.loss, self.kind, self.labels = FunctionalNet(net), loss, kind, labels
        self.names = [name for name, p in net.named_parameters() if p.requires_grad] if names is None else list(names)
        # During a forward pass: inputs and outputs of fully connected layers, and zeros added to the outputs.
        self._seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._zeros: State = {}
        for layer in _linear_layers(self.net.skeleton, self.names):
            self.net.skeleton.get_submodule(layer).register_forward_hook(self._tap(layer))

    def __call__(self, states: State, x: Tensor, y: Tensor, weight: Tensor, noise: Tensor | None = None) -> State:
        """Return the sum over samples, for every stacked model.

        Args:
            states: all entries of the nets, each of shape (K, ...).
            x: inputs, shape (K, B, ...).
            y: targets, shape (K, B, ...).
            weight: 1 for samples, 0 for padding, shape (K, B).
            noise: uniform numbers for ``ggn``, shape (K, B); signs for ``hessian``, shape (K, parameters).

        Returns:
            The curvature of every parameter, shape (K, ...).
        """
        if self.kind == "hessian":
            assert noise is not None
            signs = dict(zip(self.names, self._unflatten(states, noise), strict=True))
            return torch.vmap(self._hutchinson)(states, x, y, weight, signs)
        return self._squares(states, x, y, weight, torch.zeros_like(weight) if noise is None else noise)

    def _squares(self, states: State, x: Tensor, y: Tensor, weight: Tensor, noise: Tensor) -> State:
        taps = self._taps(states, x, y)
        covered = {f"{layer}.{part}" for layer in taps for part in ("weight", "bias")}
        plain = [name for name in self.names if name not in covered]

        def gradient(state: State, zeros: State, x: Tensor, y: Tensor, weight: Tensor, u: Tensor) -> Any:
            def objective(own: State, zeros: State) -> tuple[Tensor, State]:
                loss, inputs = self._loss({**state, **own}, x, y, zeros, u if self.kind == "ggn" else None)
                return weight * loss, inputs

            own = {name: state[name] for name in plain}
            return torch.func.grad(objective, argnums=(0, 1), has_aux=True)(own, zeros)

        samples = torch.vmap(gradient, in_dims=(None, None, 0, 0, 0, 0))
        (own, outputs), inputs = torch.vmap(samples, in_dims=(0, None, 0, 0, 0, 0))(states, taps, x, y, weight, noise)
        # Not in place: the gradient of unused parameters is a single 0, expanded.
        found = {name: g.square().sum(1) for name, g in own.items()}
        for layer, g in outputs.items():
            squares = g.square()
            found[f"{layer}.weight"] = squares.mT @ inputs[layer].square()
            found[f"{layer}.bias"] = squares.sum(1)
        return {name: found[name] for name in self.names}

    def _hutchinson(self, state: State, x: Tensor, y: Tensor, weight: Tensor, signs: State) -> State:
        def one(own: State, x: Tensor, y: Tensor) -> Tensor:
            return self._loss({**state, **own}, x, y, {})[0]

        def total(own: State) -> Tensor:
            return (torch.vmap(one, in_dims=(None, 0, 0))(own, x, y) * weight).sum()

        def along(own: State) -> Tensor:
            gradient = torch.func.grad(total)(own)
            return torch.stack([(gradient[name] * signs[name]).sum() for name in own]).sum()

        product = torch.func.grad(along)({name: state[name] for name in self.names})
        return {name: signs[name] * value for name, value in product.items()}

    def _loss(
        self, state: State, x: Tensor, y: Tensor, zeros: State, uniform: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the loss of a sample, at a drawn label for ``ggn``, and the inputs of tapped layers."""
        output, inputs = self._run(state, self._asked(x[None], y[None]), zeros)
        if isinstance(self.net.skeleton, LossNet):
            return output, inputs
        target = y[None] if uniform is None else self.labels(output.detach(), uniform[None])
        return self.loss(output, target), inputs

    def _asked(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the net's arguments: inputs, or inputs and targets for a net with its own loss."""
        return (x, y) if isinstance(self.net.skeleton, LossNet) else x

    def _run(self, state: State, x: Tensor | tuple[Tensor, Tensor], zeros: State) -> tuple[Tensor, State]:
        """Run the net with zeros added to the outputs of tapped layers; also return the inputs of these layers."""
        self._zeros, self._seen = zeros, {}
        try:
            output, _ = self.net(state, x, {}, training=False)
            return output, {layer: self._seen[layer][0][0][0] for layer in zeros}
        finally:
            self._zeros, self._seen = {}, {}

    def _tap(self, layer: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            self._seen.setdefault(layer, []).append((args[0], output))
            return output + self._zeros[layer] if layer in self._zeros else output

        return hook

    def _taps(self, states: State, x: Tensor, y: Tensor) -> State:
        """Return zeros for the outputs of fully connected layers that are used once, on one vector per sample."""
        self._seen = {}
        with torch.no_grad():
            state = {name: value[0] for name, value in states.items()}
            self.net(state, self._asked(x[0, :1], y[0, :1]), {}, training=False)
        seen, self._seen = self._seen, {}
        once = {layer: calls[0][1] for layer, calls in seen.items() if len(calls) == 1 and calls[0][0].dim() == 2}
        return {layer: torch.zeros_like(output[0]) for layer, output in once.items()}

    def _unflatten(self, states: State, flat: Tensor) -> list[Tensor]:
        shapes = [states[name].shape[1:] for name in self.names]
        parts = torch.split(flat, [shape.numel() for shape in shapes], dim=1)
        return [part.view(len(flat), *shape) for part, shape in zip(parts, shapes, strict=True)]


def client_curvature(
    diagonal: DiagonalCurvature,
    data: Sequence[LocalData],
    states: Sequence[State],
    rngs: Sequence[np.random.Generator],
    dtype: torch.dtype,
    samples: int = 1024,
    chunk: int = 128,
    draws: int = 1,
) -> list[State]:
    """Compute the mean curvature of every client's model over its own training samples, for all clients at once.

    Args:
        diagonal: the curvature.
        data: the clients' samples, not augmented.
        states: the clients' models.
        rngs: the clients' generators, for samples and noise.
        dtype: the nets' precision.
        samples: maximum number of samples of a client, drawn without replacement.
        chunk: number of samples, over all clients, differentiated at once; bounds the memory.
        draws: number of draws of labels or signs for each sample.

    Returns:
        The mean curvature of every client by parameter.
    """
    # Fill a chunk with samples of as few clients as possible: convolutions with a weight per client are slower.
    longest = min(samples, max(len(own) for own in data))
    width = max(1, chunk // longest)
    found: list[State] = []
    for start in range(0, len(data), width):
        group = slice(start, start + width)
        federation, rows = together(data[group])
        stacked = {n: torch.stack([state[n].detach() for state in states[group]]) for n in states[start]}
        chosen = [_choose(federation.train[row], rng, samples) for row, rng in zip(rows, rngs[group], strict=True)]
        index = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        sizes = torch.tensor([len(part) for part in chosen], device=index.device)
        counts = (torch.arange(index.shape[1], device=index.device) < sizes[:, None]).to(dtype)
        total = {name: torch.zeros_like(stacked[name]) for name in diagonal.names}
        for _ in range(draws):
            noise = _noise(diagonal, stacked, rngs[group], sizes, dtype)
            step = max(1, chunk // len(rows))
            for first in range(0, index.shape[1], step):
                part = slice(first, first + step)
                x, y = federation.gather(rows, index[:, part], dtype)
                own = noise[:, part] if diagonal.kind == "ggn" and noise is not None else noise
                with torch.autocast(x.device.type, enabled=False):  # squared gradients need the nets' full precision
                    added = diagonal(stacked, x, y, counts[:, part], own)
                for name, value in added.items():
                    total[name].add_(value)
        found += [{n: v[k] / (draws * len(part)) for n, v in total.items()} for k, part in enumerate(chosen)]
    return found


def posterior_variance(curvature: State, samples: int, prior_precision: float) -> State:
    """Return the variance 1 / (n h + delta) of every weight; negative curvature estimates count as 0.

    Args:
        curvature: mean curvature h of the loss of a sample.
        samples: number of samples n.
        prior_precision: precision delta of the Gaussian prior, greater than 0.
    """
    return {name: 1 / (samples * h.clamp(min=0) + prior_precision) for name, h in curvature.items()}


def _choose(index: Tensor, rng: np.random.Generator, samples: int) -> Tensor:
    order = seeding.permutation(rng, len(index))[:samples]
    return index[order.to(index.device)]


def _noise(
    diagonal: DiagonalCurvature, stacked: State, rngs: Sequence[np.random.Generator], sizes: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Draw noise once, one row per client, from the client's own stream."""
    if diagonal.kind == "fisher":
        return None
    if diagonal.kind == "ggn":
        rows = [seeding.uniform(rng, (size,), dtype) for rng, size in zip(rngs, sizes.tolist(), strict=True)]
    else:
        size = sum(stacked[name][0].numel() for name in diagonal.names)
        rows = [torch.from_numpy(2.0 * rng.integers(0, 2, size) - 1).to(dtype) for rng in rngs]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(sizes.device)


def _linear_layers(net: nn.Module, names: Sequence[str]) -> list[str]:
    """Return plain fully connected layers whose parameters are all in ``names`` and not shared with other layers."""
    owners = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))
    found = []
    for path, module in net.named_modules():
        own = dict(module.named_parameters(recurse=False))
        alone = all(f"{path}.{key}" in names and owners[id(p)] == 1 for key, p in own.items())
        if type(module) is nn.Linear and path and alone:
            found.append(path)
    return found
