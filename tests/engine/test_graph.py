"""Optimised captured steps compute the same as the original ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fl_lightning.engine.graph import OptimizedStep, optimize
from fl_lightning.local_optim import Product


def optimized(
    step: Callable[..., list[Tensor]], *inputs: Tensor, states: int, changes: dict[int, int]
) -> OptimizedStep:
    return optimize(make_fx(step, tracing_mode="fake")(*inputs), states, changes)


def run(made: OptimizedStep, inputs: list[Tensor], states: int) -> list[Any]:
    bound = made.bind(*inputs[:states])
    return made.outputs(made.run(*bound, *inputs))


def operations(function: Callable[..., Any]) -> int:
    return sum(node.op == "call_function" for node in function.__self__.graph.nodes)  # type: ignore[attr-defined]


def test_products_stay_unevaluated_even_if_transposed() -> None:
    w, x, g = torch.randn(3, 4, 5), torch.randn(3, 2, 5), torch.randn(3, 2, 4)

    def step(w: Tensor, x: Tensor, g: Tensor) -> list[Tensor]:
        straight = torch.bmm(g.transpose(1, 2), x)
        turned = torch.bmm(x.transpose(1, 2), g).transpose(1, 2)
        return [torch.bmm(x, w.transpose(1, 2)).sum(), straight, turned]

    made = optimized(step, w, x, g, states=1, changes={1: 0, 2: 0})
    assert made.products.keys() == {1, 2}
    loss, *products = run(made, [w, x, g], 1)
    torch.testing.assert_close([loss, *(torch.bmm(p.left, p.right) for p in products)], step(w, x, g))
    assert all(isinstance(p, Product) for p in products)


def test_a_product_with_the_state_itself_is_evaluated() -> None:
    """Else one update would read what another has just written."""
    w, x = torch.randn(3, 4, 5), torch.randn(3, 2, 4)

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        return [x.sum(), torch.bmm(x, w), torch.bmm(x, 2 * w)]

    made = optimized(step, w, x, states=1, changes={1: 0, 2: 0})
    assert made.products.keys() == {2}  # a copy of the state may be used


@pytest.mark.parametrize(
    "part",
    [
        lambda w: w.chunk(2, 1)[0],
        lambda w: w.split([2, 2], 1)[1],
        lambda w: w.unbind(1)[0].unsqueeze(1).expand(3, 2, 5),
        lambda w: w.unsafe_chunk(2, 1)[0],
        lambda w: w.unflatten(1, (2, 2))[:, 0],
        lambda w: w.diagonal(0, 1, 2)[:, :2, None].expand(3, 2, 5),
        lambda w: w.unfold(1, 2, 2)[:, 0].mT,
    ],
)
def test_a_product_with_a_view_of_the_state_is_evaluated(part: Callable[[Tensor], Tensor]) -> None:
    """However it was taken out: it changes with the state."""
    w, v, x = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.randn(3, 4, 2)

    def step(w: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        return [x.sum(), torch.bmm(x, part(w)), w, torch.bmm(x, 2 * part(w))]

    assert optimized(step, w, v, x, states=2, changes={1: 1, 2: 0, 3: 1}).products.keys() == {3}


def test_a_product_with_other_uses_is_evaluated() -> None:
    w, x = torch.randn(3, 4, 5), torch.randn(3, 2, 4)

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        product = torch.bmm(x, 2 * w)
        return [product.sum(), product, product.reshape(3, 10)]

    assert optimized(step, w, x, states=1, changes={1: 0, 2: 0}).products == {}


def pieces() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 4, 5, dtype=torch.float64) for _ in range(3)] + [
        torch.randn(3, 2, 4, dtype=torch.float64),
        torch.randn(3, 2, 5, dtype=torch.float64),
        torch.randn(3, 1, 1, dtype=torch.float64),
    ]


def sums(w: Tensor, anchor: Tensor, total: Tensor, g: Tensor, x: Tensor, a: Tensor) -> list[Tensor]:
    product = torch.bmm(g.transpose(1, 2), x)
    pull = 0.3 * (w - anchor) - anchor / 4
    return [g.sum(), -(product + pull), product * 2 + 5 * w, a * product]


@pytest.mark.parametrize("output", [1, 2, 3])
def test_summands_of_a_product_stay_unevaluated(output: int) -> None:
    inputs = pieces()
    made = optimized(lambda *given: [sums(*given)[0], sums(*given)[output]], *inputs, states=3, changes={1: 0})
    _, product = run(made, inputs, 3)
    assert isinstance(product, Product)
    w, expected = inputs[0].clone(), sums(*inputs)[output]
    product.add_to(w, -0.1, beta=0.9)
    torch.testing.assert_close(w, 0.9 * inputs[0] - 0.1 * expected)
    velocity = torch.ones_like(w)
    product.add_to(velocity, 1.0, beta=0.5, own=False)
    torch.testing.assert_close(velocity, 0.5 + expected - product.own * inputs[0])


def test_a_sum_of_products_is_evaluated() -> None:
    inputs = pieces()

    def step(w: Tensor, anchor: Tensor, total: Tensor, g: Tensor, x: Tensor, a: Tensor) -> list[Tensor]:
        return [g.sum(), torch.bmm(g.transpose(1, 2), x) + torch.bmm(g.transpose(1, 2), 2 * x)]

    assert optimized(step, *inputs, states=3, changes={1: 0}).products == {}


def test_a_product_may_change_two_entries_but_no_sum_reads_a_changed_entry() -> None:
    inputs = pieces()

    def twice(w: Tensor, anchor: Tensor, total: Tensor, g: Tensor, x: Tensor, a: Tensor) -> list[Tensor]:
        product = torch.bmm(g.transpose(1, 2), x)
        return [g.sum(), product + anchor, product]

    made = optimized(twice, *inputs, states=3, changes={1: 0, 2: 2})
    assert made.products.keys() == {1, 2}
    _, first, second = run(made, inputs, 3)
    torch.testing.assert_close(torch.bmm(second.left, second.right), twice(*inputs)[2])
    assert [factor for factor, _ in first.rest] == [1.0]

    # The total is written to: it cannot be what is added to w later, and then the product is needed whole anyway.
    def crossed(w: Tensor, anchor: Tensor, total: Tensor, g: Tensor, x: Tensor, a: Tensor) -> list[Tensor]:
        product = torch.bmm(g.transpose(1, 2), x)
        return [g.sum(), product + total, product]

    assert optimized(crossed, *inputs, states=3, changes={1: 0, 2: 2}).products == {}
    # So it is with an entry that is replaced.
    traced = make_fx(twice, tracing_mode="fake")(*inputs)
    assert optimize(traced, 3, {1: 0, 2: 2}, written=[1]).products == {}


def test_views_of_the_state_and_constants_are_computed_once_and_stay_valid() -> None:
    w, x = torch.randn(3, 4, 5), torch.randn(3, 2, 5)

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        same = w.transpose(1, 2).transpose(1, 2).expand(3, 4, 5).view(3, 4, 5)
        return [torch.bmm(x, same.transpose(1, 2)) + torch.zeros_like(x).sum() + torch.zeros_like(x).sum()]

    made = optimized(step, w, x, states=1, changes={})
    assert operations(made.bind) == 3  # one transpose, one constant and its sum
    assert operations(made.run) == 3  # the product, two additions
    bound = made.bind(w)
    w.mul_(2)
    torch.testing.assert_close(made.run(*bound, w, x)[0], step(w, x)[0])


def test_random_operations_run_at_every_step() -> None:
    x = torch.randn(3)
    made = optimized(lambda x: [x + torch.bernoulli(torch.full_like(x, 0.5))], x, states=0, changes={})
    assert (operations(made.bind), operations(made.run)) == (1, 2)


@pytest.mark.parametrize("order", ["before", "after"])
def test_mutated_graphs_are_not_merged(order: str) -> None:
    x = torch.randn(3)

    def step(x: Tensor) -> list[Tensor]:
        one, other = torch.zeros_like(x), torch.zeros_like(x)
        if order == "before":
            one.add_(x)
        total = other + 1
        if order == "after":
            one.add_(x)
        return [one, total]

    made = optimized(step, x, states=0, changes={})
    for _ in range(2):
        torch.testing.assert_close(run(made, [x], 0), step(x))


def test_operations_are_replaced_by_cheaper_equivalent_calls() -> None:
    """Also those whose first argument is a number."""

    def step(x: Tensor) -> list[Tensor]:
        scaled = torch.ops.aten.mul.Tensor(2.0, x).unsqueeze(0).expand(2, -1, -1)
        return [scaled.transpose(1, 2).sum((0, 1)), scaled.mean([1, 2], True).view(-1), torch.bmm(scaled, scaled.mT)]

    x = torch.rand(3, 4, dtype=torch.float64)
    made = optimized(step, x, states=0, changes={})
    torch.testing.assert_close(made.run(*made.bind(), x), step(x))
    assert "torch.bmm(" in made.run.__self__.code  # type: ignore[attr-defined]
