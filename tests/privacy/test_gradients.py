"""Attacks on gradients of ordinary models: exact where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.metrics import psnr
from fl_lightning.nets import FactorizedLinear
from fl_lightning.privacy.gradients import (
    LocalSteps,
    Matching,
    analytic,
    in_range,
    labels_of_head,
    model_loss,
    rank_one,
)

MEAN, STD = 0.3, 0.25
LOW, HIGH = torch.tensor(-MEAN / STD), torch.tensor((1 - MEAN) / STD)


def digit(seed: int = 0) -> Tensor:
    """A picture of 64 pixels of which half are black, as a net takes it."""
    pixels = torch.rand(1, 64, generator=torch.Generator().manual_seed(seed))
    return (torch.where(pixels < 0.5, 0.0, pixels) - MEAN) / STD


def net(first: nn.Module | None = None) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.Linear(64, 12, bias=False) if first is None else first
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(12, 5))


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    names, leaves = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(F.cross_entropy(model(x), y), leaves)
    return dict(zip(names, found, strict=True))


def test_a_bias_gives_the_sample() -> None:
    model, x = net(nn.Linear(64, 12)), digit()
    found = gradients(model, x, torch.tensor([2]))
    torch.testing.assert_close(analytic(found["0.weight"], found["0.bias"]), x[0], rtol=1e-4, atol=1e-5)
    assert analytic(torch.zeros(3, 4), torch.zeros(3)) is None


@pytest.mark.parametrize("label", [0, 4])
def test_without_a_bias_direction_and_pixel_range_give_the_sample(label: int) -> None:
    x = digit()
    one = rank_one(gradients(net(), x, torch.tensor([label]))["0.weight"])
    assert one is not None
    assert one.share == pytest.approx(1.0, abs=1e-6)
    found = in_range(one.direction, LOW, HIGH)
    assert found.shape == (2, 64)
    assert float(psnr(found[:1] * STD, x * STD)) > 110


@pytest.mark.parametrize("noise", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("seed", range(4))
def test_rounding_of_small_changes_hides_neither_scale_nor_sign(noise: float, seed: int) -> None:
    """A confident model changes little, and much of the change is then rounding error of the weights."""
    generator = torch.Generator().manual_seed(seed)
    x = digit(seed)
    change = torch.outer(torch.randn(12, generator=generator), x[0])
    change += noise * change.pow(2).mean().sqrt() * torch.randn(change.shape, generator=generator)
    one = rank_one(change)
    assert one is not None
    assert one.error == pytest.approx(noise / 12**0.5, rel=0.3)
    found = in_range(one.direction, LOW, HIGH, one.error)
    assert float(psnr(found[:1] * STD, x * STD)) > -20 * np.log10(noise) + 10


def test_factorised_layers_leak_by_their_right_factors_alone() -> None:
    torch.manual_seed(1)
    model, x = net(FactorizedLinear(64, 12, factors=7)), digit(3)
    with torch.no_grad():
        model[0].mask[:4] = 0  # type: ignore[index]
    one = rank_one(gradients(model, x, torch.tensor([1]))["0.wb"])
    assert one is not None
    assert float(psnr(in_range(one.direction, LOW, HIGH)[:1] * STD, x * STD)) > 110


def test_many_steps_on_one_sample_are_still_an_outer_product() -> None:
    model, x, y = net(), digit(4), torch.tensor([3])
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    one = rank_one(before - model[0].weight.detach())
    assert one is not None
    assert float(psnr(in_range(one.direction, LOW, HIGH)[:1] * STD, x * STD)) > 100


def test_several_samples_are_no_outer_product() -> None:
    x = torch.cat([digit(s) for s in range(3)])
    one = rank_one(gradients(net(), x, torch.tensor([0, 1, 2]))["0.weight"])
    assert one is not None
    assert one.share < 0.99
    assert rank_one(torch.zeros(3, 4)) is None


def test_range_of_pixels_that_are_not_normalised() -> None:
    """Black is 0: of the two signs one has no positive pixel, and the brightest pixel is white."""
    x = torch.tensor([0.0, 0.25, 1.0, 1e-9])
    found = in_range(-x / x.norm(), torch.tensor(0.0), torch.tensor(1.0))
    assert found.shape == (1, 4)
    torch.testing.assert_close(found[0], x)


def test_labels_by_hand() -> None:
    share = torch.tensor([1.0, 0.0, 2.0, 0.0]) / 3
    assert labels_of_head(0.25 - share, 3).tolist() == [0, 2, 2]
    assert labels_of_head(0.25 - share, 1).tolist() == [2]


def test_local_steps_are_those_of_torch() -> None:
    model, x, y = net().double(), torch.cat([digit(s) for s in range(4)]).double(), torch.tensor([0, 1, 2, 2])
    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    batches = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([3, 0])]
    local = LocalSteps(0.1, batches, weight_decay=0.02, momentum=0.9)
    changed = local.change(model_loss(model), state, tuple(state), x, y)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.02)
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(state[name] - changed[name], value.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 3])
def test_matching_finds_sample_and_label_where_the_head_stays_home(steps: int) -> None:
    """Only the first layer's change is seen; every class is tried, and several local steps are repeated."""
    model, x, y = net().double(), (digit(5) * STD + MEAN).double(), torch.tensor([3])
    loss, state = model_loss(model), {n: v.detach() for n, v in model.named_parameters()}
    local = LocalSteps(0.1, [torch.tensor([0])] * steps, trained=tuple(state))
    to_net = lambda images: (images - MEAN) / STD  # noqa: E731
    seen = {"0.weight": local.change(loss, state, tuple(state), to_net(x), y)["0.weight"].detach()}
    matching = Matching(steps=120, variation=0.0)
    found = matching.search(loss, state, seen, None, (1, 64), np.random.default_rng(0), to_net, local, classes=5)
    assert found.distance < 1e-3
    assert float(psnr(found.images, x)) > 25
    assert found.labels.tolist() == [3]


def plain_geiping(model: nn.Module, seen: list[Tensor], y: Tensor, start: Tensor, steps: int) -> Tensor:
    """Geiping et al. (2020) on an ordinary model, written out."""
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1)
    wanted = torch.cat([value.flatten() for value in seen])
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.1 ** sum(step >= int(part * steps) for part in (3 / 8, 5 / 8, 7 / 8))
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()], create_graph=True)
        flat = torch.cat([value.flatten() for value in grads])
        cost = 1 - (flat @ wanted) / (flat.norm() * wanted.norm())
        cost = cost + 0.1 * ((x.diff(dim=2)).abs().mean() + (x.diff(dim=3)).abs().mean())
        optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(cost, x)
        x.grad = gradient.sign()
        optimizer.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x.detach()


def test_matching_is_as_strong_as_a_plain_one_on_a_convolutional_net() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(6 * 64, 4)).double()
    x = torch.zeros(1, 1, 10, 10).double()
    x[..., 2:8, 3:6] = 0.9
    y, start = torch.tensor([2]), torch.rand(1, 1, 10, 10, generator=torch.Generator().manual_seed(1)).double()
    seen, steps = gradients(model, x, y), 200
    state = {name: value.detach() for name, value in model.named_parameters()}
    matching = Matching(steps=steps)
    ours = matching.descend(model_loss(model), state, seen, y, start, lambda images: images, LocalSteps(), steps)
    theirs = plain_geiping(model, [*seen.values()], y, start, steps)
    assert float(psnr(ours.images, x)) > 20
    assert float(psnr(ours.images, x)) > float(psnr(theirs, x)) - 0.5


def test_the_right_sample_has_no_distance() -> None:
    model, x, y = net().double(), digit().double(), torch.tensor([1])
    seen = gradients(model, x, y)
    state = {n: v.detach() for n, v in model.named_parameters()}
    found = Matching(steps=1, variation=0.0).descend(
        model_loss(model), state, seen, y, x, lambda images: images, LocalSteps(), 1
    )
    assert found.distance < 1e-12
