"""Private SGD: per-sample gradients equal opacus', noise has the stated scale, engines agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.callbacks import PrivateSGDCallback
from fl_lightning.engine import CapturedEngine, Job, SequentialEngine, StackedEngine
from fl_lightning.engine.contract import Batch
from fl_lightning.engine.per_sample import PREFIX, PrivateSGD, per_sample
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.privacy.accounting import gaussian_epsilon
from fl_lightning.secret import SecretStream
from tests.support import CLASSES, FEATURES, blobs, fit, mlp


def private(method: Any, bound: float = 0.3, noise: float = 0.0, key: bytes = b"k") -> PrivateSGD:
    shapes = {name: p.shape for name, p in method.net.named_parameters()}
    return PrivateSGD(method, bound, noise, shapes, lambda: SecretStream(key).normal)


def trained(engine: Any, method: Any, data: Any, **kwargs: Any) -> list[dict[str, Tensor]]:
    federation = data.federation
    method.double()
    state = {name: value.detach().clone() for name, value in method.net.state_dict().items()}
    if isinstance(method, FedProx):
        state |= {f"received.{name}": value.clone() for name, value in state.items()}
    jobs = [Job(client, state) for client in range(federation.num_clients)]
    return [result.state for result in engine.train(private(method, **kwargs), federation, jobs, 0)]


def test_one_step_by_hand() -> None:
    """The mean of gradients that are each scaled to the bound."""
    net, bound = mlp().double(), 0.3
    method = FedAvg(net)
    x, y = torch.randn(6, FEATURES).double(), torch.arange(6) % CLASSES
    state = {name: value.detach() for name, value in net.state_dict().items()}
    noise = {PREFIX + name: torch.zeros_like(value) for name, value in state.items()}
    (phase,) = method.phases()
    update = per_sample(method.descend, bound, 0.0)(state, Batch(x, y, noise, {}), phase, None)  # type: ignore[arg-type]
    total = {name: torch.zeros_like(value) for name, value in state.items()}
    clipped = 0
    for i in range(6):
        grads = torch.autograd.grad(F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        clipped += bool(norm > bound)
        for name, g in zip(state, grads, strict=True):
            total[name] += g * min(1.0, bound / float(norm)) / 6
    assert clipped > 0
    for name, value in total.items():
        torch.testing.assert_close(update.grads[name], value, rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_opacus() -> None:
    opacus = pytest.importorskip("opacus", reason="opacus is not installed: pip install '.[privacy]'")
    net, bound = mlp().double(), 0.3
    method = FedAvg(net)
    x, y = torch.randn(6, FEATURES).double(), torch.arange(6) % CLASSES
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    noise = {PREFIX + name: torch.zeros_like(value) for name, value in state.items()}
    (phase,) = method.phases()
    ours = per_sample(method.descend, bound, 0.0)(state, Batch(x, y, noise, {}), phase, None).grads  # type: ignore[arg-type]
    wrapped = opacus.GradSampleModule(mlp().double())
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), 1.0), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=6
    )
    F.cross_entropy(wrapped(x), y).backward()
    optimizer.pre_step()
    for name, parameter in wrapped._module.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
def test_engines_agree(kind: Any) -> None:
    def run(engine: Any) -> list[dict[str, Tensor]]:
        return trained(engine, kind(mlp(), lr=0.5, batch_size=8, epochs=2, momentum=0.5), blobs(), noise=1.0)

    first = run(SequentialEngine())
    for engine in (StackedEngine(), CapturedEngine()):
        for mine, theirs in zip(first, run(engine), strict=True):
            for name in mine:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-8, atol=1e-10)


def test_noise_has_the_stated_size() -> None:
    """One step on one batch of 16 without a gradient: the weights move by lr * noise * bound / 16."""
    data = blobs((16,))
    method = FedAvg(mlp(hidden=(300,)), lr=1.0, batch_size=16)
    (plain,) = trained(StackedEngine(), method, data, noise=0.0)
    method = FedAvg(mlp(hidden=(300,)), lr=1.0, batch_size=16)
    (noisy,) = trained(StackedEngine(), method, data, noise=4.0)
    moved = torch.cat([(noisy[name] - plain[name]).flatten() for name in plain])
    assert float(moved.std()) == pytest.approx(4.0 * 0.3 / 16, rel=0.05)


def test_convolutions() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES)
        )

    found = [
        trained(e(), FedAvg(net(), lr=0.5, batch_size=8), blobs(shape=(1, 4, 4)), noise=1.0)
        for e in (SequentialEngine, StackedEngine)
    ]
    for mine, theirs in zip(*found, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-8)


def test_batch_norm_is_refused() -> None:
    net: Any = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    with pytest.raises(FederationError, match="use GroupNorm"):
        trained(SequentialEngine(), FedAvg(net, batch_size=8), blobs())


def test_callback_and_the_epsilon_of_every_site() -> None:
    callback = PrivateSGDCallback(1.0, 4.0, delta=1e-3)
    method = FedAvg(mlp(), lr=0.1, epochs=2, batch_size=8, engine="stacked")
    run = fit(method, blobs(fraction=0.5), 3, callbacks=[callback])
    rounds = {client: method.snapshots[client].rounds for client in method.snapshots}
    assert callback.sites() == pytest.approx(
        {c: gaussian_epsilon(4.0 / (2 * n) ** 0.5, 1e-3) for c, n in rounds.items()}
    )
    assert float(run.callback_metrics["privacy/epsilon_samples"]) == pytest.approx(max(callback.sites().values()))
    assert "moves" not in vars(method)
    quiet, plain = (FedAvg(mlp(), lr=0.1, batch_size=8, engine="stacked") for _ in range(2))
    fit(quiet, blobs(), 1, callbacks=[PrivateSGDCallback(1e9, 0.0)])
    fit(plain, blobs(), 1)
    for mine, theirs in zip(quiet.net.parameters(), plain.net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    with pytest.raises(FederationError, match="set workers=1"):
        fit(FedAvg(mlp(), workers=2, engine="sequential"), blobs(), 1, callbacks=[PrivateSGDCallback()])
