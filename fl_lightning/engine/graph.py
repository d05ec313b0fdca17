"""A captured step made lean: what need not be done at every step, and what need not be done at all, is taken out.

vmap and autograd leave many operations behind that only look at a tensor differently, ask a question whose answer never
changes, or write a gradient that is read once and thrown away. On nets of a few layers these are half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fl_lightning.engine.contract import Product

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


class Lean(NamedTuple):
    """A captured step in two parts.

    ``bind(*state)`` does what depends on the state's memory alone and stays true when the state changes in place: views
    and constants. ``run(*bound, *state, *batch)`` does the rest and returns the step's outputs, the products among them
    as two tensors each.
    """

    bind: Callable[..., Sequence[Tensor]]
    run: Callable[..., Sequence[Tensor]]
    products: frozenset[int]

    def outputs(self, returned: Sequence[Tensor]) -> list[Tensor | Product]:
        """The step's outputs, with products put together."""
        left = iter(returned)
        count = len(returned) - len(self.products)
        return [Product(next(left), next(left)) if i in self.products else next(left) for i in range(count)]


def lean(module: fx.GraphModule, states: int, grads: frozenset[int]) -> Lean:
    """Make a captured graph lean.

    Args:
        module: the operations; changed in place. Its first inputs are the state, the others the batch.
        states: how many inputs are the state.
        grads: which outputs are gradients, that may be left as products.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    pure = not any(_mutates(node) for node in graph.nodes)
    _drop_idle_views(graph)
    if pure:
        _merge_equal(graph)
    graph.eliminate_dead_code()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    products = _leave_products(graph, set(inputs[:states]), grads)
    graph.eliminate_dead_code()
    bind, run = _split(module, inputs, states, pure)
    return Lean(bind, run, products)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _look(node: fx.Node) -> tuple[Any, ...] | None:
    """What tells one view of a piece of memory from another."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype


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


def _leave_products(graph: fx.Graph, state: set[fx.Node], grads: frozenset[int]) -> frozenset[int]:
    """Let gradients that are products be returned as their two sides."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    returned: list[Any] = []
    products = set()
    for i, node in enumerate(output.args[0]):
        sides = _sides(graph, output, node, state) if i in grads else None
        if sides is None:
            returned.append(node)
        else:
            products.add(i)
            returned += sides
    output.args = (returned,)
    return frozenset(products)


def _sides(graph: fx.Graph, output: fx.Node, node: Any, state: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """The two sides of a gradient that is nothing but a product, perhaps transposed, of tensors that stay."""
    chain = [node, *_seen_through(node)] if isinstance(node, fx.Node) else []
    if not chain or chain[-1].target is not aten.bmm.default:
        return None
    product, look = chain[-1], _look(node)
    users_alone = all(len(link.users) == 1 for link in chain)
    # A side that is a view of the state would change while the products are multiplied into it.
    sides_kept = not any((_seen_through(side) or [side])[-1] in state for side in product.all_input_nodes)
    if look is None or not users_alone or not sides_kept:
        return None
    left, right = product.args
    if look == _look(product):
        return left, right  # type: ignore[return-value]
    value = product.meta["val"]
    if look == (tuple(value.mT.shape), tuple(value.mT.stride()), value.storage_offset(), value.dtype):
        with graph.inserting_before(output):
            flipped = [graph.call_function(aten.transpose.int, (side, 1, 2)) for side in (right, left)]
        return flipped[0], flipped[1]
    return None


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
            copies[node] = second.node_copy(node, lambda n: copies[n])
    return fx.GraphModule(module, first).forward, fx.GraphModule(module, second).forward


def _early(graph: fx.Graph, state: set[fx.Node], pure: bool) -> dict[fx.Node, None]:
    """What stays as it is while the state changes in place, in order: views of the state, and constants."""
    early: dict[fx.Node, None] = {}
    for node in graph.nodes:
        looks = node.target in VIEWS and (node.args[0] in state or node.args[0] in early)
        if looks or (pure and node.target in CONSTANTS and node.meta["val"].is_contiguous()):
            early[node] = None
    return early


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node; of a constant like another tensor, one that needs no more than its shape."""
    value = node.meta["val"]
    fill = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.new_zeros.default: 0, aten.new_ones.default: 1}
    if node.target in (*fill, aten.full_like.default, aten.new_full.default):
        number = fill[node.target] if node.target in fill else node.args[-1]
        kwargs = {"dtype": value.dtype, "device": value.device}
        return graph.call_function(aten.full.default, (list(value.shape), number), kwargs)
    return graph.node_copy(node, lambda n: copies[n])
