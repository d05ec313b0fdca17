"""Diagonal curvature against autograd, against an outside library and against exact posteriors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.laplace import (
    DiagonalCurvature,
    categorical,
    client_curvature,
    posterior_variance,
)
from fl_lightning.nets import MLP, LeNet5, LeNetBN, LossNet, ResNet20
from fl_lightning.parties import LocalData
from tests.support import CLASSES, FEATURES, blobs, largest_difference, mlp
from tests.support.problems import Unused

State = dict[str, Tensor]


class Twice(nn.Module):
    """A fully connected layer that is used twice, one on sequences, one whose weight is tied, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(FEATURES, FEATURES)
        self.rows = nn.Linear(5, 5)
        self.tied = nn.Linear(FEATURES, FEATURES, bias=False)
        self.other = nn.Linear(FEATURES, FEATURES, bias=False)
        self.other.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.same(torch.tanh(self.same(x))))
        x = self.rows(x.view(-1, 4, 5)).flatten(1)
        return self.head(self.scale * self.other(torch.tanh(self.tied(x))))


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().double()


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: mlp(1), (FEATURES,)),
    "used twice": (Twice, (FEATURES,)),
    "lenet": (lambda: LeNet5(num_classes=CLASSES), (1, 28, 28)),
    "lenet_bn": (lambda: LeNetBN(num_classes=CLASSES), (1, 28, 28)),
    "root": (lambda: nn.Linear(FEATURES, CLASSES), (FEATURES,)),
}


def batch(shape: tuple[int, ...], n: int, models: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(models, n, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (models, n), generator=generator)


def stacked(*nets: nn.Module) -> State:
    states = [{**dict(net.named_parameters()), **dict(net.named_buffers())} for net in nets]
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def by_autograd(net: nn.Module, x: Tensor, y: Tensor) -> State:
    """Squares of each sample's own gradient, one backward pass per sample."""
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    net.eval()
    for n in range(len(x)):
        net.zero_grad()
        F.cross_entropy(net(x[n : n + 1]), y[n : n + 1]).backward()
        for name, p in net.named_parameters():
            total[name] += p.grad.square()  # type: ignore[union-attr]
    return total


@pytest.mark.parametrize("name", NETS)
def test_empirical_fisher_is_the_sum_of_squared_gradients_of_single_samples(name: str) -> None:
    make, shape = NETS[name]
    nets = [seeded(make), seeded(make)]
    with torch.no_grad():
        for p in nets[1].parameters():
            p.mul_(1.1)
    x, y = batch(shape, 5, 2)
    weight = torch.ones(2, 5, dtype=torch.float64)
    weight[1, 3:] = 0  # the second model has three samples
    found = DiagonalCurvature(nets[0])(stacked(*nets), x, y, weight)
    for k, samples in ((0, 5), (1, 3)):
        own = {name: value[k] for name, value in found.items()}
        assert largest_difference(own, by_autograd(nets[k], x[k, :samples], y[k, :samples])) < 1e-12


@pytest.mark.parametrize("kind", ["fisher", "ggn", "hessian"])
def test_parameters_that_do_not_reach_the_loss_have_no_curvature(kind: Any) -> None:
    """Their variance is the prior's."""
    net, (x, y) = seeded(Unused), batch((FEATURES,), 5)
    weight = torch.ones(1, 5, dtype=torch.float64)
    size = sum(p.numel() for p in net.parameters()) if kind == "hessian" else 5
    found = DiagonalCurvature(net, kind=kind)(stacked(net), x, y, weight, torch.full((1, size), 0.5).double())
    variance = posterior_variance(found, 5, 4.0)
    for name in ("never.weight", "never.bias", "nowhere.weight", "nowhere.bias", "free"):
        assert torch.equal(variance[name][0], torch.full_like(net.get_parameter(name), 1 / 4.0)), name
    assert bool((found["head.weight"] != 0).all())


def test_squares_of_the_mean_gradient_are_something_else() -> None:
    net, (x, y) = mlp(1).double(), batch((FEATURES,), 8)
    F.cross_entropy(net(x[0]), y[0], reduction="sum").backward()
    found = DiagonalCurvature(net)(stacked(net), x, y, torch.ones(1, 8, dtype=torch.float64))
    assert not torch.allclose(found["head.weight"][0], net.head.weight.grad.square(), rtol=0.1)  # type: ignore[union-attr]


def repeated(net: nn.Module, x: Tensor, y: Tensor, kind: Any, noise: Tensor) -> State:
    """Mean over draws, one model of a stack for each."""
    draws, n = len(noise), x.shape[1]
    states = {name: value.expand(draws, *value.shape[1:]) for name, value in stacked(net).items()}
    weight = torch.ones(draws, n, dtype=torch.float64)
    data = x.expand(draws, *x.shape[1:]), y.expand(draws, n)
    return {name: v.mean(0) for name, v in DiagonalCurvature(net, kind=kind)(states, *data, weight, noise).items()}


def strata(draws: int, n: int) -> Tensor:
    """Uniform numbers that lie evenly, so that drawn labels come in the right proportions, not only on average."""
    return ((torch.arange(draws, dtype=torch.float64) + 0.5) / draws)[:, None].expand(draws, n)


def orthogonal_signs(size: int) -> Tensor:
    """Signs z with mean z z^T = I: the mean of z * Hz over them is the diagonal of H, without chance."""
    return torch.from_numpy(hadamard(2 ** math.ceil(math.log2(size)))[:, :size].astype(float))


def test_ggn_with_drawn_labels_is_the_exact_ggn_on_average() -> None:
    net, (x, y) = mlp(1, hidden=()).double(), batch((FEATURES,), 4)
    p = net(x[0]).softmax(-1).detach()
    exact = torch.einsum("nc,ni->ci", p * (1 - p), x[0].square())  # J = x for the logits, H = diag(p) - p p^T
    found = repeated(net, x, y, "ggn", strata(10_000, 4))["head.weight"]
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=0)
    assert not torch.allclose(by_autograd(net, x[0], y[0])["head.weight"], exact, rtol=0.3)


def test_drawn_labels_follow_the_softmax() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()[None].expand(10_000, 4)
    uniform = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    assert torch.bincount(categorical(logits, uniform)).tolist() == [1000, 2000, 3000, 4000]
    assert int(categorical(torch.zeros(1, 4), torch.tensor([1.0]))) == 3  # a sum that falls short of 1


def test_hutchinson_is_the_diagonal_of_the_hessian_on_average() -> None:
    net, (x, y) = mlp(1, hidden=(3,)).double(), batch((FEATURES,), 6)
    names = [name for name, _ in net.named_parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [p.numel() for p in net.parameters()])
        state = {n: v.view_as(p) for n, v, p in zip(names, parts, net.parameters(), strict=True)}
        return F.cross_entropy(torch.func.functional_call(net, state, (x[0],)), y[0], reduction="sum")

    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    exact = torch.autograd.functional.hessian(loss, flat)
    signs = orthogonal_signs(len(flat))
    found = repeated(net, x, y, "hessian", signs)
    torch.testing.assert_close(torch.cat([found[name].flatten() for name in names]), exact.diagonal())
    one = repeated(net, x, y, "hessian", signs[3:4])
    torch.testing.assert_close(torch.cat([one[name].flatten() for name in names]), signs[3] * (exact @ signs[3]))


def gaussian(sigma: float) -> Any:
    """Negative log likelihood of y ~ N(f(x), sigma^2), up to a constant, mean over the batch."""
    return lambda output, target: ((output[:, 0] - target).square() / (2 * sigma**2)).mean()


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_linear_gaussian_model_has_its_exact_posterior_variance(kind: Any) -> None:
    """Orthogonal features, known noise, Gaussian prior: posterior covariance (X^T X / s^2 + delta I)^-1 is diagonal."""
    n, features, sigma, delta = 12, 4, 0.7, 2.5
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(n, features, generator=generator, dtype=torch.float64))
    x = q * torch.tensor([0.1, 1.0, 3.0, 10.0])
    y = torch.randn(n, generator=generator, dtype=torch.float64)
    exact = torch.linalg.inv(x.T @ x / sigma**2 + delta * torch.eye(features, dtype=torch.float64)).diagonal()
    net = MLP(in_features=features, hidden=(), num_classes=1).double()
    # Labels one standard deviation above or below: their variance is that of the noise, without chance.
    diagonal = DiagonalCurvature(
        net,
        loss=gaussian(sigma),
        kind=kind,
        labels=lambda output, u: output[:, 0] + sigma * (2 * (u > 0.5).to(output) - 1),
    )
    noise = torch.rand(1, n, generator=generator, dtype=torch.float64)
    signs = torch.tensor([[1.0, -1.0, -1.0, 1.0]], dtype=torch.float64)
    weight = torch.ones(1, n, dtype=torch.float64)
    total = diagonal(stacked(net), x[None], y[None], weight, signs if kind == "hessian" else noise)
    h = {name: value[0] / n for name, value in total.items()}
    torch.testing.assert_close(posterior_variance(h, n, delta)["head.weight"][0], exact, rtol=1e-10, atol=0)


def test_negative_estimates_count_as_zero_and_zero_gives_the_largest_variance() -> None:
    variance = posterior_variance({"w": torch.tensor([-3.0, 0.0, 1.0])}, samples=10, prior_precision=2.0)["w"]
    torch.testing.assert_close(variance, torch.tensor([0.5, 0.5, 1 / 12]))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_equals_an_independent_library() -> None:
    backpack = pytest.importorskip("backpack")
    from backpack.extensions import DiagGGNExact, DiagHessian, SumGradSquared

    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 3, 3), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 5), nn.Sigmoid(), nn.Linear(5, 4)
    )
    net, (x, y) = seeded(make), batch((1, 8, 8), 7)
    weight = torch.ones(1, 7, dtype=torch.float64)
    known = backpack.extend(seeded(make))
    criterion = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack.backpack(SumGradSquared(), DiagGGNExact(), DiagHessian()):
        criterion(known(x[0]), y[0]).backward()
    found = DiagonalCurvature(net)(stacked(net), x, y, weight)
    for name, p in known.named_parameters():
        torch.testing.assert_close(found[name][0], p.sum_grad_squared, rtol=1e-9, atol=1e-12)

    ggn = repeated(net, x, y, "ggn", strata(2000, 7))
    hessian = repeated(net, x, y, "hessian", orthogonal_signs(sum(p.numel() for p in net.parameters())))
    for name, p in known.named_parameters():
        torch.testing.assert_close(ggn[name], p.diag_ggn_exact, rtol=5e-3, atol=1e-5)
        torch.testing.assert_close(hessian[name], p.diag_h, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["fisher", "ggn", "hessian"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_results_of_a_client_do_not_depend_on_chunks_or_other_clients(kind: Any, chunk: int) -> None:
    """Ragged clients, their samples limited for the larger ones: the same as each client alone."""
    federation, net = blobs((40, 27, 33, 16)).federation, mlp(1).double()
    states = {c: {n: p.detach() * (1 + c) for n, p in net.named_parameters()} for c in range(4)}

    def found(clients: list[int], chunk: int) -> dict[int, State]:
        rngs = [seeding.stream(0, "laplace", 0, c) for c in clients]
        own, data = [states[c] for c in clients], [LocalData(federation, c) for c in clients]
        diagonal = DiagonalCurvature(net, kind=kind)
        return dict(zip(clients, client_curvature(diagonal, data, own, rngs, torch.float64, 30, chunk, 2), strict=True))

    together = found([2, 0, 3, 1], chunk)
    for client in range(4):
        assert largest_difference(together[client], found([client], 5)[client]) < 1e-12


def test_the_mean_is_over_the_samples_that_were_drawn() -> None:
    federation, net = blobs((12,)).federation, mlp(1).double()
    state = {name: p.detach() for name, p in net.named_parameters()}
    rngs = [seeding.stream(0, "laplace", 0, 0)]
    data = [LocalData(federation, 0)]
    (found,) = client_curvature(DiagonalCurvature(net), data, [state], rngs, torch.float64, 1024)
    index = federation.train[0]
    whole = by_autograd(net, federation.inputs[index].double(), federation.targets[index])
    assert largest_difference(found, {name: value / 12 for name, value in whole.items()}) < 1e-12


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("chunk", [4, 16])
def test_memory_is_bounded_by_the_chunk_whatever_the_number_of_samples(chunk: int) -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Conv2d(8, 32, 5), nn.AvgPool2d(4), nn.Flatten())
    net = seeded(lambda: net.append(nn.Linear(32, CLASSES)))
    weights = 32 * 8 * 25

    def largest(samples: int) -> int:
        federation = blobs((samples, samples), (1, 12, 12)).federation
        state = {name: p.detach() for name, p in net.named_parameters()}
        rngs = [seeding.stream(0, "laplace", 0, c) for c in (0, 1)]
        data = [LocalData(federation, c) for c in (0, 1)]
        with Largest() as seen:
            client_curvature(DiagonalCurvature(net), data, [state, state], rngs, torch.float64, samples, chunk)
        return seen.numel

    assert largest(64) == largest(128) == chunk * weights


def test_a_fully_connected_layer_needs_no_gradient_per_sample() -> None:
    net, (x, y) = mlp(1, hidden=(300,)).double(), batch((FEATURES,), 64)
    with Largest() as seen:
        DiagonalCurvature(net)(stacked(net), x, y, torch.ones(1, 64, dtype=torch.float64))
    assert seen.numel <= 64 * 300  # activations, not 64 times 300 x 20


def test_running_statistics_are_used_and_not_changed() -> None:
    net, (x, y) = seeded(lambda: ResNet20(num_classes=CLASSES)).train(), batch((3, 32, 32), 2)
    before = stacked(net)
    found = DiagonalCurvature(net)(before, x, y, torch.ones(1, 2, dtype=torch.float64))
    assert largest_difference({n: v[0] for n, v in found.items()}, by_autograd(net, x[0], y[0])) < 1e-9
    assert largest_difference(before, stacked(net)) == 0.0


class Margin(LossNet):
    """Brings its own loss, in which it uses a layer twice that its scores need once."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, batch: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if not isinstance(batch, tuple):
            return self.head(torch.tanh(self.fc(batch)))
        x, y = batch
        target = (y[:, None] == torch.arange(CLASSES)).to(x.dtype)
        return (self(x) - target).square().sum(1).mean() + self.head(torch.tanh(self.fc(-x))).square().sum(1).mean()


@pytest.mark.parametrize("kind", ["fisher", "hessian"])
def test_a_nets_own_loss_is_what_is_differentiated(kind: Any) -> None:
    net, (x, y) = seeded(Margin), batch((FEATURES,), 4)
    names = [name for name, _ in net.named_parameters()]
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])

    def loss(flat: Tensor, n: int) -> Tensor:
        parts = torch.split(flat, [p.numel() for p in net.parameters()])
        state = {name: v.view_as(p) for name, v, p in zip(names, parts, net.parameters(), strict=True)}
        return torch.func.functional_call(net, state, ((x[0, n : n + 1], y[0, n : n + 1]),))

    signs = orthogonal_signs(len(flat)) if kind == "hessian" else torch.ones(1, 4, dtype=torch.float64)
    found = repeated(net, x, y, kind, signs)
    if kind == "fisher":
        expected = sum(torch.autograd.functional.jacobian(partial(loss, n=n), flat).square() for n in range(4))
    else:
        expected = sum(torch.autograd.functional.hessian(partial(loss, n=n), flat).diagonal() for n in range(4))
    torch.testing.assert_close(torch.cat([found[name].flatten() for name in names]), expected)


def test_labels_cannot_be_drawn_for_a_nets_own_loss() -> None:
    with pytest.raises(FederationError, match="'ggn' draws labels from the net's scores, which is impossible"):
        DiagonalCurvature(Margin(), kind="ggn")


def test_an_unknown_curvature_is_refused() -> None:
    with pytest.raises(FederationError, match="kind must be fisher, ggn or hessian, not 'exact'"):
        DiagonalCurvature(mlp(), kind="exact")  # type: ignore[arg-type]
