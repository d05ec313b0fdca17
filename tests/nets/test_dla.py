"""DLA: exact sizes, shapes, and the structure of its trees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.methods import FedAvg
from fl_lightning.nets import DLA, NETS, DLASimple, DLATiny
from fl_lightning.nets.dla import _BinaryTree, _Tree
from tests.support import CLASSES, blobs, fit
from tests.support.engines import differ


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [("dla", DLA, 16_291_386), ("dla_simple", DLASimple, 15_142_970), ("dla_tiny", DLATiny, 257_116)],
)
def test_parameter_count(name: str, kind: type[nn.Module], count: int) -> None:
    with torch.device("meta"):
        net = kind()
    assert NETS[name] is kind
    assert sum(p.numel() for p in net.parameters()) == count
    assert net(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize("make", [DLATiny, lambda num_classes: DLASimple(num_classes=num_classes, base=2)])
def test_every_parameter_is_used(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = make(num_classes=7)
    output = net(torch.randn(8, 3, 32, 32))
    output.square().sum().backward()
    assert output.shape == (8, 7)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def joined(tree: nn.Module) -> int:
    """Channels that the root of a tree sees."""
    return tree.root[0].in_channels  # type: ignore[index, union-attr, return-value]


def test_roots_concatenate_the_outputs_of_the_tree() -> None:
    """Level 1: both blocks. Level 2: a block beside, a subtree and both blocks; a binary tree's root its halves."""
    assert [joined(_Tree(3, 4, level, 2)) for level in (1, 2, 3)] == [8, 16, 20]
    assert [joined(_BinaryTree(3, 4, level, 2)) for level in (1, 2, 3)] == [8, 8, 8]
    x = torch.randn(2, 3, 8, 8)
    for kind in (_Tree, _BinaryTree):
        for level in (1, 2, 3):
            assert kind(3, 4, level, 2)(x).shape == (2, 4, 4, 4)


def test_a_level_1_tree_by_hand() -> None:
    torch.manual_seed(0)
    tree, x = _Tree(3, 4, 1, 2).eval(), torch.randn(2, 3, 8, 8)

    def block(part: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(part.second(torch.relu(part.first(x))) + part.shortcut(x))  # type: ignore[operator]

    left = block(tree.left, x)
    expected = torch.relu(tree.root(torch.cat([left, block(tree.right, left)], 1)))
    torch.testing.assert_close(tree(x), expected)
    torch.testing.assert_close(_BinaryTree(3, 4, 1, 2).eval()(x).shape, expected.shape)


def test_tiny_can_be_stacked() -> None:
    def trained(engine: str) -> FedAvg:
        torch.manual_seed(0)
        method = FedAvg(DLATiny(num_classes=CLASSES), lr=0.01, batch_size=4, momentum=0.9, engine=engine)
        fit(method, blobs((8, 6), (3, 32, 32)), rounds=1)
        return method

    assert differ(trained("sequential"), trained("stacked")) < 1e-9
