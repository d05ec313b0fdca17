"""A captured step made lean: what need not be done at every step, and what need not be done at all, is taken out.

vmap and autograd leave many operations behind that only look at a tensor differently, ask a question whose answer never
changes, or write a gradient that is read once and thrown away. On nets of a few layers these are half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fl_lightning.local_optim import Product

aten = torch.ops.aten
#: Operations whose result is another look at their first argument.
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.transpose.int, aten.permute.default,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default, aten._reshape_alias.default,
    aten.as_strided.default,
}  # fmt: skip
#: Operations whose result depends on nothing but shapes, which a capture fixes.
CONSTANTS = {
    aten.scalar_tensor.default, aten.full.default, aten.zeros.default, aten.ones.default, aten.arange.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.eye.default,
}  # fmt: skip

#: Operations that have a function of their own in ``torch``, which costs less to call; their arguments are the same.
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
#: The same for methods of tensors.
METHODS = {aten.view.default: "view", aten._unsafe_view.default: "view", aten.expand.default: "expand"}


class Numbers(NamedTuple):
    """The numbers of a :class:`Product`, whose tensors a step returns: two sides, and the rest."""

    scale: float
    own: float
    rest: tuple[float, ...]


class Lean(NamedTuple):
    """A captured step in two parts.

    ``bind(*state)`` does what depends on the state's memory alone and stays true when the state changes in place: views
    and constants. ``run(*bound, *state, *batch)`` does the rest and returns the step's outputs, the products among them
    as several tensors each.
    """

    bind: Callable[..., Sequence[Tensor]]
    run: Callable[..., Sequence[Tensor]]
    products: dict[int, Numbers]

    def outputs(self, returned: Sequence[Tensor]) -> list[Tensor | Product]:
        """The step's outputs, with products put together."""
        left = iter(returned)
        count = len(returned) - sum(1 + len(numbers.rest) for numbers in self.products.values())
        return [self._product(self.products[i], left) if i in self.products else next(left) for i in range(count)]

    def _product(self, numbers: Numbers, left: Iterator[Tensor]) -> Product:
        sides = next(left), next(left)
        return Product(*sides, numbers.scale, numbers.own, [(factor, next(left)) for factor in numbers.rest])


def lean(module: fx.GraphModule, states: int, changes: Mapping[int, int], written: Iterable[int] = ()) -> Lean:
    """Make a captured graph lean.

    Args:
        module: the operations; changed in place. Its first inputs are the state, the others the batch.
        states: how many inputs are the state.
        changes: which outputs are added to an input, by its number, and may be left as products.
        written: numbers of the inputs that are written to once the step is over, beside those.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    pure = not any(_mutates(node) for node in graph.nodes)
    _drop_idle_views(graph)
    if pure:
        _merge_equal(graph)
    graph.eliminate_dead_code()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    products = _leave_products(graph, inputs, states, changes, {*written, *changes.values()})
    graph.eliminate_dead_code()
    bind, run = _split(module, inputs, states, pure)
    return Lean(bind, run, products)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _look(node: fx.Node) -> tuple[Any, ...] | None:
    """Signature of a view of a piece of memory."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype


def _memory(node: fx.Node) -> int:
    """Which memory a node's tensor lies in; views share it, by whatever operation they were made."""
    return int(node.meta["val"].untyped_storage()._cdata)


def _seen_through(node: fx.Node) -> list[fx.Node]:
    """The nodes that a view looks through, nearest first, down to the tensor that it is a view of."""
    chain = []
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
        chain.append(node)
    return chain


def _drop_idle_views(graph: fx.Graph) -> None:
    """A view that looks like one further up its chain is that one."""
    for node in graph.nodes:
        look = _look(node)
        for earlier in _seen_through(node):
            if look is not None and _look(earlier) == look:
                node.replace_all_uses_with(earlier)
                break


def _merge_equal(graph: fx.Graph) -> None:
    """Compute what is computed twice once; only for graphs in which nothing is written to."""
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
    """An output as a sum of nodes with factors, one of them a product of two sides.

    Args:
        entry: the input to which it is added.
        look: how the output looks; all that is added looks the same.
        kept: whether a node holds what it holds until the step has been applied.
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
        """Add a node to the sum; False if the sum is not of this kind."""
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
        chain = [node, *_seen_through(node)]
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
        """Whether the sum has just one product; of several, as weights that are used often have, nothing is won."""
        return self.product is not None and not self.several

    def returned(self, graph: fx.Graph, output: fx.Node) -> list[fx.Node]:
        """The value that the step returns instead of the sum."""
        assert self.product is not None
        left, right = self.product.args
        with graph.inserting_before(output):
            if self.flipped:
                left, right = (graph.call_function(aten.transpose.int, (side, 1, 2)) for side in (right, left))
            for by in self.scaled_by:
                left = graph.call_function(aten.mul.Tensor, (left, by))
        return [left, right, *self.rest]  # type: ignore[list-item]


def _linear(node: fx.Node) -> list[tuple[Any, float]] | None:
    """The summands of a node, with factors, if it is a sum."""
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
    """A stack of matrices and the stack of numbers that it is multiplied by, if a node does that."""
    if node.target is not aten.mul.Tensor or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    for matrices, numbers in (node.args, node.args[::-1]):
        shape = numbers.meta["val"].shape  # type: ignore[union-attr]
        if len(shape) == 3 and shape[1:] == (1, 1) and matrices.meta["val"].shape == node.meta["val"].shape:  # type: ignore[union-attr]
            return matrices, numbers  # type: ignore[return-value]
    return None


def _leave_products(
    graph: fx.Graph, inputs: list[fx.Node], states: int, changes: Mapping[int, int], written: set[int]
) -> dict[int, Numbers]:
    """Let outputs that are products, with something added, be returned in parts."""
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
    while True:  # a product that is needed otherwise is multiplied out anyway
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
    """The nodes, and all that they are computed from."""
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
    """Two functions: what to do once for a state, and what to do at every step."""
    early = _early(module.graph, set(inputs[:states]), pure)
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
            copies[node] = _called(second.node_copy(node, lambda n: copies[n]))
    return fx.GraphModule(module, first).forward, fx.GraphModule(module, second).forward


def _called(node: fx.Node) -> fx.Node:
    """The node, called in the way that costs least."""
    if node.op == "call_function" and not node.kwargs:
        if node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
        else:
            node.target = CALLS.get(node.target, node.target)
    return node


def _early(graph: fx.Graph, state: set[fx.Node], pure: bool) -> dict[fx.Node, None]:
    """Nodes that stay valid while the state changes in place, in order: views of the state, and constants."""
    early: dict[fx.Node, None] = {}
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        looks = node.target in VIEWS and (node.args[0] in state or node.args[0] in early)
        if pure and _is_fixed(node, fixed):
            fixed.add(node)
        if looks or node in fixed:
            early[node] = None
    return early


def _is_fixed(node: fx.Node, fixed: set[fx.Node]) -> bool:
    """Whether a node is a constant, or computed from constants alone."""
    if node.target in CONSTANTS:
        return bool(node.meta["val"].is_contiguous())
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return bool(node.all_input_nodes) and fixed.issuperset(node.all_input_nodes) and node.op != "output" and not drawn


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node; of a constant like another tensor, one that needs no more than its shape."""
    value = node.meta["val"]
    fill = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.new_zeros.default: 0, aten.new_ones.default: 1}
    if node.target in (*fill, aten.full_like.default, aten.new_full.default):
        number = fill[node.target] if node.target in fill else node.args[-1]
        kwargs = {"dtype": value.dtype, "device": value.device}
        return graph.call_function(aten.full.default, (list(value.shape), number), kwargs)
    return graph.node_copy(node, lambda n: copies[n])
