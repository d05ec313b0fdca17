"""The networks of the papers: exact sizes, shapes and layer names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fl_lightning.errors import FederationError
from fl_lightning.nets import (
    MLP,
    NETS,
    CNNCifar,
    CNNFashion,
    FedNet,
    LeNet5,
    LeNet5Cifar,
    LeNet5Classic,
    LeNetBN,
    ResNet20,
    ResNet32,
    ResNet44,
    ResNet56,
    WideLeNet,
)

PARAMETERS = {
    "mlp_mnist": 158_800,
    "cnn_fmnist": 28_880,
    "cnn_cifar": 54_216,
    "lenet5": 61_706,
    "lenet5_classic": 61_706,
    "lenet_bn": 61_750,
    "lenet5_cifar": 61_770,
    "wide_lenet": 797_962,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
}
LAYERS = {
    "mlp_mnist": ["fc1", "head"],
    "cnn_fmnist": ["conv1", "conv2", "head"],
    "cnn_cifar": ["conv1", "conv2", "fc1", "fc2", "head"],
    "lenet5": ["conv1", "conv2", "fc1", "fc2", "head"],
    "lenet5_classic": ["conv1", "conv2", "fc1", "fc2", "head"],
    "lenet_bn": ["conv1", "conv2", "fc1", "fc2", "head", "bn1", "bn2"],
    "lenet5_cifar": ["conv1", "conv2", "fc1", "fc2", "head"],
    "wide_lenet": ["conv1", "conv2", "fc1", "fc2", "head"],
    "resnet20": ["conv1", "bn1", "stage1", "stage2", "stage3", "head"],
}


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def images(name: str, batch: int = 2) -> torch.Tensor:
    shape = (3, 32, 32) if any(kind in name for kind in ("cifar", "wide", "resnet")) else (1, 28, 28)
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1))


def test_every_paper_name_is_there() -> None:
    assert {k: v for k, v in NETS.items() if k in PARAMETERS} == {
        "mlp_mnist": MLP,
        "cnn_fmnist": CNNFashion,
        "cnn_cifar": CNNCifar,
        "lenet5": LeNet5,
        "lenet5_classic": LeNet5Classic,
        "lenet_bn": LeNetBN,
        "lenet5_cifar": LeNet5Cifar,
        "wide_lenet": WideLeNet,
        "resnet20": ResNet20,
        "resnet32": ResNet32,
        "resnet44": ResNet44,
        "resnet56": ResNet56,
    }


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name: str) -> None:
    assert parameters(NETS[name]()) == PARAMETERS[name]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_their_names(name: str) -> None:
    assert [n for n, _ in NETS[name]().named_children()] == LAYERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_output_shape_and_head(name: str) -> None:
    net = NETS[name](num_classes=7)
    assert net(images(name)).shape == (2, 7)
    assert net.get_submodule("head").weight.shape[0] == 7


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_is_used(name: str) -> None:
    torch.manual_seed(0)
    net = NETS[name]()
    net(images(name, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_mlp_with_bias_and_other_depths() -> None:
    assert parameters(MLP(bias=True)) == 159_010
    deep = MLP(in_features=20, hidden=(16, 8), num_classes=4)
    assert [tuple(p.shape) for p in deep.parameters()] == [(16, 20), (8, 16), (4, 8)]


def test_mlp_is_relu_between_layers_and_none_at_the_end() -> None:
    net = MLP(in_features=2, hidden=(2,), num_classes=1)
    net.load_state_dict(
        {"fc1.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "head.weight": torch.tensor([[2.0, -3.0]])}
    )
    # relu(-1) = 0 and relu(2) = 2 give 2 * 0 - 3 * 2
    assert net(torch.tensor([[[-1.0, 2.0]]])).item() == -6.0


def test_mlp_without_hidden_layers_is_softmax_regression() -> None:
    net = MLP(in_features=6, hidden=(), num_classes=3, bias=True)
    x = torch.randn(4, 2, 3)
    assert torch.equal(net(x), nn.functional.linear(x.flatten(1), net.head.weight, net.head.bias))


def test_lenet_takes_channels_and_bn_normalises_before_relu() -> None:
    assert LeNet5(in_channels=3)(torch.zeros(1, 3, 28, 28)).shape == (1, 10)
    net = LeNetBN().train()
    nn.init.constant_(net.bn2.weight, 0.0)
    nn.init.constant_(net.bn2.bias, -1.0)
    assert net.features(images("lenet_bn")).abs().sum() == 0  # relu of -1 everywhere


def test_the_classic_lenet_has_tangents_and_mean_pooling() -> None:
    net, x = LeNet5Classic().double(), images("lenet5_classic").double()
    y = nn.functional.avg_pool2d(net.conv1(x).tanh(), 2)
    y = nn.functional.avg_pool2d(net.conv2(y).tanh(), 2).flatten(1)
    torch.testing.assert_close(net(x), net.head(net.fc2(net.fc1(y).tanh()).tanh()))


@pytest.mark.parametrize("blocks", [(ResNet20, 3), (ResNet56, 9)])
def test_residual_stages_have_their_blocks_and_no_shortcut_has_parameters(blocks: tuple[type[ResNet20], int]) -> None:
    net = blocks[0]()
    assert [len(stage) for stage in (net.stage1, net.stage2, net.stage3)] == [blocks[1]] * 3
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) + 1 == 6 * blocks[1] + 2
    assert all(module.kernel_size == (3, 3) for module in convolutions)


def test_the_residual_shortcut_subsamples_and_pads_with_zeros() -> None:
    block = ResNet20().stage2[0]
    nn.init.zeros_(block.bn2.weight)  # leaves relu(shortcut)
    x = images("resnet20")[:, :1].expand(2, 16, 32, 32).abs()
    y = block(x)
    assert y.shape == (2, 32, 16, 16)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert y[:, :8].abs().sum() + y[:, 24:].abs().sum() == 0


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in ("resnet32", "resnet44", "resnet56")])
def test_stacked_gradients_equal_one_by_one(name: str) -> None:
    torch.manual_seed(0)
    nets = [NETS[name]().double().train() for _ in range(3)]
    x = torch.stack([images(name, 4).double() + i for i in range(3)])
    y = torch.randint(0, 10, (3, 4))
    stacked = {
        k: torch.stack([dict(n.named_parameters())[k].detach() for n in nets]) for k in dict(nets[0].named_parameters())
    }
    buffers = {
        k: torch.stack([dict(n.named_buffers())[k].clone() for n in nets]) for k in dict(nets[0].named_buffers())
    }

    def loss(p: dict, b: dict, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(nets[0], {**p, **b}, (xs,)), ys)

    together = vmap(grad(loss))(stacked, buffers, x, y)
    for i, net in enumerate(nets):
        cross_entropy(net(x[i]), y[i]).backward()
        for k, p in net.named_parameters():
            torch.testing.assert_close(together[k][i], p.grad, rtol=1e-9, atol=1e-9)


def test_all_derive_from_the_base() -> None:
    assert all(issubclass(kind, FedNet) for kind in NETS.values())


def test_a_perceptron_of_width_0_is_rejected() -> None:
    for width in (0, -3):
        with pytest.raises(FederationError, match=f"must be 1 or more, not {width}"):
            MLP(hidden=[20, width])
