"""Captured steps are made lean without changing what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fl_lightning.engine.contract import Product
from fl_lightning.engine.graph import Lean, lean


def made_lean(step: Callable[..., list[Tensor]], *inputs: Tensor, states: int, grads: set[int]) -> Lean:
    return lean(make_fx(step, tracing_mode="fake")(*inputs), states, frozenset(grads))


def run(made: Lean, inputs: list[Tensor], states: int) -> list[Any]:
    bound = made.bind(*inputs[:states])
    return made.outputs(made.run(*bound, *inputs))


def operations(function: Callable[..., Any]) -> int:
    return sum(node.op == "call_function" for node in function.__self__.graph.nodes)  # type: ignore[attr-defined]


def test_a_product_is_left_to_the_update_also_when_transposed() -> None:
    w, x, g = torch.randn(3, 4, 5), torch.randn(3, 2, 5), torch.randn(3, 2, 4)

    def step(w: Tensor, x: Tensor, g: Tensor) -> list[Tensor]:
        straight = torch.bmm(g.transpose(1, 2), x)
        turned = torch.bmm(x.transpose(1, 2), g).transpose(1, 2)
        return [torch.bmm(x, w.transpose(1, 2)).sum(), straight, turned]

    made = made_lean(step, w, x, g, states=1, grads={1, 2})
    assert made.products == {1, 2}
    loss, *products = run(made, [w, x, g], 1)
    torch.testing.assert_close([loss, *(torch.bmm(*p) for p in products)], step(w, x, g))
    assert all(isinstance(p, Product) for p in products)


def test_a_product_with_the_state_itself_is_multiplied_out() -> None:
    """Else one update would read what another has just written."""
    w, x = torch.randn(3, 4, 5), torch.randn(3, 2, 4)

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        return [x.sum(), torch.bmm(x, w), torch.bmm(x, 2 * w)]

    made = made_lean(step, w, x, states=1, grads={1, 2})
    assert made.products == {2}  # a copy of the state may be used


def test_a_product_that_is_used_otherwise_is_multiplied_out() -> None:
    w, x = torch.randn(3, 4, 5), torch.randn(3, 2, 4)

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        product = torch.bmm(x, 2 * w)
        return [product.sum(), product, product.reshape(3, 10)]

    assert made_lean(step, w, x, states=1, grads={1, 2}).products == frozenset()


def test_views_of_the_state_and_constants_are_made_once_and_follow_its_changes() -> None:
    w, x = torch.randn(3, 4, 5), torch.randn(3, 2, 5)

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        same = w.transpose(1, 2).transpose(1, 2).expand(3, 4, 5).view(3, 4, 5)
        return [torch.bmm(x, same.transpose(1, 2)) + torch.zeros_like(x).sum() + torch.zeros_like(x).sum()]

    made = made_lean(step, w, x, states=1, grads=set())
    assert operations(made.bind) == 2  # one transpose, one constant
    assert operations(made.run) == 4  # the product, one sum, two additions
    bound = made.bind(w)
    w.mul_(2)
    torch.testing.assert_close(made.run(*bound, w, x)[0], step(w, x)[0])


@pytest.mark.parametrize("order", ["before", "after"])
def test_what_is_written_to_is_not_merged(order: str) -> None:
    x = torch.randn(3)

    def step(x: Tensor) -> list[Tensor]:
        one, other = torch.zeros_like(x), torch.zeros_like(x)
        if order == "before":
            one.add_(x)
        total = other + 1
        if order == "after":
            one.add_(x)
        return [one, total]

    made = made_lean(step, x, states=0, grads=set())
    for _ in range(2):
        torch.testing.assert_close(run(made, [x], 0), step(x))
