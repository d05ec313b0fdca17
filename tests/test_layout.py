"""Convolutions, pooling, BatchNorm and GroupNorm of a stack in one call equal vmap of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.engine.memory import keep_memory
from fl_lightning.errors import FederationError
from fl_lightning.layout import BETTER, StackLayout, fast_in_stack, native, products
from fl_lightning.layout.activation import tanh
from fl_lightning.layout.convolution import Convolution, suits_groups
from fl_lightning.layout.memory import batch_last, channels_last, has_channels_last, keep_layout
from fl_lightning.layout.normalisation import BatchNorm, GroupNorm
from fl_lightning.layout.pooling import MaxPool, MeanPool
from fl_lightning.nets import CNNFashion, LeNet5, LeNet5Classic, LeNetBN

CLIENTS = 3


@pytest.fixture(params=["kernels", "products"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds with the compiled kernels and without them."""
    if request.param == "products":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("there is no C++ compiler to make the kernels with")
    monkeypatch.setattr(products, "SMALL_BATCH", 1)
    return request.param


def rand(*shape: int, ties: bool = False) -> Tensor:
    drawn = torch.randn(CLIENTS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    return drawn.round() if ties else drawn


def lying(x: Tensor, order: str) -> Tensor:
    """A stack of images as it comes from a layer before, with the batch or the channels innermost."""
    places = {"batch": (0, 2, 3, 4, 1), "channels": (1, 3, 4, 0, 2)}[order]
    back = [places.index(i) for i in range(5)]
    return x.permute(places).contiguous().permute(back)


both_orders = pytest.mark.parametrize("order", ["batch", "channels"])


def ours(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def within(*args: Tensor) -> Tensor:
        with StackLayout():
            return function(*args)

    return within


def scored(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A number that depends on every value of the result differently, so that its gradient tells them apart."""

    def score(*args: Tensor) -> Tensor:
        result = function(*args)
        weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
        return (result.pow(2) * weights).sum()

    return score


def one_by_one(function: Callable[..., Any], dims: Sequence[int | None], args: Sequence[Tensor]) -> Any:
    """Results of vmap without it, as not every PyTorch maps everything."""
    clients = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    rows = [
        function(*(arg if dim is None else arg.select(dim, k) for arg, dim in zip(args, dims, strict=True)))
        for k in range(clients)
    ]
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def agree(function: Callable[..., Tensor], *args: Tensor, in_dims: tuple[int | None, ...] | None = None) -> None:
    """Values, and gradients with respect to all arguments, are those of one after the other."""
    dims = in_dims or (0,) * len(args)
    numbers = tuple(range(len(args)))
    for wrapped in (function, scored(function)):
        found = torch.vmap(ours(wrapped), dims)(*args)
        torch.testing.assert_close(found, one_by_one(wrapped, dims, args), rtol=1e-10, atol=1e-10)
    found = torch.vmap(torch.func.grad(ours(scored(function)), numbers), dims)(*args)
    expected = one_by_one(torch.func.grad(scored(function), numbers), dims, args)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


CONVOLUTIONS = [
    {},
    {"padding": 1},
    {"stride": 2, "padding": (0, 1)},
    {"stride": (3, 2), "dilation": (2, 1)},
    {"padding": 4},  # places whose kernel sees nothing but zeros
    {"dilation": 2},
    {"groups": 2},
    {"groups": 4, "padding": 1},  # depthwise
]


@both_orders
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions(options: dict[str, int], channels: int, bias: bool, order: str) -> None:
    """Of four channels by products, of eight in groups, on images that come either way."""
    groups = options.get("groups", 1)
    x, weight = lying(rand(2, channels, 8, 7), order), rand(2 * channels, channels // groups, 3, 3)
    if bias:
        agree(lambda x, w, b: F.conv2d(x, w, b, **options), x, weight, rand(2 * channels))
    else:
        agree(lambda x, w: F.conv2d(x, w, **options), x, weight)


@pytest.mark.parametrize("kernel", [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"padding": 1}], ids=str)
def test_convolutions_with_kernels_of_one_row_or_column(kernel: tuple[int, int], options: dict[str, int]) -> None:
    agree(lambda x, w, b: F.conv2d(x, w, b, **options), rand(2, 3, 6, 5), rand(4, 3, *kernel), rand(4))


@pytest.mark.parametrize("size", [1, 6000, 2**30])
def test_convolutions_do_not_depend_on_the_cache(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client at a time, two, or all of them."""
    monkeypatch.setattr(products, "CACHE_BYTES", size)
    agree(lambda x, w, b: F.conv2d(x, w, b, padding=1), rand(2, 4, 8, 7), rand(8, 4, 3, 3), rand(8))


def test_convolutions_of_several_stacks_at_once() -> None:
    """Models by clients: as the losses of several models on a client's samples are computed."""
    x, weight = rand(2, 2, 5, 5), torch.stack([rand(4, 2, 3, 3), 2 * rand(4, 2, 3, 3)])

    def both(function: Callable[..., Tensor]) -> Tensor:
        return torch.vmap(torch.vmap(function), (None, 0))(x, weight)

    torch.testing.assert_close(both(ours(F.conv2d)), both(F.conv2d), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("options", [([1, 1], [1, 1], [1, 1], 3), ([2, 1], [0, 2], [1, 2], 3)])
def test_fake_outputs_of_convolutions_match_the_real_ones(
    options: tuple[list[int], list[int], list[int], int], channels: int
) -> None:
    """Shapes, strides and that nothing is written to, checked by PyTorch."""
    x, weight = rand(2, channels, 7, 6).movedim(0, 1).flatten(1, 2), rand(4, channels, 3, 3).flatten(0, 1)
    torch.library.opcheck(products.convolution, (x, weight, weight[:, 0, 0, 0].clone(), *options))
    grad = torch.ones_like(products.convolution(x, weight, None, *options))
    torch.library.opcheck(products.by_input, (grad, x, weight, *options))
    torch.library.opcheck(products.by_weight, (grad, x, weight, *options))


@pytest.mark.parametrize(("channels", "order"), [(2, "batch"), (8, "channels")])
def test_pooling_and_normalisation_keep_the_layout(channels: int, order: str) -> None:
    """Convolutions return the memory order that pooling and normalisation take and return, without a copy."""
    x = {"batch": batch_last, "channels": channels_last}[order](rand(4, channels, 8, 8), 0, CLIENTS)
    weight, scale = rand(8, channels, 3, 3).flatten(0, 1), rand(8).flatten()
    convolved = Convolution.apply(x, weight, scale, ([1, 1], [1, 1], [1, 1], CLIENTS))
    pooled = MaxPool.apply(convolved, ([2, 2], [2, 2], [0, 0], [1, 1], False))[0]
    means = MeanPool.apply(convolved, ([2, 2], [2, 2], [0, 0], False, True, None))
    batch_normal = BatchNorm.apply(convolved, scale, scale, 1e-5)[0]
    group_normal = GroupNorm.apply(convolved, scale, scale, 2 * CLIENTS, 1e-5)[0]
    for images in (x, convolved, pooled, means, batch_normal, group_normal):
        assert images.permute(1, 2, 3, 0).is_contiguous() == (order == "batch")
        assert has_channels_last(images) == (order == "channels")
        back = images.unflatten(1, (CLIENTS, -1)).movedim(1, 0)
        assert keep_layout(back, 0, CLIENTS).data_ptr() == images.data_ptr()


@pytest.mark.parametrize(
    ("outputs", "channels", "groups"),
    [(16, 1, True), (16, 3, True), (32, 16, True), (1, 1, True), (6, 1, False), (16, 6, False), (10, 8, False)],
)
def test_which_convolutions_are_in_groups(outputs: int, channels: int, groups: bool) -> None:
    assert suits_groups(torch.empty(CLIENTS * outputs, channels, 5, 5), CLIENTS) == groups


@pytest.mark.parametrize("net", [LeNet5, LeNet5Classic, LeNetBN, CNNFashion])
def test_a_single_net_is_a_stack_of_one(net: type[nn.Module], way: str) -> None:
    own = net().double().eval()
    x = torch.randn(37, 1, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert fast_in_stack(own.state_dict()) == (way == "kernels" and net is not CNNFashion)
    with torch.no_grad(), StackLayout(mapped=False):
        found = own(x)
    torch.testing.assert_close(found, own(x).detach(), rtol=1e-10, atol=1e-10)


def test_large_nets_and_nets_without_convolutions_use_pytorch() -> None:
    assert not fast_in_stack({"fc.weight": torch.empty(3, 4)})
    assert not fast_in_stack({"small": torch.empty(6, 1, 5, 5), "large": torch.empty(64, 64, 3, 3)})


def test_hyperbolic_tangent() -> None:
    agree(torch.tanh, rand(3, 4, 5, 6))
    agree(lambda x: x.tanh(), rand(3, 4, 5, 6))
    agree(torch.tanh, lying(rand(3, 4, 5, 6), "batch"))
    agree(lambda x: torch.func.grad(lambda x: torch.tanh(x).pow(3).sum())(x), rand(3, 4, 5, 6))
    torch.library.opcheck(tanh, (rand(3, 4, 5).float(),))


def test_hyperbolic_tangent_in_single_precision() -> None:
    """To two units in the last place, wherever they are steep, flat, tiny or not a number."""
    size = torch.cat([torch.linspace(0, 12, 100_003), torch.logspace(-38, 1, 10_001)])
    x = torch.cat([size, -size])
    found, exact = tanh(x), x.double().tanh()
    unit = torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)) - exact.float().abs()
    assert float(((found.double() - exact).abs() / unit).max()) < 2
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    torch.testing.assert_close(tanh(odd), odd.tanh(), rtol=0, atol=0, equal_nan=True)
    assert tanh(odd).signbit().tolist()[-2:] == [False, True]
    payloads = torch.tensor([0x7FC00001, 0x7F8000FF, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert tanh(payloads).isnan().all()
    with_gaps = x[: 4 * 100].view(100, 4)[:, :3]
    torch.testing.assert_close(tanh(with_gaps), with_gaps.tanh())


def test_convolutions_of_one_channel_whose_memory_is_ambiguous() -> None:
    agree(lambda x, w: F.conv2d(input=x, weight=w, padding=2), rand(4, 1, 6, 6), rand(5, 1, 5, 5))


@pytest.mark.parametrize("in_dims", [(None, 0), (0, None)])
def test_inputs_shared_by_all_clients(in_dims: tuple[int | None, ...]) -> None:
    values = [
        value[0] if dim is None else value
        for value, dim in zip((rand(2, 3, 5, 5), rand(4, 3, 3, 3)), in_dims, strict=True)
    ]
    agree(F.conv2d, *values, in_dims=in_dims)


@both_orders
@pytest.mark.parametrize("options", [{}, {"stride": 1}, {"padding": 1}, {"ceil_mode": True}], ids=str)
def test_max_pooling_takes_the_first_of_equal_values(options: dict[str, int], order: str) -> None:
    agree(lambda x: F.max_pool2d(x, 2, **options), lying(rand(3, 4, 7, 6, ties=True), order))


@both_orders
@pytest.mark.parametrize("options", [{}, {"stride": 1}, {"padding": 1, "count_include_pad": False}], ids=str)
def test_mean_pooling(options: dict[str, int], order: str) -> None:
    agree(lambda x: F.avg_pool2d(x, 2, **options), lying(rand(3, 4, 7, 6), order))


def test_layers_are_found_in_a_net() -> None:
    """Modules and functional calls alike: a net need not be written for it."""
    seen = []
    originals = dict(BETTER)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.MaxPool2d(2)).double()
    try:
        for func, better in originals.items():

            def note(*args: object, better: Callable[..., Tensor] = better, **kwargs: object) -> Tensor:
                seen.append(better.__name__)
                return better(*args, **kwargs)

            BETTER[func] = note
        state = {name: value.expand(CLIENTS, *value.shape).clone() for name, value in net.state_dict().items()}
        torch.vmap(ours(lambda s, x: torch.func.functional_call(net, s, x)))(state, rand(2, 2, 6, 6))
    finally:
        BETTER.update(originals)
    assert seen == ["_conv2d", "_batch_norm", "_group_norm", "_max_pool2d"]


@both_orders
def test_batch_norm_and_its_running_statistics(order: str) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, var = torch.full((4,), 0.5, dtype=x.dtype) + 0 * weight.detach(), 1 + 0 * weight.detach()
        result = F.batch_norm(x, mean, var, weight, bias, True, 0.3, 1e-5)
        return torch.cat([result.flatten(), mean, var])

    agree(norm, lying(rand(3, 4, 5, 6), order), rand(4), rand(4))


@both_orders
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_by_given_statistics(affine: bool, order: str) -> None:
    """Return an evaluation's inputs; images keep their memory order."""

    def normal(x: Tensor, mean: Tensor, deviation: Tensor, *affine: Tensor) -> Tensor:
        return F.batch_norm(x, mean.detach(), deviation.detach().square(), *affine, training=False, eps=1e-3)

    args = (lying(rand(4, 3, 5, 5), order), rand(3), rand(3).exp(), *([rand(3) + 1, rand(3) - 1] if affine else []))
    agree(normal, *args)
    assert torch.vmap(ours(normal))(*args).stride() == args[0].stride()


@both_orders
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(groups: int, order: str) -> None:
    x = lying(rand(3, 4, 5, 6), order)
    agree(lambda x, weight, bias: F.group_norm(x, groups, weight, bias), x, rand(4), rand(4))
    agree(lambda x, weight: F.group_norm(x, groups, weight, weight), x, rand(4), in_dims=(0, 0))
    plain = partial(F.group_norm, num_groups=groups)  # without scale and shift, by PyTorch
    try:
        torch.vmap(plain)(x)
    except RuntimeError as error:  # PyTorch 2.7
        if "NYI" not in str(error):
            raise
        return
    agree(plain, x)


@pytest.mark.parametrize("channels", [2, 8])
def test_second_derivatives(channels: int) -> None:
    x, weight, bias = rand(2, channels, 7, 7), rand(2 * channels, channels, 3, 3), rand(2 * channels)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.max_pool2d(F.avg_pool2d(F.conv2d(x, weight, bias).pow(3), 2, 1), 2).pow(2).sum()

    def sharpness(*args: Tensor) -> Tensor:
        return sum(g.pow(2).sum() for g in torch.func.grad(loss, (0, 1, 2))(*args))  # type: ignore[return-value]

    found = torch.vmap(torch.func.grad(ours(sharpness), (0, 1, 2)))(x, weight, bias)
    expected = torch.vmap(torch.func.grad(sharpness, (0, 1, 2)))(x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_second_derivatives_of_normalisation_say_what_to_do(norm: str) -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        if norm == "group":
            return F.group_norm(x, 1, weight, weight).pow(3).sum()
        return F.batch_norm(x, None, None, weight, weight, True).pow(3).sum()

    def sharpness(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.grad(loss)(x, weight).pow(2).sum()

    with pytest.raises(FederationError, match="use the engine 'sequential'"):
        torch.vmap(torch.func.grad(ours(sharpness)))(rand(3, 2, 4, 4), rand(2))


def test_other_calls_use_pytorch() -> None:
    x, weight = rand(2, 5, 5), rand(3, 2, 3, 3)
    torch.testing.assert_close(torch.vmap(ours(F.conv2d))(x, weight), torch.vmap(F.conv2d)(x, weight))
    same = torch.vmap(ours(lambda x, w: F.conv2d(x, w, padding="same")))(rand(2, 2, 5, 5), weight)
    assert same.shape == (CLIENTS, 2, 3, 5, 5)
    values, indices = ours(lambda x: F.max_pool2d(x, 2, return_indices=True))(rand(2, 4, 4))  # type: ignore[misc]
    assert values.shape == indices.shape == (CLIENTS, 2, 2, 2)


def test_under_autocast_pytorch_chooses_the_precision() -> None:
    def net(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, weight), None, None, scale, scale, True)

    args = [value.float() for value in (rand(2, 2, 5, 5), rand(3, 2, 3, 3), rand(3))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = torch.vmap(ours(net))(*args), torch.vmap(net)(*args)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_memory_is_kept_where_the_library_allows_it() -> None:
    assert keep_memory() in (True, False)
