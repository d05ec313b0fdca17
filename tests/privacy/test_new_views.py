"""A crafting server, whole clients and colluding ones, on nets where the answer is known."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fl_lightning.privacy.gradients import rank_one
from fl_lightning.privacy.imprint import imprint, read
from fl_lightning.privacy.profiles import property_direction, remaining, took_part
from fl_lightning.wire import Message, weighted_mean


def test_an_imprint_layer_gives_every_sample_of_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(8, 30, generator=generator).double() + torch.arange(8).double()[:, None] / 4
    first, last = nn.Linear(30, 40).double(), nn.Linear(40, 3).double()
    with torch.no_grad():
        for parameter, value in zip(first.parameters(), imprint(30, torch.linspace(0, 3, 40).double()), strict=True):
            parameter.copy_(value)
        last.weight.copy_(last.weight[:, :1].expand(3, 40))  # equal columns
    F.cross_entropy(last(first(x).relu()), torch.arange(8) % 3).backward()
    found = read(first.weight.grad, first.bias.grad)  # type: ignore[arg-type]
    nearest = torch.cdist(x, found).min(1).values
    assert float(nearest.max()) < 1e-8
    assert len(found) == 8
    one = rank_one(first.weight.grad)  # type: ignore[arg-type]
    assert one is not None
    assert one.share < 0.9999  # no single sample


def test_who_took_part() -> None:
    updates = torch.randn(30, 20_000, generator=torch.Generator().manual_seed(0))
    change = updates[:10].mean(0)
    scores = [took_part(change, update) for update in updates]
    assert min(scores[:10]) > max(scores[10:])
    assert abs(sum(scores[:10]) / 10 - 10**-0.5) < 0.02


def test_properties_show_in_updates() -> None:
    """Nets trained a step on data of which half or a tenth is of class 0."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(10, 4)

    def updates(share: float, number: int) -> torch.Tensor:
        found = []
        for _ in range(number):
            y = torch.where(
                torch.rand(40, generator=generator) < share, 0, torch.randint(1, 4, (40,), generator=generator)
            )
            x = torch.randn(40, 10, generator=generator)
            grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
            found.append(-torch.cat([g.flatten() for g in grads]))
        return torch.stack(found)

    direction, line = property_direction(updates(0.5, 30), updates(0.1, 30))
    fresh = [(updates(share, 50).double() @ direction > line).double().mean() for share in (0.5, 0.1)]
    assert float(fresh[0]) > 0.95
    assert float(fresh[1]) < 0.05


def test_clients_that_collude_leave_the_last_one_bare() -> None:
    generator = torch.Generator().manual_seed(0)
    messages = [Message(k, {"w": torch.randn(5, generator=generator)}, 10 * (k + 1)) for k in range(4)]
    weights = [m.samples / 100 for m in messages]
    mean = weighted_mean(messages, weights)
    found = remaining(mean, weights[1:], [m.tensors for m in messages[1:]], weights[0])
    torch.testing.assert_close(found["w"], messages[0].tensors["w"], rtol=1e-4, atol=1e-5)
