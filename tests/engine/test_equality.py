"""All engines give equal results for all nets, sizes, orders and stacks."""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import methods, seeding
from fl_lightning.engine import Batch, CapturedEngine, captured
from fl_lightning.engine.compiled import CompiledEngine
from fl_lightning.engine.schedule import StackSamples
from fl_lightning.methods import (
    FedAvg,
    FedProx,
    Local,
    PFedMe,
)
from fl_lightning.module import FederatedModule
from fl_lightning.nets import LeNetBN
from fl_lightning.wire import Message, State
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, sgd, weights
from tests.support.engines import IMAGE, METHODS, NETS, differ, seeded, trained


@pytest.fixture(autouse=True)
def _trace_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are short: a captured step is traced the first time it is seen."""
    monkeypatch.setattr(CapturedEngine, "seldom", 0)


class Constant(nn.Module):
    """Scales its inputs by numbers that no checkpoint keeps, and counts its calls, which are forgotten."""

    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, FEATURES), persistent=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * self.fc(x * self.scale)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"clip_norm": 0.05}], ids=["plain", "momentum", "clip"]
)
def test_stacked_equals_sequential(net: str, options: dict[str, float]) -> None:
    one, other = (trained(FedAvg, net, engine=engine, **options) for engine in ("sequential", "stacked"))
    assert differ(one, other) < 1e-9


@pytest.mark.parametrize("kind", METHODS)
def test_captured_equals_stacked_for_every_method(kind: type[FederatedModule]) -> None:
    """But for the rounding of gradients that are multiplied straight into the weights."""
    one, other = (trained(kind, "mlp", engine=engine, **METHODS[kind]) for engine in ("stacked", "captured"))
    assert differ(one, other) < 1e-12


class Chunked(nn.Module):
    """Multiplies a parameter by one half of another, both of which are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.ab = nn.Parameter(0.3 * torch.randn(8, FEATURES))
        self.c = nn.Parameter(0.3 * torch.randn(4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.ab.chunk(2)
        return x @ (a.T @ self.c) + x @ b.T


def test_a_captured_update_does_not_read_entries_that_another_has_changed() -> None:
    runs = []
    for engine in ("stacked", "captured"):
        method = PFedMe(seeded(Chunked), lr=0.05, personal_lr=0.05, epochs=2, batch_size=8, engine=engine)
        fit(method, blobs(), rounds=1)
        runs.append(method)
    assert differ(*runs) < 1e-12


def test_every_method_is_tested() -> None:
    assert set(METHODS) == {kind for kind in vars(methods).values() if isinstance(kind, type)}


@pytest.mark.parametrize("net", ["lenet_bn", "dropout", "reassigned buffer"])
def test_captured_equals_stacked_for_every_net(net: str) -> None:
    options = {"momentum": 0.9, "weight_decay": 0.1}
    one, other = (trained(Local, net, engine=engine, **options) for engine in ("stacked", "captured"))
    assert differ(one, other) < 1e-11


def test_captured_steps_may_have_constants() -> None:
    runs = []
    for engine in ("stacked", "captured"):
        method = FedAvg(seeded(Constant), lr=0.05, epochs=2, batch_size=8, engine=engine)
        fit(method, blobs((16, 16)), rounds=1, limit_val_batches=0)
        runs.append(method)
    assert differ(*runs) < 1e-12


@pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
def test_values_that_change_between_steps_are_not_frozen(engine: str) -> None:
    """A loss scaled by a schedule that changes at every step, epoch and round, against a loop by hand."""

    class Scheduled(FedAvg):
        def client_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
            loss, buffers = super().client_loss(state, batch)
            s = batch.scalars
            return loss * (1 + s["step"] + 10 * s["epoch"] + 100 * s["round"]) / s["samples"], buffers

    data, method = blobs([20, 20]), Scheduled(mlp(), lr=0.01, epochs=2, batch_size=8, engine=engine)
    method.cohort = lambda round: [0, 1]  # type: ignore[method-assign]
    net = mlp().double()
    fit(method, data, rounds=2)
    federation = data.federation
    for round in range(2):
        moved = []
        for client in (0, 1):
            own, rng, step = copy.deepcopy(net), seeding.stream(0, "batches", round, client), 0
            for epoch in range(2):
                index = federation.train[client][seeding.permutation(rng, 20)]
                for part in index.split(8):
                    scale = (1 + step + 10 * epoch + 100 * round) / 20
                    batch = [(federation.inputs[part].double(), federation.targets[part])]
                    sgd(own, batch, lr=0.01 * scale)
                    step += 1
            moved.append(own.state_dict())
        net.load_state_dict({name: (moved[0][name] + moved[1][name]) / 2 for name in moved[0]})
    assert largest_difference(weights(method), net.state_dict()) < 1e-9


def test_rare_steps_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they would have paid off, by the round and the clients' sizes alone: a resumed run does the same."""

    made: list[int] = []
    trace = captured.Trace.__init__
    monkeypatch.setattr(captured.Trace, "__init__", lambda *args: (made.append(1), trace(*args))[1])

    def traces(seldom: int) -> int:
        monkeypatch.setattr(CapturedEngine, "seldom", seldom)
        made.clear()
        method = FedAvg(mlp(), lr=0.1, epochs=5, batch_size=8, engine="captured")
        fit(method, blobs((16, 16)), rounds=2)  # two full batches an epoch for both: ten equal steps a round
        return len(made)

    assert (traces(0), traces(20), traces(21)) == (1, 1, 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_steps_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledEngine, "worth", 5)  # of two clients' two steps, one has ten in two rounds
    made: list[object] = []
    runner = CompiledEngine.runner
    monkeypatch.setattr(CompiledEngine, "runner", lambda *args: (made.append(runner(*args)), made[-1])[1])
    one, other = (trained(FedAvg, "mlp", (16, 16), engine=engine) for engine in ("stacked", "compiled"))
    assert differ(one, other) < 1e-12
    assert any(getattr(run, "__name__", "") == "checked" for run in made)


def test_traces_are_dropped_between_runs() -> None:
    method = FedProx(mlp(), mu=0.0, lr=0.1, engine="captured")
    fit(method, blobs(), rounds=1)
    method.mu = 5.0
    start = {name: value.clone() for name, value in weights(method).items()}
    fit(method, blobs(), rounds=1)
    other = FedProx(mlp(), mu=5.0, lr=0.1, engine="stacked")
    other.net.double().load_state_dict(start)
    fit(other, blobs(), rounds=1)
    assert largest_difference(weights(method), weights(other)) < 1e-12


@pytest.mark.parametrize("kind", [FedProx, Local])
@pytest.mark.parametrize("net", ["mlp", "lenet_bn"])
def test_stacked_equals_sequential_for_every_method(kind: type[FederatedModule], net: str) -> None:
    one, other = (trained(kind, net, engine=engine) for engine in ("sequential", "stacked"))
    assert differ(one, other) < 1e-9


@pytest.mark.parametrize("width", [1, 2, 3, 4, 16])
def test_clients_per_stack_do_not_matter(width: int) -> None:
    one = trained(Local, "lenet_bn", engine="stacked", clients_per_stack=4)
    other = trained(Local, "lenet_bn", engine="stacked", clients_per_stack=width)
    assert differ(one, other) < 1e-9


@pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
def test_cohort_order_does_not_matter(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trained(FedAvg, "dropout", engine=engine)
    cohort = FedAvg.cohort
    monkeypatch.setattr(FedAvg, "cohort", lambda self, round: cohort(self, round)[::-1])
    other = trained(FedAvg, "dropout", engine=engine)
    assert differ(one, other) < 1e-9


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_threads_do_not_matter(engine: str) -> None:
    one = trained(FedAvg, "lenet", engine=engine)
    torch.set_num_threads(2)
    other = trained(FedAvg, "lenet", engine=engine)
    assert differ(one, other) < 1e-9


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_client_trains_the_same_in_any_cohort(engine: str) -> None:
    """Streams belong to the client: it does not notice the rest of the cohort."""
    alone = trained(Local, "dropout", sizes=(19,), engine=engine)
    together = trained(Local, "dropout", sizes=(19, 9, 16, 8), engine=engine)
    own, same = alone.snapshots[0].private, together.snapshots[0].private
    assert largest_difference(own, same) < 1e-9


@pytest.mark.parametrize("most", [0, StackSamples.most])
def test_samples_cached_for_a_round_equal_those_gathered_at_every_step(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Augmented ones are never kept: they change with every epoch."""
    monkeypatch.setattr(StackSamples, "most", most)

    def noisy(x: Tensor, rng: np.random.Generator) -> Tensor:
        return x + torch.from_numpy(rng.normal(size=tuple(x.shape))).to(x.dtype)

    maps = torch.stack([torch.randperm(CLASSES, generator=torch.Generator().manual_seed(k)) for k in range(4)])
    runs = []
    for options in ({}, {"transform": noisy, "augment": True}, {"label_maps": maps}):
        for engine in ("sequential", "stacked"):
            method = FedAvg(mlp(), lr=0.1, epochs=3, batch_size=8, engine=engine)
            fit(method, blobs((19, 9, 16, 8), **options), rounds=2)
            runs.append(weights(method))
    assert all(largest_difference(runs[i], runs[i + 1]) < 1e-9 for i in (0, 2, 4))
    assert min(largest_difference(runs[0], runs[2]), largest_difference(runs[0], runs[4])) > 1e-3


def test_dropout_differs_between_clients_rounds_and_seeds() -> None:
    def first(seed: int) -> dict[str, Tensor]:
        return trained(FedAvg, "dropout", engine="stacked", seed=seed).net.state_dict()

    assert largest_difference(first(0), first(0)) == 0.0
    assert largest_difference(first(0), first(1)) > 1e-3


def test_a_batch_of_one_is_dropped_with_batch_normalisation() -> None:
    """9 samples in batches of 8: the last one has no variance to normalise by."""
    bn = trained(Local, "lenet_bn", sizes=(9, 8))
    plain = trained(Local, "lenet", sizes=(9, 8))
    assert [bn.snapshots[c].steps for c in (0, 1)] == [4, 4]  # 2 rounds of 2 epochs
    assert [plain.snapshots[c].steps for c in (0, 1)] == [8, 4]


def test_batchnorm_buffers_reach_others_only_through_the_aggregate() -> None:
    """A client's message after one round does not depend on who else trained."""

    def sent(sizes: tuple[int, ...], engine: str) -> dict[str, Tensor]:
        method = FedAvg(seeded(lambda: LeNetBN(num_classes=CLASSES)), lr=0.1, batch_size=8, engine=engine)
        sent: list[Message] = []
        method.on_before_aggregate = sent.extend  # type: ignore[attr-defined]
        fit(method, blobs(sizes, IMAGE), rounds=1)
        return sent[0].tensors

    for engine in ("sequential", "stacked"):
        assert largest_difference(sent((19,), engine), sent((19, 24, 8), engine)) < 1e-9


class Averaging(nn.Module):
    """Writes to a buffer in place that is no entry of its state, and reads another that stays as it is."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=False)
        self.register_buffer("scale", torch.full((FEATURES,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.fc((x - self.mean) * self.scale)


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_non_persistent_buffers_do_not_leak_between_clients(engine: str) -> None:
    methods = [Local(seeded(Averaging), lr=0.1, batch_size=8, engine=engine) for _ in range(2)]
    fit(methods[0], blobs((19,)), rounds=1)
    fit(methods[1], blobs((19, 24, 8)), rounds=1)
    own, same = (method.snapshots[0].private for method in methods)
    assert largest_difference(own, same) < 1e-9
    skeleton = methods[1].functional.skeleton
    assert float(skeleton.mean.abs().max()) == 0.0


def test_engines_never_write_to_the_state_they_are_given() -> None:
    from fl_lightning.engine import Job, make_engine

    method = FedProx(seeded(lambda: LeNetBN(num_classes=CLASSES)).double(), lr=0.1, batch_size=8)
    data = blobs((19, 9), IMAGE)
    for engine in ("sequential", "stacked", "captured"):
        for clients in ([0], [0, 1]):
            mes = [method.simulation.me(c, method.setting()) for c in clients]
            jobs = [Job(me.client, method.enter(method.message_down(me.client), me)) for me in mes]
            before = {k: v.clone() for k, v in jobs[0].state.items()}
            make_engine(engine).train(method, data.federation, jobs, 0)
            assert largest_difference(before, jobs[0].state) == 0.0
