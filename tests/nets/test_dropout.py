"""Dropout from a client's own stream."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fl_lightning.errors import FederationError
from fl_lightning.nets import StreamDropout, noise_shapes, stream_dropout
from fl_lightning.seeding import stream, uniform


class Net(nn.Module):
    """Two dropouts, one of them nested, around BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.drop = nn.Dropout(0.25)
        self.tail = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Dropout(0.0), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.bn(self.conv(x)))
        return self.tail(x.flatten(1))


class Twice(nn.Module):
    """One dropout under two names, or applied twice under one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def drop(p: float, noise: Tensor, x: Tensor) -> Tensor:
    return functional_call(StreamDropout(p), {"noise": noise}, x)


def test_mask_keeps_where_noise_is_not_below_p() -> None:
    noise = torch.tensor([[0.0, 0.24, 0.25], [0.26, 0.9, 0.1]])
    x = torch.tensor([[1.0, 2.0, 3.0], [-6.0, 9.0, 12.0]])
    assert torch.equal(drop(0.25, noise, x), torch.tensor([[0.0, 0.0, 4.0], [-8.0, 12.0, 0.0]]))


def test_gradient_flows_through_kept_entries_only() -> None:
    noise = torch.tensor([0.1, 0.6])
    assert grad(lambda x: drop(0.5, noise, x).sum())(torch.ones(2)).tolist() == [0.0, 2.0]


def test_eval_passes_the_input_and_needs_no_noise() -> None:
    x = torch.randn(3)
    assert torch.equal(StreamDropout(0.5).eval()(x), x)


def test_mean_is_preserved() -> None:
    noise = uniform(stream(0, "dropout"), (200_000,))
    for p in (0.1, 0.5, 0.8):
        out = drop(p, noise, torch.ones(200_000))
        assert out.mean().item() == pytest.approx(1.0, abs=0.02)
        assert (out == 0).float().mean().item() == pytest.approx(p, abs=0.01)


def test_ends_of_the_range() -> None:
    noise = torch.tensor([0.0, 1.0])
    assert drop(0.0, noise, torch.ones(2)).tolist() == [1.0, 1.0]
    assert drop(1.0, noise, torch.ones(2)).tolist() == [0.0, 0.0]
    with pytest.raises(FederationError, match="between 0 and 1"):
        StreamDropout(1.5)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 1), (3,)])
def test_noise_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FederationError, match=r"shape \(2, 3\)"):
        drop(0.5, torch.ones(shape), torch.ones(2, 3))


def test_noise_is_not_part_of_the_state() -> None:
    assert StreamDropout(0.5).state_dict() == {}
    assert dict(StreamDropout(0.5).named_buffers()).keys() == {"noise"}


def test_stream_dropout_replaces_active_dropout_only() -> None:
    net = Net().eval()
    keys = set(net.state_dict())
    assert stream_dropout(net) is net
    kinds = {name: type(module).__name__ for name, module in net.named_modules() if "Drop" in type(module).__name__}
    assert kinds == {"drop": "StreamDropout", "tail.1": "StreamDropout", "tail.2": "Dropout"}
    assert net.get_submodule("drop").p == 0.25
    assert not net.get_submodule("drop").training
    assert set(net.state_dict()) == keys


def test_stream_dropout_of_a_bare_dropout() -> None:
    assert isinstance(stream_dropout(nn.Dropout(0.5)), StreamDropout)


def test_shared_dropout_stays_shared() -> None:
    net = stream_dropout(Twice())
    assert isinstance(net.a, StreamDropout)
    assert net.a is net.b


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout2d(0.5), nn.LSTM(2, 2, num_layers=2, dropout=0.5), type("Mine", (nn.Dropout,), {})(0.5)],
    ids=lambda layer: type(layer).__name__,
)
def test_other_random_layers_are_unchanged(layer: nn.Module) -> None:
    assert stream_dropout(nn.Sequential(layer))[0] is layer


def test_noise_shapes_names_and_shapes_and_changes_nothing() -> None:
    net = stream_dropout(Net()).eval()
    before = {k: v.clone() for k, v in (*net.state_dict().items(), *net.named_buffers())}
    assert noise_shapes(net, torch.randn(5, 1, 4, 4)) == {"drop.noise": (5, 2, 2, 2), "tail.1.noise": (5, 6)}
    after = dict([*net.state_dict().items(), *net.named_buffers()])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not any(m.training for m in net.modules())
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_noise_shapes_of_a_bare_dropout_and_of_none() -> None:
    assert noise_shapes(StreamDropout(0.5), torch.ones(2, 3)) == {"noise": (2, 3)}
    assert noise_shapes(nn.Linear(3, 2), torch.ones(2, 3)) == {}


def test_dropout_applied_twice_is_refused() -> None:
    with pytest.raises(FederationError, match="layer a is applied several times"):
        noise_shapes(stream_dropout(Twice()), torch.ones(2, 3))


def test_stacked_equals_one_by_one() -> None:
    net = stream_dropout(Net().double()).train()
    x = torch.randn(3, 5, 1, 4, 4, dtype=torch.float64)
    shapes = noise_shapes(net, x[0])
    noise = {
        name: torch.stack([uniform(stream(0, f"dropout/{name}", 0, c), shape, torch.float64) for c in range(3)])
        for name, shape in shapes.items()
    }
    params = {k: v.detach() for k, v in net.named_parameters()}
    stacked = {k: torch.stack([v, v + 0.1, v - 0.1]) for k, v in params.items()}
    buffers = {k: torch.stack([v.clone()] * 3) for k, v in net.named_buffers() if "noise" not in k}

    def loss(p: dict, b: dict, n: dict, xs: Tensor) -> Tensor:
        return functional_call(net, {**p, **b, **n}, (xs,)).square().sum()

    together = vmap(grad(loss))(stacked, buffers, noise, x)
    plain = {}
    for c in range(3):
        rows = [{k: v[c].clone() for k, v in group.items()} for group in (stacked, buffers, noise)]
        alone = grad(loss)(*rows, x[c])
        plain[c] = grad(loss)(*rows[:2], {k: torch.ones_like(v) for k, v in rows[2].items()}, x[c])
        for k in params:
            torch.testing.assert_close(together[k][c], alone[k], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(plain[0]["conv.weight"], together["conv.weight"][0])


def test_copies_do_not_share_noise() -> None:
    one = StreamDropout(0.5)
    two = copy.deepcopy(one)
    two.noise = torch.ones(3)
    assert one.noise.shape == (0,)
