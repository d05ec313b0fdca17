"""Factorised layers: values, initialisation, and conversion of nets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.distributions import expected_active, prior_mean
from fl_lightning.errors import FederationError
from fl_lightning.nets import (
    MLP,
    CNNCifar,
    CNNFashion,
    FactorizedConv2d,
    FactorizedLayer,
    FactorizedLinear,
    LeNet5,
    LeNet5Cifar,
    factorize,
    factorized_layers,
)


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def filled(layer: FactorizedLayer) -> FactorizedLayer:
    """Double precision, with strengths, mask and bias that matter."""
    torch.manual_seed(1)
    layer = layer.double()
    for value in (layer.r, layer.mask, layer.bias):
        if value is not None:
            value.data.uniform_(-1, 1)
    return layer


CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"padding": 2, "stride": 2},
    {"padding": "same", "dilation": 2},
    {"kernel_size": (3, 2), "padding": (1, 0), "stride": (1, 2)},
    {"groups": 2},
]


@pytest.mark.parametrize("bias", [False, True])
def test_linear_computes_with_its_weight(bias: bool) -> None:
    layer = filled(FactorizedLinear(7, 5, 4, bias))
    x = torch.randn(3, 2, 7, dtype=torch.float64)
    weight = layer.wa @ torch.diag(layer.r * layer.mask) @ layer.wb
    torch.testing.assert_close(layer.weight, weight)
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias))


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_computes_with_its_kernel(options: dict[str, Any], bias: bool) -> None:
    settings = {"kernel_size": 3, **options}
    layer = filled(FactorizedConv2d(4, 6, factors=5, bias=bias, **settings))
    dense = nn.Conv2d(4, 6, bias=bias, dtype=torch.float64, **settings)
    weight = (layer.wa @ torch.diag(layer.r * layer.mask) @ layer.wb.flatten(1)).view(dense.weight.shape)
    dense.weight.data.copy_(weight)
    if bias:
        dense.bias.data.copy_(layer.bias.data)  # type: ignore[union-attr]
    torch.testing.assert_close(layer.weight, weight)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x))


@pytest.mark.parametrize("make", [lambda: FactorizedLinear(7, 5, 6), lambda: FactorizedConv2d(3, 5, 3, 6)])
def test_order_of_factors_does_not_matter(make: Any) -> None:
    layer = filled(make())
    other, order = copy.deepcopy(layer), torch.randperm(6)
    other.wa.data, other.wb.data = layer.wa.data[:, order], layer.wb.data[order]
    other.r.data, other.mask.data = layer.r.data[order], layer.mask.data[order]
    x = torch.randn(2, 7) if layer.wb.dim() == 2 else torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(layer(x.double()), other(x.double()))


def test_a_masked_factor_has_no_effect() -> None:
    layer = filled(FactorizedLinear(7, 5, 4))
    layer.mask.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    kept = [0, 2]
    weight = layer.wa[:, kept] @ torch.diag(layer.r[kept]) @ layer.wb[kept]
    x = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ weight.T)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_initial_variance_is_kaiming_when_factors_are_drawn_from_the_prior(kind: str) -> None:
    factors, alpha = 120, 96.0
    effective = expected_active(factors, alpha)
    torch.manual_seed(0)
    layer = (
        FactorizedLinear(400, 300, factors, effective=effective)
        if kind == "linear"
        else FactorizedConv2d(16, 300, 5, factors, effective=effective)
    )
    variances = []
    for _ in range(20):
        layer.mask.copy_(torch.bernoulli(prior_mean(factors, alpha)))
        variances.append(layer.weight.detach().var())
    assert float(torch.stack(variances).mean()) == pytest.approx(2 / 400, rel=0.1)


@pytest.mark.parametrize(("factors", "scalars"), [(80, 80_800), (100, 100_500), (120, 120_200), (150, 149_750)])
def test_parameters_of_the_factorised_mlp(factors: int, scalars: int) -> None:
    assert count(factorize(MLP(), {"fc1": factors})) == scalars


def test_parameters_of_the_papers_networks() -> None:
    assert count(MLP()) == 158_800
    assert count(CNNFashion()) == 28_880
    assert count(factorize(CNNFashion(), {"conv1": 25, "conv2": 25})) == 27_555
    cifar = {"conv1": 10, "conv2": 10, "fc1": 80, "fc2": 40}
    assert count(factorize(CNNCifar(), cifar)) == 60_850
    assert count(factorize(LeNet5Cifar(), cifar)) == 53_210
    assert count(factorize(LeNet5Cifar(), {**cifar, "fc1": 60})) == 42_790


def test_factorize_keeps_the_rest_and_leaves_the_net_alone() -> None:
    net = LeNet5().double()
    before = copy.deepcopy(net.state_dict())
    made = factorize(net, {"conv1": 3, "fc1": 7})
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert set(factorized_layers(made)) == {"conv1", "fc1"}
    assert not factorized_layers(net)
    assert type(made) is LeNet5
    assert made.spec == net.spec  # type: ignore[operator]
    state = made.state_dict()
    kept = set(before) - {"conv1.weight", "fc1.weight"}
    assert all(torch.equal(state[name], before[name]) for name in kept)  # biases of factorised layers too
    assert all(value.dtype == torch.float64 for value in state.values())
    assert made(torch.zeros(2, 1, 28, 28, dtype=torch.float64)).shape == (2, 10)


def test_factors_depend_on_the_generator_only() -> None:
    def made(seed: int) -> torch.Tensor:
        return factorize(MLP(), {"fc1": 5}, generator=torch.Generator().manual_seed(seed)).fc1.wa  # type: ignore[union-attr, return-value]

    assert torch.equal(made(0), made(0))
    assert not torch.equal(made(0), made(1))


def test_effective_sets_the_scale() -> None:
    torch.manual_seed(0)
    net = factorize(MLP(), {"fc1": 100}, {"fc1": 25.0})
    assert float(net.fc1.wa.detach().std()) == pytest.approx(0.2, rel=0.02)  # type: ignore[union-attr, operator]


def test_layers_inside_blocks_and_factorised_twice() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    once = factorize(net, {"0.0": 3})
    assert list(factorized_layers(once)) == ["0.0"]
    twice = factorize(once, {"0.0": 3, "1": 2})
    assert torch.equal(twice[0][0].wa, once[0][0].wa)  # type: ignore[index]
    with pytest.raises(FederationError, match="factorised already, into 3"):
        factorize(once, {"0.0": 2})


def test_factorised_layers_with_fewer_factors_grow() -> None:
    net = nn.Sequential(FactorizedLinear(4, 4, 3), FactorizedConv2d(1, 2, 3, 2))
    made = factorize(net, {"0": 5, "1": 2}, generator=torch.Generator().manual_seed(0))
    assert [layer.factors for layer in factorized_layers(made).values()] == [5, 2]
    assert torch.equal(made[0].wa[:, :3], net[0].wa)  # type: ignore[index]
    assert torch.equal(made[1].wb, net[1].wb)  # type: ignore[index]
    assert [layer.factors for layer in factorized_layers(net).values()] == [3, 2]  # the given net stays


def test_layers_that_cannot_be_factorised_are_rejected() -> None:
    with pytest.raises(FederationError, match="MLP has no layer 'fc9' to factorise: choose among fc1, head"):
        factorize(MLP(), {"fc9": 3})
    with pytest.raises(FederationError, match="'1' is a ReLU: only Linear and Conv2d"):
        factorize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {"1": 3})
    with pytest.raises(FederationError, match="pads with 'reflect'"):
        factorize(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")), {"0": 3})
    with pytest.raises(FederationError, match="at least one factor, not 0"):
        factorize(MLP(), {"fc1": 0})
    shared = nn.Linear(2, 2)
    with pytest.raises(FederationError, match="under several names"):
        factorize(nn.Sequential(shared, shared), {"0": 1})


@pytest.mark.parametrize("make", [lambda: FactorizedLinear(7, 5, 4), lambda: FactorizedConv2d(3, 5, 3, 4)])
def test_grown_layers_compute_the_same_where_the_mask_is_zero(make: Any) -> None:
    layer = filled(make())
    grown = copy.deepcopy(layer)
    grown.grow(3)
    assert grown.factors == 7
    assert len(grown.mask) == len(grown.wb) == grown.wa.shape[1] == 7
    assert torch.equal(grown.wa[:, :4], layer.wa)
    grown.mask[4:] = 0
    x = (torch.randn(2, 7) if layer.wb.dim() == 2 else torch.randn(2, 3, 6, 6)).double()
    torch.testing.assert_close(layer(x), grown(x))
    grown.mask[4:] = 1
    assert not torch.allclose(layer(x), grown(x))
    with pytest.raises(FederationError, match="by 0 or more"):
        grown.grow(-1)


@pytest.mark.parametrize("make", [lambda: FactorizedLinear(7, 5, 4), lambda: FactorizedConv2d(3, 5, 3, 4, padding=1)])
def test_stacked_gradients_equal_those_of_each_layer(make: Any) -> None:
    layers = [filled(make()) for _ in range(3)]
    for k, layer in enumerate(layers):
        layer.wa.data.mul_(k + 1)
    x = torch.randn(3, 2, *((7,) if layers[0].wb.dim() == 2 else (3, 6, 6)), dtype=torch.float64)
    parameters, buffers = torch.func.stack_module_state(layers)

    def loss(p: Any, b: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layers[0], (p, b), (x,)).pow(2).sum()

    stacked = torch.vmap(torch.func.grad(loss))(parameters, buffers, x)
    for k, layer in enumerate(layers):
        layer(x[k]).pow(2).sum().backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(stacked[name][k], p.grad)


def test_learns_outside_a_federation() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(FactorizedLinear(8, 16, 6), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(64, 8)
    y = (x[:, 0] > 0).long()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for _ in range(100):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
