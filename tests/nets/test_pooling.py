"""Max pooling for nets that are mapped over clients: PyTorch's, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.nets.pooling import max_pool2


def maps(*shape: int, ties: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator)
    return x.round() if ties else x


def both(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Values and gradients of one net's pooling, by PyTorch and by ours."""
    found = []
    for pool in (lambda x: F.max_pool2d(x, 2), max_pool2):
        leaf = x.clone().requires_grad_()
        value = pool(leaf)
        weights = torch.arange(value.numel(), dtype=value.dtype).view(value.shape)
        found.append((value, torch.autograd.grad((value * weights).sum(), leaf)[0]))
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 6, 8), (2, 5, 7, 6), (1, 3, 5, 9), (4, 16, 6, 6)])
def test_values_and_gradients_are_those_of_pytorch(shape: tuple[int, ...], ties: bool) -> None:
    (value, grad), (our_value, our_grad) = both(maps(*shape, ties=ties))
    assert torch.equal(value, our_value)
    assert torch.equal(grad, our_grad)


@pytest.mark.parametrize("channels", [3, 16])
def test_under_vmap_too(channels: int) -> None:
    x = maps(5, 2, channels, 7, 6, ties=True)

    def loss(x: Tensor) -> Tensor:
        return max_pool2(x).pow(2).sum()

    def reference(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2).pow(2).sum()

    ours = torch.vmap(torch.func.grad_and_value(loss))(x)
    theirs = torch.vmap(torch.func.grad_and_value(reference))(x)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])
