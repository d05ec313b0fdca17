"""Local optimizers: in-place steps on a dict of named tensors, for one client or for a stack of clients.

The updates are those of ``torch.optim``. They are elementwise except for the step counts, which are tensors with one
number per client, so that clients of a stack may be at different steps. They work in place because a fresh copy of the
weights at every step costs more than the step itself (page faults).
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.arguments import NamedArguments
from fl_lightning.errors import FederationError
from fl_lightning.ranges import NonNegative, ShareBelowOne
from fl_lightning.wire import State


class Product(NamedTuple):
    """Per-client low-rank update, left unevaluated so that it can be fused into the weights.

    It stands for ``scale * left @ right + own * entry + sum(factor * tensor)``, where ``entry`` is the updated entry.
    Only engines create products; SGD multiplies them directly into the weights, which avoids writing and rereading
    gradients.
    """

    left: Tensor
    """Shape (K, m, n)."""
    right: Tensor
    """Shape (K, n, p)."""
    scale: float = 1.0
    own: float = 0.0
    rest: Sequence[tuple[float, Tensor]] = ()

    def add_to(self, entry: Tensor, alpha: float, beta: float = 1.0, own: bool = True) -> None:
        """Compute ``entry = beta * entry + alpha * product`` in place; with ``own=False``, without the ``own`` term."""
        if own:
            beta += alpha * self.own
        entry.baddbmm_(self.left, self.right, beta=beta, alpha=alpha * self.scale)
        for factor, tensor in self.rest:
            entry.add_(tensor, alpha=alpha * factor)

    def dense(self, entry: Tensor) -> Tensor:
        """Evaluate the update of ``entry``."""
        change = torch.bmm(self.left, self.right).mul_(self.scale)
        for factor, tensor in ((self.own, entry), *self.rest):
            if factor:
                change.add_(tensor, alpha=factor)
        return change


#: Gradients by name, some of which may be unevaluated products.
Grads = Mapping[str, Tensor | Product]
#: A learning rate: one for all clients, or a tensor with one per client of a stack.
Rate = float | Tensor


@dataclass(frozen=True)
class LocalOptimizer(NamedArguments, ABC):
    """The update rule of local steps; the learning rate is passed to every step.

    The state of an entry is stored in a dict of tensors under ``<slot>.<entry>``. A subclass is a frozen dataclass
    whose fields are its options, with the names used by ``torch.optim``.
    """

    @abstractmethod
    def fresh(self, name: str, entry: Tensor, clients: tuple[int, ...]) -> State:
        """Return the initial optimizer state of an entry.

        Args:
            name: its name.
            entry: its value.
            clients: ``(K,)`` for a stack of K clients, ``()`` for one client.
        """

    @abstractmethod
    def step(self, lr: Rate, grads: Grads, state: State, memory: State) -> None:
        """Take one step in place; autograd must be off.

        Args:
            lr: learning rate.
            grads: gradients of the entries to step.
            state: the entries.
            memory: their optimizer state, initially from :meth:`fresh`.
        """

    def describe(self) -> dict[str, Any]:
        """Return class path and options as plain values, from which :func:`made` rebuilds the optimizer."""
        return {"class_path": f"{type(self).__module__}.{type(self).__qualname__}", "init_args": asdict(self)}


@dataclass(frozen=True)
class SGD(LocalOptimizer):
    """Stochastic gradient descent like ``torch.optim.SGD``.

    Args:
        momentum: momentum.
        weight_decay: L2 penalty.
        nesterov: whether to use Nesterov momentum, which needs momentum.
    """

    momentum: ShareBelowOne = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise FederationError("nesterov=True needs a momentum greater than 0, such as momentum=0.9.")

    def fresh(self, name: str, entry: Tensor, clients: tuple[int, ...]) -> State:
        """Return a zero velocity."""
        return {f"velocity.{name}": torch.zeros_like(entry)} if self.momentum else {}

    def step(self, lr: Rate, grads: Grads, state: State, memory: State) -> None:
        """Take one step; products are multiplied directly into the weights or velocities."""
        if isinstance(lr, Tensor):  # products support only one rate for all clients
            grads = multiplied_out(grads, state)
        whole = {name: grad for name, grad in grads.items() if isinstance(grad, Tensor)}
        for name, grad in grads.items():
            if isinstance(grad, Product):
                assert isinstance(lr, float | int)
                self._step_product(lr, grad, state[name], memory.get(f"velocity.{name}"))
        if not whole:
            return
        params, steps = [state[name] for name in whole], list(whole.values())
        if self.weight_decay:
            steps = list(torch._foreach_add(steps, params, alpha=self.weight_decay))
        if self.momentum:
            moving = [memory[f"velocity.{name}"] for name in whole]
            torch._foreach_mul_(moving, self.momentum)
            torch._foreach_add_(moving, steps)
            steps = list(torch._foreach_add(steps, moving, alpha=self.momentum)) if self.nesterov else moving
        if isinstance(lr, Tensor):
            torch._foreach_addcmul_(params, steps, [by_client(lr, p).expand_as(p) for p in params], value=-1)
        else:
            torch._foreach_add_(params, steps, alpha=-lr)

    def _step_product(self, lr: float, product: Product, entry: Tensor, velocity: Tensor | None) -> None:
        decay, momentum = self.weight_decay, self.momentum
        if velocity is not None:
            product.add_to(velocity, 1.0, beta=momentum, own=False)
            if decay or product.own:
                velocity.add_(entry, alpha=decay + product.own)
        if velocity is None or self.nesterov:
            product.add_to(entry, -lr, beta=1 - lr * decay)
        if velocity is not None:
            entry.add_(velocity, alpha=-lr * (momentum if self.nesterov else 1.0))


@dataclass(frozen=True)
class Adam(LocalOptimizer):
    """Adam like ``torch.optim.Adam``.

    Args:
        betas: decay of the first and second moments.
        eps: added to the square root of the second moment.
        weight_decay: L2 penalty.
    """

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # a list, if from a configuration file

    def fresh(self, name: str, entry: Tensor, clients: tuple[int, ...]) -> State:
        """Return zero moments and step counts."""
        steps = torch.zeros(clients, dtype=torch.int64, device=entry.device)
        moments = {f"{slot}.{name}": torch.zeros_like(entry) for slot in ("first", "second")}
        return moments | {f"steps.{name}": steps}

    def step(self, lr: Rate, grads: Grads, state: State, memory: State) -> None:
        """Take one step, with bias correction by each client's own step count."""
        whole = multiplied_out(grads, state)
        params, steps = [state[name] for name in whole], list(whole.values())
        steps = self._decayed(lr, params, steps)
        first, second, counts = ([memory[f"{slot}.{n}"] for n in whole] for slot in ("first", "second", "steps"))
        beta1, beta2 = self.betas
        torch._foreach_lerp_(first, steps, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, steps, steps, 1 - beta2)
        torch._foreach_add_(counts, 1)
        taken = torch.stack(counts).double()
        of_first, of_second = 1 - torch.pow(beta1, taken), (1 - torch.pow(beta2, taken)).sqrt()
        roots = list(torch._foreach_sqrt(second))
        torch._foreach_mul_(roots, _by_entry(of_first / of_second, params))
        torch._foreach_add_(roots, _by_entry(of_first * self.eps, params))
        _divide(lr, params, first, roots)

    def _decayed(self, lr: Rate, params: list[Tensor], steps: list[Tensor]) -> list[Tensor]:
        """Return the gradients plus the L2 penalty's."""
        return list(torch._foreach_add(steps, params, alpha=self.weight_decay)) if self.weight_decay else steps


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay like ``torch.optim.AdamW``.

    Args:
        betas: decay of the first and second moments.
        eps: added to the square root of the second moment.
        weight_decay: every step multiplies the weights by ``1 - lr * weight_decay``.
    """

    weight_decay: NonNegative = 0.01

    def _decayed(self, lr: Rate, params: list[Tensor], steps: list[Tensor]) -> list[Tensor]:
        """Decay the weights in place and return the gradients unchanged."""
        if self.weight_decay and isinstance(lr, Tensor):
            torch._foreach_mul_(params, [by_client(1 - lr * self.weight_decay, p) for p in params])
        elif self.weight_decay:
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        return steps


@dataclass(frozen=True)
class RMSprop(LocalOptimizer):
    """RMSprop like ``torch.optim.RMSprop``.

    Args:
        alpha: decay of the second moment.
        eps: added to its square root.
        weight_decay: L2 penalty.
        momentum: momentum.
        centered: whether to use the centred second moment.
    """

    alpha: NonNegative = 0.99
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    momentum: NonNegative = 0.0
    centered: bool = False

    def fresh(self, name: str, entry: Tensor, clients: tuple[int, ...]) -> State:
        """Return a zero second moment, and the slots that the options need."""
        slots = ["second", *["first"] * self.centered, *["velocity"] * bool(self.momentum)]
        return {f"{slot}.{name}": torch.zeros_like(entry) for slot in slots}

    def step(self, lr: Rate, grads: Grads, state: State, memory: State) -> None:
        """Take one step."""
        whole = multiplied_out(grads, state)
        params, steps = [state[name] for name in whole], list(whole.values())
        if self.weight_decay:
            steps = list(torch._foreach_add(steps, params, alpha=self.weight_decay))
        second = roots = [memory[f"second.{name}"] for name in whole]
        torch._foreach_mul_(second, self.alpha)
        torch._foreach_addcmul_(second, steps, steps, 1 - self.alpha)
        if self.centered:
            first = [memory[f"first.{name}"] for name in whole]
            torch._foreach_lerp_(first, steps, 1 - self.alpha)
            roots = list(torch._foreach_addcmul(second, first, first, -1))
        roots = list(torch._foreach_sqrt(roots))
        torch._foreach_add_(roots, self.eps)
        if self.momentum:
            moving = [memory[f"velocity.{name}"] for name in whole]
            torch._foreach_mul_(moving, self.momentum)
            torch._foreach_addcdiv_(moving, steps, roots)
            steps, roots = moving, [torch.ones_like(root) for root in roots]
        _divide(lr, params, steps, roots)


@dataclass(frozen=True)
class Group:
    """Entries with the same optimizer options.

    Args:
        names: names of the entries; a method's own copies of them have names that end in these.
        optimizer: the optimizer of the entries.
        factor: factor of their learning rate.
    """

    names: tuple[str, ...]
    optimizer: LocalOptimizer
    factor: float = 1.0


@dataclass(frozen=True)
class Groups(LocalOptimizer):
    """Groups of entries with their own options and learning rates, like parameter groups of ``torch.optim``.

    Args:
        groups: the groups.
    """

    groups: tuple[Group, ...]
    _found: dict[str, Group] = field(default_factory=dict, init=False, repr=False, compare=False)

    def group(self, name: str) -> Group:
        """Return the group of an entry."""
        if name not in self._found:
            matches = (g for g in self.groups if any(f".{name}".endswith(f".{own}") for own in g.names))
            found = next(matches, None)
            if found is None:
                raise FederationError(f"No group of the local optimizer has {name}: name it in one of them.")
            self._found[name] = found
        return self._found[name]

    def fresh(self, name: str, entry: Tensor, clients: tuple[int, ...]) -> State:
        """Return the initial optimizer state of an entry, from its group."""
        return self.group(name).optimizer.fresh(name, entry, clients)

    def step(self, lr: Rate, grads: Grads, state: State, memory: State) -> None:
        """Take one step in every group."""
        for group in self.groups:
            own = {name: grad for name, grad in grads.items() if self.group(name) is group}
            if own:
                group.optimizer.step(lr * group.factor, own, state, memory)

    def describe(self) -> dict[str, Any]:
        """Return the groups as plain values."""
        groups = [
            {"names": list(g.names), "optimizer": g.optimizer.describe(), "factor": g.factor} for g in self.groups
        ]
        return {"class_path": f"{type(self).__module__}.{type(self).__qualname__}", "init_args": {"groups": groups}}


OPTIMIZERS: dict[str, type[LocalOptimizer]] = {kind.__name__: kind for kind in (SGD, Adam, AdamW, RMSprop)}


def made(
    optimizer: LocalOptimizer | Mapping[str, Any] | str, momentum: float = 0.0, weight_decay: float = 0.0
) -> LocalOptimizer:
    """Build the optimizer that an option describes.

    Args:
        optimizer: an optimizer, its class path and arguments, or the name of its class.
        momentum: the option of that name, for an optimizer given by name without arguments; 0 if not given.
        weight_decay: likewise.

    Example:
        >>> made("AdamW", weight_decay=0.1)
        AdamW(betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1)
    """
    given = {k: v for k, v in (("momentum", momentum), ("weight_decay", weight_decay)) if v}
    if isinstance(optimizer, str):
        return _of_class(optimizer, given)
    if isinstance(optimizer, Mapping):
        if not isinstance(optimizer.get("class_path"), str):
            raise FederationError(f"A local optimizer is described by class_path and init_args, not by {optimizer!r}.")
        optimizer = _of_class(optimizer["class_path"], dict(optimizer.get("init_args") or {}))
    if not isinstance(optimizer, LocalOptimizer):
        raise FederationError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)}, as a name or an object of fl_lightning.local_optim, "
            f"not {optimizer!r}."
        )
    for name, value in given.items():
        if getattr(optimizer, name, 0.0) != value:
            raise FederationError(
                f"{name}={value} and optimizer={optimizer} contradict each other: give {name} to one of them."
            )
    return optimizer


def _of_class(name: str, options: dict[str, Any]) -> LocalOptimizer:
    kind: Any = OPTIMIZERS.get(name)
    if kind is None:
        try:
            kind = pkgutil.resolve_name(name) if "." in name else None
        except (ImportError, AttributeError, ValueError):
            kind = None
    if not (isinstance(kind, type) and issubclass(kind, LocalOptimizer)):
        raise FederationError(f"There is no local optimizer {name!r}: choose {', '.join(OPTIMIZERS)}.")
    known = [option.name for option in fields(kind) if option.init]
    if strange := sorted(options.keys() - set(known)):
        raise FederationError(f"{kind.__name__} has no option {strange[0]}: it has {', '.join(known)}.")
    if issubclass(kind, Groups):
        groups = [g if isinstance(g, Group) else Group(**{**g, "names": tuple(g["names"])}) for g in options["groups"]]
        return kind(tuple(Group(g.names, made(g.optimizer), g.factor) for g in groups))
    return kind(**options)


def multiplied_out(grads: Grads, state: State) -> State:
    """Return gradients as tensors, with products evaluated."""
    return {n: g.dense(state[n]) if isinstance(g, Product) else g for n, g in grads.items()}


def by_client(values: Tensor, entry: Tensor) -> Tensor:
    """Reshape one number per client so that it broadcasts over a stack's entry, in the entry's precision."""
    return values.view(values.shape + (1,) * (entry.dim() - values.dim())).to(entry.dtype)


def _by_entry(values: Tensor, entries: Sequence[Tensor]) -> list[Tensor]:
    """Reshape each row of ``values`` for its entry."""
    return [by_client(row, entry) for row, entry in zip(values.unbind(), entries, strict=True)]


def _divide(lr: Rate, params: list[Tensor], steps: list[Tensor], by: list[Tensor]) -> None:
    """Compute ``params -= lr * steps / by`` in place; ``by`` may be overwritten."""
    if isinstance(lr, Tensor):
        torch._foreach_div_(by, [by_client(lr, p) for p in params])
        lr = 1.0
    torch._foreach_addcdiv_(params, steps, by, -lr)
