"""Optimisation of a captured step: hoist what is constant, and remove redundant operations.

vmap and autograd leave many operations behind: idle views, constants computed at every step, and gradients that are
written to memory only to be read once. On nets of a few layers these take half of the time.

For a linear layer ``x @ w`` with squared loss, a stack of two clients and one gradient step, the trace is::

    def forward(w, x, y):
        expand = aten.expand(x, [2, 4, 3]);  view = aten.view(expand, [2, 4, 3])
        expand_1 = aten.expand(w, [2, 3, 2]);  view_1 = aten.view(expand_1, [2, 3, 2])
        bmm = aten.bmm(view, view_1);  out = aten._unsafe_view(bmm, [2, 4, 2])
        view_2 = aten.view(out, [2, 8]);  view_3 = aten.view(y, [2, 8])
        mean = aten.mean(aten.mse_loss(view_2, view_3, 0), [-1])
        ones_like = aten.ones_like(mean);  view_4 = aten.view(ones_like, [2, 1, 1])
        mul = aten.mul(aten.sub(out, y), 0.25);  mul_1 = aten.mul(mul, view_4)
        transpose = aten.transpose(x, 1, 2);  expand_2 = aten.expand(transpose, [2, 3, 4])
        view_5 = aten.view(expand_2, [2, 3, 4])
        expand_3 = aten.expand(mul_1, [2, 4, 2]);  view_6 = aten.view(expand_3, [2, 4, 2])
        bmm_1 = aten.bmm(view_5, view_6);  grad = aten._unsafe_view(bmm_1, [2, 3, 2])
        return [mean, grad]

and becomes::

    def bind(w):  # once per state
        return [torch.full([2], 1.0).view([2, 1, 1])]

    def run(view_4, w, x, y):  # every step
        out = torch.bmm(x, w)
        view_2 = out.view([2, 8]);  view_3 = y.view([2, 8])
        mean = torch.mean(aten.mse_loss(view_2, view_3, 0), [-1])
        mul = torch.mul(torch.sub(out, y), 0.25);  mul_1 = torch.mul(mul, view_4)
        return [mean, torch.transpose(x, 1, 2), mul_1]  # the gradient's factors, for SGD to multiply
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fl_lightning.local_optim import Product

aten = torch.ops.aten
#: Operations that return a view of their first argument.
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.transpose.int, aten.permute.default,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default, aten._reshape_alias.default,
    aten.as_strided.default,
}  # fmt: skip
#: Operations whose result depends on shapes only, which are fixed in a capture.
CONSTANTS = {
    aten.scalar_tensor.default, aten.full.default, aten.zeros.default, aten.ones.default, aten.arange.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.eye.default,
}  # fmt: skip

#: Operations with an equivalent function in ``torch`` that takes the same arguments and is cheaper to call.
CALLS = {
    operation: getattr(torch, name)
    for name in (
        "_log_softmax", "abs", "bmm", "exp", "gather", "log", "neg", "relu", "rsqrt", "scatter_add", "sigmoid", "sqrt",
        "tanh", "unsqueeze",
    )
    for operation in [getattr(aten, name).default]
} | {
    aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub, aten.mul.Tensor: torch.mul, aten.div.Tensor: torch.div,
    aten.mean.dim: torch.mean, aten.sum.dim_IntList: torch.sum, aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
}  # fmt: skip
#: Likewise for methods of tensors.
METHODS = {aten.view.default: "view", aten._unsafe_view.default: "view", aten.expand.default: "expand"}


class Numbers(NamedTuple):
    """The numbers of a :class:`Product` whose tensors are outputs of the step: two factors, then the summands."""

    scale: float
    own: float
    rest: tuple[float, ...]


class OptimizedStep(NamedTuple):
    """A captured step in two parts.

    ``bind(*state)`` computes values that stay valid while the state changes in place: views of the state, and
    constants. ``run(*bound, *state, *batch)`` computes the rest and returns the step's outputs, where each product
    takes several tensors.
    """

    bind: Callable[..., Sequence[Tensor]]
    run: Callable[..., Sequence[Tensor]]
    products: dict[int, Numbers]

    def outputs(self, returned: Sequence[Tensor]) -> list[Tensor | Product]:
        """Return the step's outputs, with products reassembled."""
        left = iter(returned)
        count = len(returned) - sum(1 + len(numbers.rest) for numbers in self.products.values())
        return [self._product(self.products[i], left) if i in self.products else next(left) for i in range(count)]

    def _product(self, numbers: Numbers, left: Iterator[Tensor]) -> Product:
        sides = next(left), next(left)
        return Product(*sides, numbers.scale, numbers.own, [(factor, next(left)) for factor in numbers.rest])


def optimize(
    module: fx.GraphModule, states: int, changes: Mapping[int, int], written: Iterable[int] = ()
) -> OptimizedStep:
    """Optimise a captured graph.

    Args:
        module: the operations; changed in place. Its first inputs are the state, the others the batch.
        states: number of inputs that belong to the state.
        changes: outputs that are added to an input, by its number, and may be left as products.
        written: numbers of further inputs that are written to after the step.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    pure = not any(_mutates(node) for node in graph.nodes)
    _drop_idle_views(graph)
    if pure:
        _merge_equal(graph)
    graph.eliminate_dead_code()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    products = _split_off_products(graph, inputs, states, changes, {*written, *changes.values()})
    graph.eliminate_dead_code()
    bind, run = _split(module, inputs, states, pure)
    return OptimizedStep(bind, run, products)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _look(node: fx.Node) -> tuple[Any, ...] | None:
    """Return shape, strides, offset and dtype of a node's tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype


def _memory(node: fx.Node) -> int:
    """Identify the storage of a node's tensor; views share it, whatever operation made them."""
    return int(node.meta["val"].untyped_storage()._cdata)


def _view_chain(node: fx.Node) -> list[fx.Node]:
    """Return the nodes behind a view, nearest first, down to the tensor that is not a view."""
    chain = []
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
        chain.append(node)
    return chain


def _drop_idle_views(graph: fx.Graph) -> None:
    """Replace a view by the first node of its chain that has the same layout."""
    for node in graph.nodes:
        look = _look(node)
        for earlier in _view_chain(node):
            if look is not None and _look(earlier) == look:
                node.replace_all_uses_with(earlier)
                break


def _merge_equal(graph: fx.Graph) -> None:
    """Eliminate common subexpressions; only valid for graphs without mutation."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        if key in known:
            node.replace_all_uses_with(known[key])
            graph.erase_node(node)
        else:
            known[key] = node


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    return (type(value), value)


class _Sum:
    """An output as a weighted sum of nodes, one of them a matrix product.

    Args:
        entry: the input to which the output is added.
        look: layout of the output; all summands have the same shape.
        kept: whether a node's memory stays unchanged until the step has been applied.
    """

    def __init__(self, entry: fx.Node, look: Any, kept: Callable[[fx.Node], bool]) -> None:
        self.entry, self.look, self.kept = entry, look, kept
        self.product: fx.Node | None = None
        self.several = False
        self.flipped = False
        self.scaled_by: list[fx.Node] = []
        self.scale = self.own = 0.0
        self.rest: dict[fx.Node, float] = {}

    def take(self, node: Any, factor: float) -> bool:
        """Add a node to the sum; return False if the sum is not of this form."""
        if not isinstance(node, fx.Node) or _look(node) is None or _look(node)[0] != self.look[0]:  # type: ignore[index]
            return False
        if node is self.entry:
            self.own += factor
            return True
        parts = _linear(node)
        if parts is not None:
            return all(self.take(part, factor * by) for part, by in parts)
        if self._take_product(node, factor):
            return True
        if not self.kept(node):
            return False
        self.rest[node] = self.rest.get(node, 0.0) + factor
        return True

    def _take_product(self, node: fx.Node, factor: float) -> bool:
        scaled_by: list[fx.Node] = []
        while (scaled := _scaled(node)) is not None:
            node, by = scaled
            scaled_by.append(by)
        chain = [node, *_view_chain(node)]
        product = chain[-1]
        if product.target is not aten.bmm.default:
            return False
        if self.product is not None:
            self.several = True
            return False
        look, value = _look(node), product.meta["val"]
        flipped = look != _look(product)
        if flipped and look != (tuple(value.mT.shape), tuple(value.mT.stride()), value.storage_offset(), value.dtype):
            return False
        if not all(self.kept(side) for side in product.all_input_nodes):
            return False
        self.product, self.scale, self.flipped, self.scaled_by = product, factor, flipped, scaled_by
        return True

    @property
    def is_product(self) -> bool:
        """Whether the sum has exactly one product; several, as with tied weights, save nothing unevaluated."""
        return self.product is not None and not self.several

    def returned(self, graph: fx.Graph, output: fx.Node) -> list[fx.Node]:
        """Return the nodes that the step returns instead of the sum."""
        assert self.product is not None
        left, right = self.product.args
        with graph.inserting_before(output):
            if self.flipped:
                left, right = (graph.call_function(aten.transpose.int, (side, 1, 2)) for side in (right, left))
            for by in self.scaled_by:
                left = graph.call_function(aten.mul.Tensor, (left, by))
        return [left, right, *self.rest]  # type: ignore[list-item]


def _linear(node: fx.Node) -> list[tuple[Any, float]] | None:
    """Return the summands of a node with their factors, if it is a sum."""
    args, alpha = node.args, node.kwargs.get("alpha", 1)
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and isinstance(alpha, int | float):
        sign = 1.0 if node.target is aten.add.Tensor else -1.0
        return [(args[0], 1.0), (args[1], sign * alpha)]
    if node.target is aten.mul.Tensor and isinstance(args[1], int | float):
        return [(args[0], float(args[1]))]
    if node.target is aten.div.Tensor and isinstance(args[1], int | float):
        return [(args[0], 1.0 / args[1])]
    if node.target is aten.neg.default:
        return [(args[0], -1.0)]
    return None


def _scaled(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return matrices and scalars if a node multiplies a stack of matrices by a stack of scalars."""
    if node.target is not aten.mul.Tensor or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    for matrices, numbers in (node.args, node.args[::-1]):
        shape = numbers.meta["val"].shape  # type: ignore[union-attr]
        if len(shape) == 3 and shape[1:] == (1, 1) and matrices.meta["val"].shape == node.meta["val"].shape:  # type: ignore[union-attr]
            return matrices, numbers  # type: ignore[return-value]
    return None


def _split_off_products(
    graph: fx.Graph, inputs: list[fx.Node], states: int, changes: Mapping[int, int], written: set[int]
) -> dict[int, Numbers]:
    """Return unevaluated the outputs that are a product plus other summands."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results: Sequence[Any] = output.args[0]
    will_change = {_memory(inputs[i]) for i in written}

    def kept(node: fx.Node) -> bool:
        return _memory(node) not in will_change

    sums: dict[int, _Sum] = {}
    for i, number in changes.items():
        found = _Sum(inputs[number], _look(results[i]), kept) if isinstance(results[i], fx.Node) else None
        if found is not None and found.look is not None and found.take(results[i], 1.0) and found.is_product:
            sums[i] = found
    while True:  # a product that is used elsewhere must be evaluated anyway
        alive = _alive([node for i, node in enumerate(results) if i not in sums])
        for found in sums.values():
            assert found.product is not None
            alive |= _alive([*found.product.all_input_nodes, *found.scaled_by, *found.rest])
        needed = {i for i, found in sums.items() if found.product in alive}
        if not needed:
            break
        sums = {i: found for i, found in sums.items() if i not in needed}
    returned: list[Any] = []
    for i, node in enumerate(results):
        returned += sums[i].returned(graph, output) if i in sums else [node]
    output.args = (returned,)
    return {i: Numbers(found.scale, found.own, tuple(found.rest.values())) for i, found in sums.items()}


def _alive(nodes: Iterable[Any]) -> set[fx.Node]:
    """Return the nodes and all their transitive inputs."""
    alive: set[fx.Node] = set()
    left = [node for node in nodes if isinstance(node, fx.Node)]
    while left:
        node = left.pop()
        if node not in alive:
            alive.add(node)
            left += node.all_input_nodes
    return alive


def _split(
    module: fx.GraphModule, inputs: list[fx.Node], states: int, pure: bool
) -> tuple[Callable[..., Sequence[Tensor]], Callable[..., Sequence[Tensor]]]:
    """Split a graph into a function that runs once per state and one that runs at every step."""
    early = _hoistable(module.graph, set(inputs[:states]), pure)
    first = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: first.placeholder(node.name) for node in inputs[:states]}
    for node in early:
        copies[node] = _copy(first, node, copies)
    needed = [node for node in early if any(user not in early for user in node.users)]
    first.output([copies[node] for node in needed])
    second = fx.Graph()
    copies = {node: second.placeholder(node.name) for node in [*needed, *inputs]}
    for node in module.graph.nodes:
        if node.op != "placeholder" and node not in early:
            copies[node] = _cheaper_call(second.node_copy(node, lambda n: copies[n]))
    return fx.GraphModule(module, first).forward, fx.GraphModule(module, second).forward


def _cheaper_call(node: fx.Node) -> fx.Node:
    """Replace a node's target by an equivalent one that is cheaper to call."""
    if node.op == "call_function" and not node.kwargs:
        if node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
        else:
            node.target = CALLS.get(node.target, node.target)
    return node


def _hoistable(graph: fx.Graph, state: set[fx.Node], pure: bool) -> dict[fx.Node, None]:
    """Return nodes that stay valid while the state changes in place, in order: views of the state, and constants."""
    early: dict[fx.Node, None] = {}
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        looks = node.target in VIEWS and (node.args[0] in state or node.args[0] in early)
        if pure and _is_constant(node, fixed):
            fixed.add(node)
        if looks or node in fixed:
            early[node] = None
    return early


def _is_constant(node: fx.Node, fixed: set[fx.Node]) -> bool:
    """Return whether a node is a constant, or computed from constants alone."""
    if node.target in CONSTANTS:
        return bool(node.meta["val"].is_contiguous())
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return bool(node.all_input_nodes) and fixed.issuperset(node.all_input_nodes) and node.op != "output" and not drawn


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node; ``zeros_like`` and similar nodes become ``full``, which needs only the shape."""
    value = node.meta["val"]
    fill = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.new_zeros.default: 0, aten.new_ones.default: 1}
    if node.target in (*fill, aten.full_like.default, aten.new_full.default):
        number = fill[node.target] if node.target in fill else node.args[-1]
        kwargs = {"dtype": value.dtype, "device": value.device}
        return graph.call_function(aten.full.default, (list(value.shape), number), kwargs)
    return graph.node_copy(node, lambda n: copies[n])
