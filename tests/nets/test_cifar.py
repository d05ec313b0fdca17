"""The deep networks for CIFAR-10: exact sizes, strides and shortcuts, and that clients' copies can be stacked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torchvision.models.resnet import BasicBlock

from fl_lightning.nets import NETS, DenseNet121, MobileNetV2, ResNet18, group_norm

#: Parameters and BatchNorm channels.
SIZES = {
    "resnet18": (11_173_962, 4_800),
    "densenet121": (6_956_298, 41_760),
    "mobilenetv2": (2_296_922, 17_544),
}
KINDS = {"resnet18": ResNet18, "densenet121": DenseNet121, "mobilenetv2": MobileNetV2}


def small(batch: int = 3) -> torch.Tensor:
    """Images that are quick to run: 8x8, so that the last maps are a single number."""
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_normalised_channels(name: str) -> None:
    assert NETS[name] is KINDS[name]
    net = NETS[name]()
    channels = sum(m.num_features for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    assert (sum(p.numel() for p in net.parameters() if p.requires_grad), channels) == SIZES[name]
    assert sum(p.numel() for p in group_norm(net).parameters()) == SIZES[name][0]


@pytest.mark.parametrize("name", SIZES)
def test_shapes(name: str) -> None:
    net = NETS[name](in_channels=1, num_classes=7).eval()
    with torch.no_grad():
        assert net.body(torch.zeros(1, 1, 32, 32)).shape == (1, net.head.in_features, 4, 4)
        assert net(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("name", SIZES)
def test_every_parameter_is_used(name: str) -> None:
    torch.manual_seed(0)
    net = NETS[name]()
    net(small()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_sizes_of_the_feature_maps_by_stage() -> None:
    x = torch.zeros(1, 3, 32, 32)
    for net, sizes in (
        (ResNet18(), [32, 32, 16, 8, 4]),
        (DenseNet121(), [32, 32, 16, 16, 8, 8, 4, 4, 4, 4]),
        (MobileNetV2(), [32, 32, 32, 16, 8, 8, 4, 4, 4]),
    ):
        seen = []
        with torch.no_grad():
            net.eval()
            maps = x
            for part in net.body:
                maps = part(maps)
                seen.append(maps.shape[-1])
        assert seen == sizes


def test_projection_shortcuts_are_where_the_shape_changes() -> None:
    blocks = [m for m in ResNet18().modules() if isinstance(m, BasicBlock)]
    assert [b.downsample is not None for b in blocks] == [False, False, True, False, True, False, True, False]
    inverted = [block for name, group in MobileNetV2().body.named_children() if "group" in name for block in group]
    projected = [i for i, block in enumerate(inverted) if block.shortcut is not None]
    assert len(inverted) == 17
    assert projected == [0, 1, 10, 16]  # 32-16, 16-24, 64-96 and 160-320, each at stride 1


def test_a_projected_block_adds_its_shortcut() -> None:
    block = MobileNetV2().body.group1[0].eval()
    x = torch.randn(2, 32, 4, 4)
    torch.testing.assert_close(block(x), block.conv(x) + block.shortcut(x))


CASES = [
    (name, groups) for name in SIZES for groups in (False, True) if (name, groups) != ("densenet121", True)
]  # slow


@pytest.mark.parametrize(("name", "groups"), CASES)
def test_stacked_gradients_equal_one_by_one(name: str, groups: bool) -> None:
    torch.manual_seed(0)
    net = NETS[name]().double().train()
    net = group_norm(net) if groups else net
    x, y = torch.stack([small().double(), small().double() + 1]), torch.tensor([[0, 1, 2], [3, 4, 5]])
    own = [{k: p.detach() * (1 + i / 10) for k, p in net.named_parameters()} for i in range(2)]
    buffers = {k: b.expand(2, *b.shape).clone() for k, b in net.named_buffers()}

    def loss(p: dict, b: dict, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(net, {**p, **b}, (xs,)), ys)

    together = vmap(grad(loss))({k: torch.stack([o[k] for o in own]) for k in own[0]}, buffers, x, y)
    for i in range(2):
        alone = grad(loss)(own[i], {k: b[i].clone() for k, b in buffers.items()}, x[i], y[i])
        largest = max(float(value.abs().max()) for value in alone.values())
        for k, expected in alone.items():  # what BatchNorm takes out again has no gradient but rounding
            assert float((together[k][i] - expected).abs().max()) < 1e-9 * largest
