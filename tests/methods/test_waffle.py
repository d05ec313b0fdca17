"""WAFFLe and its L1 ablation: the objective by hand, what crosses, what stays, who is evaluated with what."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import seeding
from fl_lightning.datamodules import TensorFederation
from fl_lightning.distributions import prior_mean
from fl_lightning.engine import Batch
from fl_lightning.engine.gradient import eager_gradient
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, WAFFLe, WAFFLeL1
from fl_lightning.methods.lib.factorized import FactorizedModule
from fl_lightning.module import FederatedModule
from fl_lightning.nets import MLP, CNNFashion, FactorizedLinear, FedNet, LeNet5, LeNetBN, factorize
from fl_lightning.snapshots import ClientSnapshot
from fl_lightning.wire import State
from tests.support import CLASSES, FEATURES, RAGGED, blobs, fit, gathered, largest_difference, mlp, trainer, weights

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked"])
SCHEDULES = pytest.mark.parametrize("schedule", ["alternate", "joint"])
FACTORS = 12
OWN = {"fc1.logits", "fc1.c", "fc1.d"}


def waffle(kind: type[FactorizedModule] = WAFFLe, net: nn.Module | None = None, **kwargs: Any) -> Any:
    settings = {"factors": {"fc1": FACTORS}, "lr": 0.1, "epochs": 3, "batch_size": 8, "engine": "stacked"}
    return kind(mlp() if net is None else net, **gathered(kind, {**settings, **kwargs}))


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def outputs(method: FactorizedModule, client: int, data: TensorFederation) -> Tensor:
    x = data.federation.inputs[data.federation.test[client]].double()
    return method.call(method.personal_state(client), x, training=False)[0].detach()


def training_loss(method: FactorizedModule, state: State, data: TensorFederation, client: int) -> float:
    x, y = data.federation.gather([client], data.federation.train[client][None], torch.float64)
    return float(F.cross_entropy(method.call(state, x[0], training=False)[0], y[0]))


def state_of(method: FederatedModule) -> dict[str, Tensor]:
    state = {f"server.{name}": value for name, value in weights(method).items()}
    for client in method.snapshots:
        state |= {f"{client}.{name}": value for name, value in method.snapshots[client].private.items()}
    return state


# ---- the objective, written out ----------------------------------------------------------------------------------


class Reference:
    """One client's round in plain autograd: the weight and all probabilities are built as the paper writes them."""

    def __init__(self, method: WAFFLe, data: TensorFederation, client: int, seed: int = 0) -> None:
        self.method, self.federation, self.client = method, data.federation, client
        self.index = data.federation.train[client]
        self.order = seeding.stream(seed, "batches", 0, client)
        self.noise = seeding.stream(seed, "noise", 0, client)
        factors = len(method.net.fc1.r)  # type: ignore[union-attr, arg-type]
        self.alpha = 0.8 * factors
        mean = (self.alpha / (self.alpha + 1)) ** np.arange(1, factors + 1)
        logits = torch.from_numpy(np.log(mean / (1 - mean)))
        inverse = [float(np.log(np.expm1(value - 1e-3))) for value in (self.alpha, 1.0)]
        self.own = {"a": logits, "c": torch.full_like(logits, inverse[0]), "d": torch.full_like(logits, inverse[1])}
        self.weights = {k: v.detach().double().clone() for k, v in method.net.named_parameters()}

    def loss(self, x: Tensor, y: Tensor, u_b: Tensor, u_v: Tensor, kl: bool) -> Tensor:
        a, w = self.own["a"], self.weights
        b = torch.sigmoid((a + torch.log(u_b / (1 - u_b))) / (2 / 3))
        dense = w["fc1.wa"] @ torch.diag(w["fc1.r"] * b) @ w["fc1.wb"]
        hidden = torch.relu(x @ dense.T + w["fc1.bias"])
        loss = F.cross_entropy(hidden @ w["head.weight"].T + w["head.bias"], y)
        if not kl:
            return loss
        pi = torch.sigmoid(a)
        c, d = F.softplus(self.own["c"]) + 1e-3, F.softplus(self.own["d"]) + 1e-3
        p = torch.cumprod((1 - u_v ** (1 / d)) ** (1 / c), 0)
        kl_b = pi * torch.log(pi / p) + (1 - pi) * torch.log((1 - pi) / (1 - p))
        gamma = 0.5772156649015329
        kl_v = (c - self.alpha) / c * (-gamma - torch.digamma(d) - 1 / d) + torch.log(c * d / self.alpha) - (d - 1) / d
        return loss + self.method.posterior.kl_weight * (kl_b + kl_v).sum() / len(self.index)

    def epoch(self, own: bool, weights: bool) -> None:
        order = self.index[seeding.permutation(self.order, len(self.index))].split(8)
        u_b, u_v = (
            torch.from_numpy(1e-6 + (1 - 2e-6) * self.noise.random((len(order), len(self.own["a"])))) for _ in range(2)
        )
        for step, part in enumerate(order):
            trained = [*(self.own.values() if own else ()), *(self.weights.values() if weights else ())]
            for value in trained:
                value.requires_grad_()
            x, y = self.federation.inputs[part].double(), self.federation.targets[part]
            grads = torch.autograd.grad(self.loss(x, y, u_b[step], u_v[step], own), trained)
            with torch.no_grad():
                for value, grad in zip(trained, grads, strict=True):
                    mult = self.method.vi_lr_mult if value is self.own["a"] else 1.0
                    value.requires_grad_(False).sub_(self.method.local.lr * mult * grad)
                self.own["a"].clamp_(-8, 8)


@ENGINES
@SCHEDULES
def test_a_round_equals_the_formulas(engine: str, schedule: str) -> None:
    data = blobs()
    method = waffle(schedule=schedule, engine=engine, vi_lr_mult=20.0, kl_weight=0.7)
    references = [Reference(method, data, client) for client in range(4)]
    fit(method, data, rounds=1)
    for client, reference in enumerate(references):
        for epoch in range(3):
            first = epoch < 1
            reference.epoch(own=schedule == "joint" or first, weights=schedule == "joint" or not first)
        private = method.snapshots[client].private
        expected = {"fc1.logits": reference.own["a"], "fc1.c": reference.own["c"], "fc1.d": reference.own["d"]}
        assert largest_difference(private, expected) < 1e-9
    mean = {name: torch.stack([r.weights[name] for r in references]).mean(0) for name in references[0].weights}
    server = {name: value for name, value in weights(method).items() if name != "fc1.mask"}
    assert largest_difference(server, mean) < 1e-9  # unweighted, though the clients are not of one size


def test_all_clients_start_at_the_prior() -> None:
    method = waffle(net=MLP(), factors={"fc1": 120})
    initial = method.initial("fc1", 120)
    mean = torch.tensor([(96 / 97) ** k for k in range(1, 121)])
    torch.testing.assert_close(initial["logits"].sigmoid(), mean.clamp(0.05, 0.95))
    torch.testing.assert_close(F.softplus(initial["c"]) + 1e-3, torch.full((120,), 96.0))
    torch.testing.assert_close(F.softplus(initial["d"]) + 1e-3, torch.ones(120))
    own = {name: value.double() for name, value in initial.items()}
    _, kl_v = method.divergence(own, torch.full((120,), 0.5).double().log(), 96.0)
    assert float(kl_v) == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(method.net.fc1.r, torch.ones(120), check_dtype=True)


def test_logits_keep_within_their_bound() -> None:
    method = waffle(vi_lr_mult=1e6)
    fit(method, blobs(), rounds=1)
    logits = method.snapshots[0].private["fc1.logits"]
    assert float(logits.abs().max()) == 8.0
    assert len(logits.unique()) <= 3


def test_selection_alone_moves_in_the_selection_phase() -> None:
    first, second = waffle(epochs=5, selection_epochs=2).phases()
    assert (first.epochs, second.epochs) == (2, 3)
    assert set(first.trainable) == OWN
    assert set(second.trainable) == {"fc1.wa", "fc1.wb", "fc1.r", "fc1.bias", "head.weight", "head.bias"}
    (joint,) = waffle(epochs=5, schedule="joint").phases()
    assert joint.epochs == 5
    assert set(joint.trainable) == set(first.trainable) | set(second.trainable)


def test_local_sgd_is_given_the_gradients_of_the_weights_alone() -> None:
    """So that clipping, weight decay and momentum do not see those of the selection."""
    method = waffle(schedule="joint")
    (phase,) = method.phases()
    noise = {name: value[0] for name, value in method.draw_noise(np.random.default_rng(0), 1).items()}
    batch = Batch(torch.randn(8, FEATURES), torch.arange(8) % CLASSES, noise, {"samples": torch.tensor(30.0)})
    begun = method.enter(method.message_down(0), method.simulation.me(0, method.setting()))
    update = method.descend(begun, batch, phase, eager_gradient)
    assert set(update.grads) == set(method.trainable_names)
    assert set(update.replace) == OWN


def test_momentum_decay_and_clipping_are_for_the_weights() -> None:
    """In the selection phase nothing but the selection moves, so they make no difference to it."""
    plain, dressed = (
        waffle(epochs=2, lr=0.05, **options)
        for options in ({}, {"momentum": 0.9, "weight_decay": 0.5, "clip_norm": 0.01})
    )
    for method in (plain, dressed):
        fit(method, blobs(), rounds=1)
    assert largest_difference(plain.snapshots[0].private, dressed.snapshots[0].private) == 0.0
    assert largest_difference(weights(plain), weights(dressed)) > 1e-3


# ---- equalities --------------------------------------------------------------------------------------------------


class AllFactors(WAFFLe):
    """WAFFLe with b = 1."""

    def training_masks(self, state: State, noise: State) -> State:
        return {f"{layer}.mask": torch.ones_like(state[f"{layer}.logits"]) for layer in self.factors}


@ENGINES
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_all_factors_without_kl_equal_fedavg_on_factors(engine: str, precision: str) -> None:
    net = factorize(mlp(), {"fc1": FACTORS})
    ours = waffle(AllFactors, copy.deepcopy(net), schedule="joint", kl_weight=0.0, engine=engine)
    avg = FedAvg(net, lr=0.1, epochs=3, batch_size=8, weighting="uniform", engine=engine)  # type: ignore[arg-type]
    for method in (ours, avg):
        fit(method, blobs(), precision=precision)
    assert largest_difference(weights(ours), weights(avg)) == 0.0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WAFFLe, {"schedule": "alternate"}),
        (WAFFLe, {"schedule": "joint"}),
        (WAFFLe, {"momentum": 0.5, "weight_decay": 0.01, "clip_norm": 1.0, "dictionary": "cached"}),
        (WAFFLeL1, {"score_lr_mult": 2.0}),
        (WAFFLeL1, {"never_sampled": "adapt"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("net", ["mlp", "lenet", "lenet_bn"])
def test_all_engines_agree(kind: type[FactorizedModule], options: dict[str, Any], net: str) -> None:
    nets: dict[str, tuple[Any, Any]] = {
        "mlp": (mlp, {"fc1": FACTORS}),
        "lenet": (lambda: LeNet5(num_classes=CLASSES), {"conv1": 5, "conv2": 7, "fc1": 9}),
        "lenet_bn": (lambda: LeNetBN(num_classes=CLASSES), {"conv2": 7, "fc1": 9}),
    }
    make, factors = nets[net]
    methods = []
    for engine in ("sequential", "stacked", "captured"):
        method = waffle(kind, seeded(make), factors=factors, engine=engine, **options)
        fit(method, blobs((19, 9, 16, 8), (FEATURES,) if net == "mlp" else (1, 28, 28), fraction=0.5), rounds=2)
        methods.append(method)
    one, *others = methods
    never = next(client for client in range(4) if client not in one.snapshots)
    for other in others:
        assert largest_difference(state_of(one), state_of(other)) < 1e-9
        assert largest_difference(one.personal_state(never), other.personal_state(never)) < 1e-9


# ---- what crosses, what stays ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factors", "scalars"), [(80, 80_800), (100, 100_500), (120, 120_200), (150, 149_750)])
def test_transmitted_scalars_of_the_mnist_mlp(factors: int, scalars: int) -> None:
    message = waffle(net=MLP(), factors={"fc1": factors}).message_down(0)
    assert sum(value.numel() for value in message.values()) == scalars
    assert set(message) == {"fc1.wa", "fc1.wb", "fc1.r", "head.weight"}


def test_transmitted_scalars_of_the_fashion_network() -> None:
    message = waffle(net=CNNFashion(), factors={"conv1": 25, "conv2": 25}).message_down(0)
    assert sum(value.numel() for value in message.values()) == 27_555


@pytest.mark.parametrize(
    ("kind", "options", "private"),
    [
        (WAFFLe, {}, OWN),
        (WAFFLe, {"schedule": "joint", "dictionary": "cached"}, OWN),
        (WAFFLeL1, {}, {"fc1.scores"}),
    ],
    ids=["alternate", "joint-cached", "l1"],
)
def test_selections_never_cross(kind: type[FactorizedModule], options: dict[str, Any], private: set[str]) -> None:
    shared = {"fc1.wa", "fc1.wb", "fc1.r", "fc1.bias", "head.weight", "head.bias"}
    method, up, down = waffle(kind, **options), set(), set()
    method.on_client_start = lambda client, message: down.update(message)
    method.on_before_aggregate = lambda messages: up.update(*(m.tensors for m in messages))
    run = fit(method, blobs(), precision="32-true")
    assert up == down == shared == set(method.shared_names)
    cached = {f"received.{name}" for name in shared} if options.get("dictionary") == "cached" else set()
    assert set(method.snapshots[0].private) == private | cached
    scalars = sum(method.server_state()[name].numel() for name in shared)
    assert run.callback_metrics["comm/up_bytes"] == 4 * 4 * scalars


def test_clients_count_the_same_whatever_their_size() -> None:
    method, sent = waffle(), []
    method.on_before_aggregate = lambda messages: sent.extend(copy.deepcopy(messages))
    fit(method, blobs(), rounds=1)
    assert len({m.samples for m in sent}) == len(RAGGED)
    mean = {name: torch.stack([m.tensors[name] for m in sent]).mean(0) for name in sent[0].tensors}
    assert largest_difference(mean, {name: method.server_state()[name] for name in mean}) < 1e-12


# ---- evaluation --------------------------------------------------------------------------------------------------


def test_clients_are_evaluated_with_the_expected_selection() -> None:
    method = waffle()
    fit(method, blobs())
    for client in range(4):
        state = method.personal_state(client)
        torch.testing.assert_close(state["fc1.mask"], method.snapshots[client].private["fc1.logits"].sigmoid())
        assert torch.equal(state["fc1.wa"], method.net.fc1.wa)
    assert not torch.equal(method.personal_state(0)["fc1.mask"], method.personal_state(1)["fc1.mask"])


def test_threshold_and_sampled_selections_are_binary_and_fixed() -> None:
    logits = torch.arange(-250, 251, dtype=torch.float64) / 80
    private = {"fc1.logits": logits, "fc1.c": logits, "fc1.d": logits}
    method = waffle(selection="threshold", factors={"fc1": 501}).double()
    torch.testing.assert_close(method.personalise(private)["fc1.mask"], (logits >= 0).double())
    method = waffle(selection="sampled", factors={"fc1": 501}).double()
    draws = torch.stack([method.personalise(private, client)["fc1.mask"] for client in range(400)])
    assert set(draws.unique().tolist()) == {0.0, 1.0}
    assert float((draws.mean(0) - logits.sigmoid()).abs().max()) < 0.12  # 4.8 standard errors
    assert torch.equal(draws[7], method.personalise(private, 7)["fc1.mask"])


@pytest.mark.parametrize("evaluation", ["expected", "threshold", "sampled"])
def test_evaluating_twice_gives_the_same_and_changes_nothing(evaluation: str) -> None:
    method, data = waffle(selection=evaluation), blobs(RAGGED * 2, fraction=0.25)
    fit(method, data, rounds=2)
    assert len(method.snapshots) < 8
    before = state_of(method)
    results = [trainer().test(method, datamodule=data, verbose=False) for _ in range(2)]
    assert results[0] == results[1]
    assert largest_difference(before, state_of(method)) == 0.0


def test_never_sampled_clients_by_the_paper_use_every_factor_or_the_prior_mean() -> None:
    for never, mask in (("ones", torch.ones(FACTORS)), ("prior_mean", prior_mean(FACTORS, 0.8 * FACTORS))):
        method = waffle(never_sampled=never)
        method.cohort = lambda round: [0, 1]
        fit(method, blobs())
        state = method.personal_state(3)
        torch.testing.assert_close(state["fc1.mask"], mask.double())
        assert torch.equal(state["fc1.wb"], method.net.fc1.wb)
        assert not torch.equal(method.personal_state(0)["fc1.mask"], state["fc1.mask"])


def test_never_sampled_clients_adapt_to_their_training_data() -> None:
    method, data = waffle(adapt_epochs=4, vi_lr_mult=50.0, lr=0.05), blobs((60, 60, 60, 60))
    method.cohort = lambda round: [0, 1]
    fit(method, data, rounds=5)
    before, counters = weights(method), list(method.snapshots)
    assert method.never_sampled == "adapt"
    state = method.personal_state(3)
    assert torch.equal(state["fc1.wa"], method.net.fc1.wa)
    prior = {**state, "fc1.mask": method.initial("fc1", FACTORS)["logits"].sigmoid()}
    assert training_loss(method, state, data, 3) < 0.9 * training_loss(method, prior, data, 3)
    torch.testing.assert_close(state, method.personalise(method.adapt(data.federation, 3)))
    assert largest_difference(before, weights(method)) == 0.0
    assert list(method.snapshots) == counters == [0, 1]


@ENGINES
def test_adaptation_equals_the_formulas_with_the_dictionary_frozen(engine: str) -> None:
    method, data = waffle(engine=engine), blobs()
    method.cohort = lambda round: [0, 1]
    fit(method, data, rounds=1)
    reference = Reference(method, data, 3, seed=int(seeding.stream(0, "adapt").integers(2**31)))
    for _ in range(2):
        reference.epoch(own=True, weights=False)
    expected = {"fc1.logits": reference.own["a"], "fc1.c": reference.own["c"], "fc1.d": reference.own["d"]}
    assert largest_difference(method.adapt(data.federation, 3, epochs=2), expected) < 1e-9


def test_adaptation_does_not_look_at_the_test_set() -> None:
    adapted = []
    for labels in (0, 1):
        data = blobs()
        data.federation.targets[data.federation.test.flat] = labels
        method = waffle()
        method.cohort = lambda round: [0, 1]
        fit(method, data)
        adapted.append(method.personal_state(3))
    assert largest_difference(*adapted) == 0.0


def test_clients_adapt_together_once_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    method, data = waffle(clients_per_stack=3), blobs((16,) * 8, eval_clients=8)
    method.cohort = lambda round: [0, 1]
    calls: list[list[int]] = []
    train = method.engine.train

    def counted(which: Any, federation: Any, jobs: Any, round: int, max_steps: int | None = None) -> Any:
        if which is not method:
            calls.append([job.client for job in jobs])
        return train(which, federation, jobs, round, max_steps)

    monkeypatch.setattr(method.engine, "train", counted)
    run = fit(method, data, rounds=2, num_sanity_val_steps=-1)  # the sanity check adapts nobody
    assert calls == [[2, 3, 4], [5, 6, 7]] * 2
    run.validate(method, datamodule=data, verbose=False)
    method.personal_state(5)
    assert len(calls) == 4  # nothing has changed
    with torch.no_grad():
        method.net.fc1.wa.mul_(1.1)
    method.personal_state(5)
    assert calls[4:] == [[5]]


def test_evaluation_before_any_round() -> None:
    method, data = waffle(engine="auto"), blobs()
    assert trainer().validate(method, datamodule=data, verbose=False)[0]["test/acc"] > 0
    assert method.engine.choice is None  # what adaptation needs is no measure for training


def test_cached_dictionary_is_the_one_last_received() -> None:
    method, data = waffle(dictionary="cached"), blobs()
    cohorts = [[0, 1], [0, 2]]
    method.cohort = lambda round: cohorts[round]
    received: dict[int, State] = {}
    method.on_client_start = lambda client, message: received.update({client: copy.deepcopy(message)})
    fit(method, data, rounds=2)
    for client in (0, 1, 2):
        state = method.personal_state(client)
        assert all(torch.equal(state[name], value) for name, value in received[client].items())
    assert not torch.equal(method.personal_state(0)["fc1.wa"], method.personal_state(1)["fc1.wa"])
    assert torch.equal(method.personal_state(3)["fc1.wa"], method.net.fc1.wa)  # it received none


def test_running_statistics_may_stay_with_the_client() -> None:
    method = waffle(net=seeded(lambda: LeNetBN(num_classes=CLASSES)), factors={"fc1": 9}, buffers="keep")
    fit(method, blobs((19, 9), (1, 28, 28)), rounds=2)
    assert float(method.snapshots[0].private["bn1.running_mean"].abs().max()) > 0  # the passes have moved them
    state = method.personal_state(0)
    assert torch.equal(state["bn1.running_mean"], method.snapshots[0].private["bn1.running_mean"])


# ---- new clients, new factors ------------------------------------------------------------------------------------


def saved(method: Any, data: TensorFederation, folder: Path, rounds: int = 3, **kwargs: Any) -> str:
    saver = ModelCheckpoint(folder, filename="run")
    fit(method, data, rounds, enable_checkpointing=True, callbacks=[saver], **kwargs)
    return str(folder / "run.ckpt")


def test_a_new_client_joins_a_finished_run(tmp_path: Path) -> None:
    path = saved(waffle(lr=0.05), blobs((60, 60, 60)), tmp_path, rounds=6)
    method = WAFFLe.load_from_checkpoint(path).double()
    before = weights(method)
    data = blobs((60,) * 7)
    private = method.adapt(data.federation, 6, epochs=4)
    assert set(private) == OWN
    assert largest_difference(before, weights(method)) == 0.0
    assert list(method.snapshots) == [0, 1, 2]
    state = method.personalise(private)
    everything = {**state, "fc1.mask": torch.ones(FACTORS, dtype=torch.float64)}
    assert training_loss(method, state, data, 6) < training_loss(method, everything, data, 6)
    net = copy.deepcopy(method.net)
    net.load_state_dict(state)
    x = data.federation.inputs[:5].double()
    torch.testing.assert_close(net(x), method.call(state, x, training=False)[0])
    with pytest.raises(FederationError, match=r"Client 6 never trained: .* adapt\(federation, 6\)"):
        method.personal_state(6)
    method.snapshots[6] = ClientSnapshot(private)
    torch.testing.assert_close(method.personal_state(6), state)


def test_checkpoint_evaluates_as_the_run_did(tmp_path: Path) -> None:
    method, data = waffle(vi_lr_mult=30.0, alpha_ratio=0.5), blobs(fraction=0.5)
    path = saved(method, data, tmp_path, precision="32-true")
    loaded = WAFFLe.load_from_checkpoint(path)
    assert (loaded.vi_lr_mult, loaded.alpha) == (30.0, {"fc1": 0.5 * FACTORS})
    results = [trainer(precision="32-true").test(m, datamodule=data, verbose=False) for m in (method, loaded)]
    assert results[0] == results[1]
    plain = saved(waffle(net=factorize(mlp(), {"fc1": 7}), factors=None), data, tmp_path / "factorised")
    assert WAFFLe.load_from_checkpoint(plain).factors == {"fc1": 7}


@pytest.mark.parametrize("dictionary", ["current", "cached"])
@pytest.mark.parametrize("kind", [WAFFLe, WAFFLeL1])
def test_growing_changes_no_existing_client(kind: type[FactorizedModule], dictionary: str, tmp_path: Path) -> None:
    method, data = waffle(kind, dictionary=dictionary), blobs()
    fit(method, data)
    before = [outputs(method, client, data) for client in range(4)]
    method.grow(5)
    for client in range(4):
        torch.testing.assert_close(outputs(method, client, data), before[client], rtol=0, atol=1e-12)
    path = saved(method, data, tmp_path, rounds=1)
    private = method.snapshots[0].private
    assert all(private[name].shape == (FACTORS + 5,) for name in method.own_names)
    assert not torch.allclose(outputs(method, 0, data), before[0])
    loaded = kind.load_from_checkpoint(path).double()
    assert loaded.factors == {"fc1": FACTORS + 5}
    torch.testing.assert_close(outputs(loaded, 0, data), outputs(method, 0, data), rtol=0, atol=1e-5)
    if isinstance(loaded, WAFFLe):
        assert loaded.alpha == {"fc1": 0.8 * FACTORS}  # the prior of the first factors is as it was


@pytest.mark.parametrize(
    ("kind", "never"),
    [(WAFFLe, "adapt"), (WAFFLe, "ones"), (WAFFLe, "prior_mean"), (WAFFLeL1, "ones"), (WAFFLeL1, "adapt")],
    ids=["adapt", "ones", "prior_mean", "l1-ones", "l1-adapt"],
)
@pytest.mark.parametrize("dictionary", ["current", "cached"])
def test_growing_changes_nobody_before_the_next_round(
    kind: type[FactorizedModule], never: str, dictionary: str, tmp_path: Path
) -> None:
    """To the last bit, also clients 2 and 3, which never trained, and also out of a checkpoint."""

    def computed(which: FactorizedModule) -> list[Tensor]:
        x = data.federation.inputs[data.federation.test.flat]
        return [which.call(which.personal_state(c), x, training=False)[0].detach() for c in range(4)]

    method, data = waffle(kind, never_sampled=never, dictionary=dictionary), blobs()
    method.cohort = lambda round: [0, 1]
    run = fit(method, data, rounds=2, precision="32-true")
    before, scores = computed(method), run.test(method, datamodule=data, verbose=False)
    method.grow(3)
    method.grow({"fc1": 2})
    assert method.factors == {"fc1": FACTORS + 5}
    assert run.test(method, datamodule=data, verbose=False) == scores
    assert all(map(torch.equal, computed(method), before))
    run.save_checkpoint(tmp_path / "grown.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "grown.ckpt")
    assert loaded.factors == method.factors
    assert trainer(precision="32-true").test(loaded, datamodule=data, verbose=False) == scores
    assert all(map(torch.equal, computed(loaded), before))
    loaded.cohort = lambda round: [0]  # type: ignore[method-assign]
    fit(loaded, data, rounds=1, precision="32-true")
    counts = [len(loaded.personal_state(client)["fc1.r"]) for client in range(4)]
    assert counts == [FACTORS + 5] * 4  # now new factors may be used
    assert not torch.equal(computed(loaded)[3], before[3])


class Native(FedNet):
    """Builds its factorised layer itself."""

    def __init__(self, factors: int = 7) -> None:
        super().__init__()
        self.fc1, self.head = FactorizedLinear(FEATURES, 16, factors), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc1(x)))


@pytest.mark.parametrize("kind", [WAFFLe, WAFFLeL1])
def test_a_grown_dictionary_of_a_net_with_its_own_factors_is_loaded(
    kind: type[FactorizedModule], tmp_path: Path
) -> None:
    method, data = waffle(kind, Native(), factors=None), blobs()
    fit(method, data, rounds=1)
    method.grow(2)
    loaded: Any = kind.load_from_checkpoint(saved(method, data, tmp_path, rounds=1)).double()
    assert loaded.factors == {"fc1": 9}
    for client in range(4):
        torch.testing.assert_close(outputs(loaded, client, data), outputs(method, client, data), rtol=0, atol=1e-5)


def test_growing_is_by_layer_and_between_runs() -> None:
    net = seeded(lambda: LeNet5(num_classes=CLASSES))
    method = waffle(net=net, factors={"conv2": 5, "fc1": 6})
    method.grow({"fc1": 2})
    assert method.factors == {"conv2": 5, "fc1": 8} == method.hparams["factors"]
    with pytest.raises(FederationError, match="no factorised layer 'fc2': choose one of conv2, fc1"):
        method.grow({"fc2": 2})
    method.on_round_end = lambda messages: method.grow(1)
    with pytest.raises(FederationError, match="cannot grow within a run"):
        fit(method, blobs((16, 8), (1, 28, 28)), rounds=1)


def test_a_store_on_disk_does_not_grow(tmp_path: Path) -> None:
    """Entries of clients there have one size: refused before anything changes, and the run goes on."""
    method = waffle(store=str(tmp_path))
    fit(method, blobs(), rounds=1)
    before = state_of(method)
    with pytest.raises(FederationError, match=r"^A store on disk has rows of fixed size, .*: leave store out\.$"):
        method.grow(5)
    assert largest_difference(before, state_of(method)) == 0.0
    assert method.factors == method.hparams["factors"] == {"fc1": FACTORS}
    fit(method, blobs(), rounds=1)


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"net": mlp(hidden=()), "factors": None}, "before the last dense one, of which MLP has none"),
        ({"factors": {"fc7": 3}}, "MLP has no layer 'fc7'"),
        ({"epochs": 1}, "set epochs to 2 or more, not 1, or schedule='joint'"),
        ({"selection_epochs": 3}, "between 1 and 2, one less than epochs=3, not at 3"),
        ({"schedule": "both"}, "schedule must be alternate or joint, not 'both'"),
        ({"selection": "mean"}, "selection must be expected, threshold or sampled"),
        ({"evaluation": "expected"}, r"evaluation must be Evaluation\(dictionary=\.\.\., .*, not 'expected'"),
        ({"never_sampled": "zero"}, "never_sampled must be adapt, ones or prior_mean"),
        ({"dictionary": "old"}, "dictionary must be current or cached"),
        ({"alpha_ratio": 0.0}, "alpha_ratio must be greater than 0"),
        ({"temperature": -1.0}, "temperature must be greater than 0"),
        ({"vi_lr_mult": -1.0}, "vi_lr_mult must be 0 or more"),
        ({"kl_weight": -0.1}, "kl_weight must be 0 or more"),
        ({"adapt_epochs": 0}, "adapt_epochs must be 1 or more"),
        ({"alpha": {"head": 1.0}}, "must be greater than 0.001, for factorised layers only, not .*'head': 1.0"),
        ({"alpha": {"fc1": -1.0}}, r"alpha\['fc1'\] must be greater than 0.001, not -1.0"),
        ({"alpha": {"fc1": 1e-3}}, r"alpha\['fc1'\] must be greater than 0.001, not 0.001"),
        ({"alpha_ratio": 5e-5}, r"alpha_ratio times the number of factors, .* must be greater than 0.001"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        waffle(**options)


def test_initial_factors_have_the_scale_of_those_that_the_prior_has_active() -> None:
    method = WAFFLe(MLP(), {"fc1": 120}, epochs=2)
    assert float(method.net.fc1.wa.detach().var()) == pytest.approx(1 / 68.317, rel=0.03)  # type: ignore[union-attr, operator]


def test_initial_factors_are_those_of_the_seed() -> None:
    one, same, other = (waffle(seed=seed).net.fc1.wa for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# ---- the L1 ablation ---------------------------------------------------------------------------------------------


@ENGINES
def test_l1_with_frozen_scores_equals_fedavg_on_factors(engine: str) -> None:
    net = factorize(mlp(), {"fc1": FACTORS})
    ours = waffle(WAFFLeL1, copy.deepcopy(net), omega=0.0, score_lr_mult=0.0, engine=engine)
    avg = FedAvg(net, lr=0.1, epochs=3, batch_size=8, weighting="uniform", engine=engine)  # type: ignore[arg-type]
    for method in (ours, avg):
        fit(method, blobs())
    assert largest_difference(weights(ours), weights(avg)) == 0.0
    assert torch.equal(ours.snapshots[0].private["fc1.scores"], torch.ones(FACTORS, dtype=torch.float64))


@ENGINES
def test_l1_penalty_is_the_sign_over_the_number_of_samples(engine: str) -> None:
    """One step with and without it: scores differ by lr * mult * omega * sign(s) / n, and nothing else differs."""
    lr, mult, omega, data = 0.1, 3.0, 5.0, blobs((24, 17))
    start = torch.linspace(-1, 1, 2 * FACTORS, dtype=torch.float64)[::2].clone()
    start[3] = 0.0
    methods = []
    for weight in (0.0, omega):
        method = waffle(WAFFLeL1, omega=weight, score_lr_mult=mult, epochs=1, batch_size=64, engine=engine, lr=lr)
        for client in (0, 1):
            method.snapshots[client] = ClientSnapshot({"fc1.scores": start})
        fit(method, data, rounds=1)
        methods.append(method)
    without, with_it = methods
    for client, size in enumerate((24, 17)):
        shift = without.snapshots[client].private["fc1.scores"] - with_it.snapshots[client].private["fc1.scores"]
        torch.testing.assert_close(shift, lr * mult * omega / size * start.sign())
    assert largest_difference(weights(without), weights(with_it)) < 1e-15


def test_l1_clients_are_evaluated_with_their_scores_and_others_with_ones() -> None:
    method = waffle(WAFFLeL1)
    method.cohort = lambda round: [0, 1]
    fit(method, blobs())
    assert torch.equal(method.personal_state(0)["fc1.mask"], method.snapshots[0].private["fc1.scores"])
    assert torch.equal(method.personal_state(3)["fc1.mask"], torch.ones(FACTORS, dtype=torch.float64))


def test_l1_scores_shrink_with_the_penalty() -> None:
    norms = []
    for omega in (0.0, 2.0, 10.0):
        method = waffle(WAFFLeL1, omega=omega, score_lr_mult=5.0)
        fit(method, blobs())
        norms.append(float(method.snapshots[0].private["fc1.scores"].abs().sum()))
    assert norms[0] > norms[1] > norms[2]


@pytest.mark.parametrize("option", ["omega", "score_lr_mult", "active_score"])
def test_l1_refuses_negative_settings(option: str) -> None:
    with pytest.raises(FederationError, match=f"{option} must be 0 or more"):
        waffle(WAFFLeL1, **{option: -1.0})
