"""SCAFFOLD: its control variates, its limits, and the drift that it removes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.callbacks import FederatedCallback
from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedAvg
from fl_lightning.methods.scaffold import CHANGE, OWN, SERVER
from fl_lightning.nets import LeNetBN
from tests.support import blobs, fit, largest_difference, mlp, weights
from tests.support.engines import differ
from tests.support.problems import Point
from tests.support.stops import make

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])


class Watch(FederatedCallback):
    """Checks that c is the mean of all clients' c_i after every round."""

    worst = 0.0
    rounds = 0

    def on_round_end(self, trainer: Any, pl_module: Any, messages: Any) -> None:
        clients = pl_module.federation.num_clients
        for name, control in pl_module.server_control().items():
            zero = torch.zeros_like(control)
            own = [pl_module.snapshots[c].private.get(OWN + name, zero) for c in range(clients)]
            self.worst = max(self.worst, float((torch.stack(own).mean(0) - control).abs().max()))
        self.rounds += 1


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["plain", "momentum"])
def test_c_is_the_mean_of_all_c_i_with_partial_participation(options: dict[str, float]) -> None:
    watch = Watch()
    method = SCAFFOLD(mlp(), lr=0.1, batch_size=8, **options)
    fit(method, blobs((19, 9, 16, 8, 12, 30), fraction=0.5), rounds=6, callbacks=[watch])
    assert watch.rounds == 6
    assert watch.worst < 1e-12
    assert max(float(c.abs().max()) for c in method.server_control().values()) > 1e-3


@ENGINES
def test_round_one_equals_uniform_fedavg(engine: str) -> None:
    one = SCAFFOLD(mlp(), lr=0.1, epochs=2, batch_size=8, engine=engine)
    other = FedAvg(mlp(), lr=0.1, epochs=2, batch_size=8, weighting="uniform", engine=engine)
    for method in (one, other):
        fit(method, blobs(), rounds=1)
    assert largest_difference(weights(one), weights(other)) < 1e-14


def test_one_client_equals_fedavg() -> None:
    """With one client c = c_i: the correction vanishes in every round."""
    one, other = SCAFFOLD(mlp(), lr=0.1, batch_size=8), FedAvg(mlp(), lr=0.1, batch_size=8)
    for method in (one, other):
        fit(method, blobs([21]), rounds=4)
    assert largest_difference(weights(one), weights(other)) < 1e-12


def test_what_is_sent_is_the_change_of_c_i() -> None:
    method, seen = SCAFFOLD(mlp(), lr=0.1, batch_size=8), []
    leave = method.leave

    def watched(state: Any, received: Any, me: Any) -> Any:
        reply = up, keep = leave(state, received, me)
        seen.append(all(torch.equal(up[CHANGE + n], keep[OWN + n] - state[OWN + n]) for n in method.trainable_names))
        return reply

    method.leave = watched  # type: ignore[method-assign]
    fit(method, blobs(), rounds=3)
    assert seen == [True] * 12


@ENGINES
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.01}, {"momentum": 0.9, "weight_decay": 0.01}, {"clip_norm": 0.3}],
    ids=["plain", "decay", "momentum", "clipped"],
)
def test_steps_are_corrected_and_the_control_is_the_raw_mean(options: dict[str, Any], engine: str) -> None:
    """With a foreign c, by hand: v <- m v + clip(g - c_i + c) + wd y, y <- y - lr v, and c_i = mean(g + wd y)."""
    data = blobs([16, 16])
    method = SCAFFOLD(mlp(), lr=0.1, epochs=2, batch_size=8, engine=engine, **options)
    net = copy.deepcopy(method.net).double()
    generator = torch.Generator().manual_seed(1)
    for control in method.server_control().values():
        control.copy_(torch.randn(control.shape, generator=generator) * 0.1)
    foreign = {name: value.clone().double() for name, value in method.server_control().items()}
    sent: dict[str, Tensor] = {}
    method.on_before_aggregate = lambda messages: sent.update(messages[0].tensors)  # type: ignore[attr-defined]
    fit(method, data, rounds=1)
    from fl_lightning import seeding

    index, stream = data.federation.train[0], seeding.stream(0, "batches", 0, 0)
    momentum, decay = options.get("momentum", 0.0), options.get("weight_decay", 0.0)
    velocity = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for part in [part for _ in range(2) for part in index[seeding.permutation(stream, len(index))].split(8)]:
        net.zero_grad()
        output = net(data.federation.inputs[part].double())
        nn.functional.cross_entropy(output, data.federation.targets[part]).backward()
        with torch.no_grad():
            corrected = {name: p.grad + foreign[name] for name, p in net.named_parameters()}
            norm = torch.stack([g.pow(2).sum() for g in corrected.values()]).sum().sqrt()
            scale = min(1.0, options["clip_norm"] / float(norm + 1e-6)) if "clip_norm" in options else 1.0
            for name, p in net.named_parameters():
                total[name] += p.grad + decay * p
                velocity[name] = momentum * velocity[name] + scale * corrected[name] + decay * p
                p -= 0.1 * velocity[name]
    assert largest_difference({name: sent[name] for name in total}, net.state_dict()) < 1e-12
    own = {name: method.snapshots[0].private[OWN + name] for name in total}
    assert largest_difference(own, {name: value / 4 for name, value in total.items()}) < 1e-12


def quadratics(kind: type[FedAvg], rounds: int = 300) -> tuple[Tensor, Tensor]:
    """Clients minimise 1/2 a_i (w - t_i)^2: where they end, and the joint optimum."""

    class Quadratic(kind):  # type: ignore[misc, valid-type]
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return 0.5 * output.pow(2).sum(1).mean()

    generator = torch.Generator().manual_seed(0)
    t, a = torch.randn(6, 4, generator=generator), 0.2 + 1.8 * torch.rand(6, 4, generator=generator)
    x = torch.cat((t, a), 1).repeat_interleave(5, 0)
    train, test = [list(range(5 * i, 5 * i + 4)) for i in range(6)], [[5 * i + 4] for i in range(6)]
    data = TensorFederation(x, torch.arange(30) % 4, train=train, test=test, num_classes=4, val_fraction=0)
    method = Quadratic(Point(), lr=0.2, epochs=10, batch_size=4)
    fit(method, data, rounds=rounds, limit_val_batches=0)
    best = (a * t).double().sum(0) / a.double().sum(0)
    return method.net.w.detach(), best


def test_reaches_the_joint_optimum_where_fedavg_does_not() -> None:
    end, best = quadratics(SCAFFOLD)
    assert float((end - best).abs().max()) < 1e-6
    end, best = quadratics(FedAvg)
    assert float((end - best).abs().max()) > 0.05


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["plain", "momentum"])
@pytest.mark.parametrize("net", ["mlp", "bn"])
def test_engines_agree(net: str, options: dict[str, float]) -> None:
    def trained(engine: str) -> SCAFFOLD:
        torch.manual_seed(0)
        shape = (20,) if net == "mlp" else (1, 28, 28)
        made = mlp() if net == "mlp" else LeNetBN(num_classes=4)
        method = SCAFFOLD(made, lr=0.1, epochs=2, batch_size=8, engine=engine, **options)
        fit(method, blobs((19, 9, 16, 8), shape), rounds=3)
        return method

    one, two, three = (trained(engine) for engine in ("sequential", "stacked", "captured"))
    assert differ(one, two) < 1e-9
    assert differ(two, three) < 1e-12
    assert largest_difference(one.server_control(), two.server_control()) < 1e-9


def test_what_crosses_is_twice_the_model_and_never_c_i() -> None:
    method, up, down = SCAFFOLD(mlp()), set(), set()
    method.on_client_start = lambda client, message: down.update(message)  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: up.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    fit(method, blobs(fraction=0.25), rounds=1, precision="32-true")
    names = set(method.trainable_names)
    assert up == names | {CHANGE + name for name in names}
    assert down == names | {SERVER + name for name in names}
    scalars = sum(p.numel() for p in method.net.parameters())
    assert method.bytes_up == method.bytes_down == 2 * 4 * scalars


def test_buffers_that_clients_keep_are_those_they_are_evaluated_with() -> None:
    one, other = make(SCAFFOLD, buffers="keep"), make(FedAvg, buffers="keep")
    for method in (one, other):
        fit(method, blobs((19, 9, 16), (1, 28, 28)), rounds=1)  # in which SCAFFOLD is FedAvg
    for name in ("bn1.running_mean", "bn2.running_var"):
        torch.testing.assert_close(one.personal_state(1)[name], other.personal_state(1)[name])
        assert (one.personal_state(1)[name] - one.initial_buffers[name]).abs().max() > 1e-3


def test_steps_are_counted_beyond_what_half_a_float_can() -> None:
    """In bfloat16 256 + 1 is 256."""
    method = SCAFFOLD(mlp(), lr=0.001, epochs=60, batch_size=8, engine="sequential")
    counted: list[int] = []
    leave = method.leave

    def look(state: Any, received: Any, me: Any) -> Any:
        counted.append(me.steps)
        return leave(state, received, me)

    method.leave = look  # type: ignore[method-assign]
    fit(method, blobs([40]), rounds=1, precision="bf16-true", limit_val_batches=0)
    assert counted == [300]


LOW = [("32-true", 0.1, 1e-5), ("32-true", 1e-4, 1e-5), ("bf16-true", 0.1, 2e-2), ("bf16-true", 0.001, 2e-2)]


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(("precision", "lr", "bound"), LOW, ids=str)
def test_control_variates_keep_their_digits_in_low_precision(
    engine: str, precision: str, lr: float, bound: float
) -> None:
    """After one step c_i is the gradient at the first weights: by autograd in float64, of what was rounded alike."""
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    data, method = blobs([40, 27]), SCAFFOLD(mlp(), lr=lr, batch_size=64, engine=engine)
    net = mlp().to(dtype).double()
    fit(method, data, rounds=1, precision=precision, limit_val_batches=0)
    for client, index in enumerate(data.federation.train):
        net.zero_grad()
        x = data.federation.inputs[index].to(dtype).double()
        nn.functional.cross_entropy(net(x), data.federation.targets[index]).backward()
        right = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        own = method.snapshots[client].private
        found = torch.cat([own[OWN + name].double().flatten() for name, _ in net.named_parameters()])
        assert float((found - right).norm() / right.norm()) < bound


def test_control_variates_of_many_small_steps_are_those_of_double_precision() -> None:
    """Five steps of 1e-4 a round: x - y has three digits of them in float32."""
    one, other = (SCAFFOLD(mlp(), lr=1e-4, epochs=1, batch_size=8, engine="stacked") for _ in range(2))
    fit(one, blobs(), rounds=2, precision="32-true", limit_val_batches=0)
    fit(other, blobs(), rounds=2, precision="64-true", limit_val_batches=0)
    for client in range(4):
        found, right = (
            torch.cat([m.snapshots[client].private[OWN + name].double().flatten() for name in m.trainable_names])
            for m in (one, other)
        )
        assert float((found - right).norm() / right.norm()) < 1e-5


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["plain", "momentum"])
def test_a_client_that_takes_no_step_keeps_its_control_variate(options: dict[str, float]) -> None:
    """A batch of one cannot be normalised, so client 1 never steps; it says so, and is not left out."""
    net: Any = nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4))
    method = SCAFFOLD(net, lr=0.1, batch_size=8, engine="sequential", **options)
    run = fit(method, blobs((9, 1)), rounds=2)
    assert run.callback_metrics["clients/left_out"] == 0
    assert float(method.snapshots[1].private[OWN + "0.weight"].abs().max()) == 0
    half = method.snapshots[0].private[OWN + "0.weight"] / 2
    torch.testing.assert_close(method.server_control()["0.weight"], half)


def test_sample_weights_are_refused() -> None:
    with pytest.raises(FederationError, match="all clients have the same weight"):
        SCAFFOLD(mlp(), weighting="samples")
