"""Server optimizers: hand-derived numbers, the paper's recursion, exact resume."""

from __future__ import annotations

import io
from math import sqrt

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fl_lightning.errors import FederationError
from fl_lightning.optim import FedAdam, Yogi, step_schedulers

BOTH = pytest.mark.parametrize("kind", [FedAdam, Yogi])


def run(optimizer: Optimizer, parameter: nn.Parameter, gradients: list[float]) -> list[float]:
    """The parameter after each gradient."""
    path = []
    for gradient in gradients:
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        path.append(parameter.item())
    return path


def scalar(value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def test_fedadam_by_hand() -> None:
    w = scalar()
    path = run(FedAdam([w], lr=1.0, betas=(0.5, 0.75), tau=1.0), w, [2.0, -4.0])
    # m = 1, v = 0.75 * 1 + 0.25 * 4 = 1.75; then m = 0.5 - 2 = -1.5, v = 0.75 * 1.75 + 0.25 * 16 = 5.3125
    first = -1 / (sqrt(1.75) + 1)
    assert path == pytest.approx([first, first + 1.5 / (sqrt(5.3125) + 1)], abs=1e-12)


def test_yogi_by_hand() -> None:
    w = scalar()
    path = run(Yogi([w], lr=2.0, betas=(0.5, 0.75), tau=1.0), w, [2.0, 1.0, 0.0])
    # 4 > v: v = 1 + 0.25 * 4 = 2, m = 1; 1 < v: v = 2 - 0.25 = 1.75, m = 1; 0: v stays, m = 0.5
    first = -2 / (sqrt(2.0) + 1)
    second = first - 2 / (sqrt(1.75) + 1)
    assert path == pytest.approx([first, second, second - 1 / (sqrt(1.75) + 1)], abs=1e-12)


def test_yogi_does_not_move_when_the_moment_is_right() -> None:
    w = scalar()
    optimizer = Yogi([w], tau=0.5)
    run(optimizer, w, [0.5])
    assert optimizer.state[w]["v"].item() == 0.25


@BOTH
def test_defaults_are_the_papers(kind: type[Optimizer]) -> None:
    assert kind([scalar()]).defaults == {"lr": 0.01, "betas": (0.9, 0.99), "tau": 1e-3}


@BOTH
def test_recursion_of_algorithm_2(kind: type[Optimizer]) -> None:
    rng = np.random.default_rng(0)
    changes = rng.standard_normal((20, 3)) * 10.0 ** rng.integers(-4, 1, (20, 3))
    x, m, v = np.ones(3), np.zeros(3), np.full(3, 1e-6)
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = kind([w])
    for change in changes:
        m = 0.9 * m + 0.1 * change
        yogi, adam = v - 0.01 * change**2 * np.sign(v - change**2), 0.99 * v + 0.01 * change**2
        v = yogi if kind is Yogi else adam
        x = x + 0.01 * m / (np.sqrt(v) + 1e-3)
        w.grad = -torch.from_numpy(change)  # the server's gradient is minus the clients' mean change
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), x, rtol=1e-12)


def test_no_bias_correction() -> None:
    ours, torchs = scalar(), scalar()
    run(FedAdam([ours], lr=1.0, betas=(0.9, 0.9), tau=1e-8), ours, [1.0])
    run(torch.optim.Adam([torchs], lr=1.0, betas=(0.9, 0.9)), torchs, [1.0])
    assert ours.item() == pytest.approx(-0.1 / sqrt(0.1), rel=1e-5)
    assert torchs.item() == pytest.approx(-1.0, rel=1e-5)


@BOTH
def test_resume_is_exact(kind: type[Optimizer]) -> None:
    gradients = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(1))

    def steps(w: nn.Parameter, optimizer: Optimizer, part: torch.Tensor) -> None:
        for gradient in part:
            w.grad = gradient.clone()
            optimizer.step()

    whole = nn.Parameter(torch.ones(4, 3))
    steps(whole, kind([whole], lr=0.1), gradients)

    half = nn.Parameter(torch.ones(4, 3))
    optimizer = kind([half], lr=0.1)
    steps(half, optimizer, gradients[:5])
    saved = io.BytesIO()
    torch.save({"w": half.detach(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    resumed = nn.Parameter(loaded["w"])
    optimizer = kind([resumed], lr=7.0)
    optimizer.load_state_dict(loaded["optimizer"])
    steps(resumed, optimizer, gradients[5:])
    assert torch.equal(resumed, whole)


@BOTH
def test_parameters_without_gradient_stay_and_groups_have_their_own_rate(kind: type[Optimizer]) -> None:
    still, slow, fast = scalar(3.0), scalar(), scalar()
    optimizer = kind([{"params": [still, slow]}, {"params": [fast], "lr": 0.02}])
    slow.grad, fast.grad = torch.ones_like(slow), torch.ones_like(fast)
    optimizer.step()
    assert still.item() == 3.0
    assert fast.item() == pytest.approx(2 * slow.item())


@BOTH
def test_closure_is_evaluated_with_gradients(kind: type[Optimizer]) -> None:
    w = scalar(1.0)
    optimizer = kind([w])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert w.item() < 1.0


@BOTH
@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"tau": 0.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}])
def test_impossible_settings_are_refused(kind: type[Optimizer], wrong: dict) -> None:
    with pytest.raises(FederationError, match=f"{kind.__name__} needs"):
        kind([scalar()], **wrong)


@BOTH
def test_learns(kind: type[Optimizer]) -> None:
    w = nn.Parameter(torch.tensor([5.0, -3.0]))
    optimizer = kind([w], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        (w**2).sum().backward()
        optimizer.step()
    assert w.abs().max().item() < 0.05


@pytest.mark.parametrize("frequency", [1, 2])
def test_schedulers_follow_rounds(frequency: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    config = LRSchedulerConfig(StepLR(optimizer, 2, 0.1), frequency=frequency)
    rates = []
    for rounds in range(1, 9):
        optimizer.step()
        for _ in range(2):  # a resumed run asks again
            step_schedulers([config], rounds, {})
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1 ** (rounds // frequency // 2) for rounds in range(1, 9)])


def test_plateaus_follow_a_metric() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    config = LRSchedulerConfig(ReduceLROnPlateau(optimizer, "max", 0.5, patience=0), monitor="val/acc")
    rates = []
    for rounds, score in enumerate((0.5, 0.6, 0.6, 0.7, 0.1), start=1):
        step_schedulers([config], rounds, {"val/acc": torch.tensor(score)})
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]
    with pytest.raises(FederationError, match=r"ReduceLROnPlateau follows 'val/acc', which no round logs: .* val/loss"):
        step_schedulers([config], 6, {"val/loss": 1.0})
