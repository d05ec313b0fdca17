"""Conversion of BatchNorm to GroupNorm, after which outputs are independent of the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.errors import FederationError
from fl_lightning.nets import BiLSTM, LeNetBN, MobileNetV2, group_count, group_norm


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (24, 12), (16, 8), (6, 3), (2, 1), (1, 1), (7, 1)])
def test_number_of_groups(channels: int, groups: int) -> None:
    assert group_count(channels) == groups


def test_number_of_groups_by_brute_force() -> None:
    for channels in range(2, 200):
        allowed = [g for g in range(1, 33) if channels % g == 0 and channels // g >= 2]
        assert group_count(channels) == max(allowed)


@pytest.mark.parametrize("kind", [LeNetBN, MobileNetV2])
def test_output_of_a_sample_does_not_depend_on_its_batch(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    shape = (1, 28, 28) if kind is LeNetBN else (3, 16, 16)
    net, x = kind().double(), torch.randn(5, *shape, dtype=torch.float64)
    assert not torch.allclose(net(x)[:2], net(x[:2]))
    turned = group_norm(net)
    torch.testing.assert_close(turned(x)[:2], turned(x[:2]))
    torch.testing.assert_close(turned.eval()(x), turned.train()(x))
    assert not list(turned.named_buffers())
    assert all(p.dtype == torch.float64 for p in turned.parameters())


def test_the_net_itself_stays_and_scales_are_taken_over() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=0.01), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(2, 3, 5, 5))
    net[1].weight.data.normal_()
    net[1].bias.data.normal_().requires_grad_(False)
    net[1].bias.requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    turned = group_norm(net.eval(), groups=2)
    assert isinstance(net[1], nn.BatchNorm2d)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    layer = turned[1]
    assert (layer.num_groups, layer.eps, layer.training) == (2, 0.01, False)
    assert torch.equal(layer.weight, net[1].weight)
    assert torch.equal(layer.bias, net[1].bias)
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (True, False)


def test_values_of_a_layer_by_hand() -> None:
    """Four channels in two groups: each pair of channels has mean 0 and variance 1 in every sample."""
    turned = group_norm(nn.Sequential(nn.BatchNorm1d(4)))
    x = torch.tensor([[1.0, 3.0, 10.0, 30.0], [0.0, 2.0, 5.0, 5.0]])
    out: Tensor = turned(x)
    torch.testing.assert_close(out, torch.tensor([[-1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, 0.0, 0.0]]), atol=1e-4, rtol=0)


def test_any_network_and_layers_that_are_used_twice() -> None:
    assert isinstance(group_norm(nn.BatchNorm2d(4)), nn.GroupNorm)
    assert group_norm(nn.BatchNorm3d(4, affine=False)).affine
    shared = nn.BatchNorm1d(6)
    turned = group_norm(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert turned["a"] is turned["b"][0]
    assert isinstance(group_norm(BiLSTM(10, 4, 2)).norm, nn.LayerNorm)


def test_refusals() -> None:
    with pytest.raises(FederationError, match="groups must be 1 or more"):
        group_norm(LeNetBN(), groups=0)
