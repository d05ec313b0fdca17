"""FedDAF: its weights, its limits, its autoencoder, and what crosses the wire."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import distributions as dist
from fl_lightning import seeding
from fl_lightning.callbacks import FederatedCallback
from fl_lightning.datamodules import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedDAF
from fl_lightning.methods.feddaf import MEASURED
from fl_lightning.methods.lib.fusion import Fusion, Projection, capped, fusion_weights
from fl_lightning.methods.lib.fusion_vae import FLOOR, FusionVAE, Noise, belonging, expected_allocation
from fl_lightning.nets import BiLSTM, FedNet, LeNetBN
from fl_lightning.wire import Message
from tests.support import CLASSES, blobs, fit, gathered, largest_difference, mlp, weights

IMAGE = (1, 28, 28)
SIZES = (19, 9, 16, 8, 12, 24)


def lenet() -> LeNetBN:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LeNetBN(num_classes=CLASSES)


def daf(net: nn.Module | None = None, **kwargs: Any) -> FedDAF:
    options = {"lr": 0.1, "batch_size": 8, "engine": "stacked", "warmup": 1, "refit_every": 2, "steps": 30}
    return FedDAF(lenet() if net is None else net, **gathered(FedDAF, {**options, **kwargs}))


class Sent(FederatedCallback):
    """Keeps the messages and the weights of every round."""

    def __init__(self) -> None:
        self.keys: list[set[str]] = []
        self.tensors: list[dict[str, Tensor]] = []
        self.weights: list[dict[int, float]] = []

    def on_round_end(self, trainer: Any, pl_module: Any, messages: Any) -> None:
        self.keys.append(set(messages[0].tensors))
        self.tensors.append(messages[0].tensors)
        self.weights.append(pl_module.client_weights)


def groups(clients: int = 20, dimensions: int = 12, seed: int = 0) -> Tensor:
    """Vectors of clients in two clear groups, and a constant coordinate."""
    rng = np.random.default_rng(seed)
    d = rng.normal(size=(clients, dimensions)) * 0.3
    d[: clients // 2, :4] += 3.0
    d[:, 5] = 7.0
    return torch.from_numpy(d)


def streams(clients: list[int]) -> dict[int, np.random.Generator]:
    return {client: seeding.stream(3, "fusion", 0, client + 1) for client in [*clients, -1]}


def fusion(steps: int = 60, **kwargs: Any) -> Fusion:
    options: dict[str, Any] = {"components": 6, "shared": True, "basis": "aligned", "adaptive": False}
    return Fusion(steps=steps, **{**options, **kwargs})


# ---- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("weights_", ["expected", "sampled"])
def test_one_component_equals_fedavg_exactly(weighting: Any, weights_: Any) -> None:
    one = daf(components=1, weights=weights_, cap=None, weighting=weighting)
    other = FedAvg(lenet(), lr=0.1, batch_size=8, engine="stacked", weighting=weighting)
    for method in (one, other):
        fit(method, blobs(SIZES, IMAGE), rounds=3)
    assert one.fusion.vae is not None
    assert largest_difference(weights(one), weights(other)) == 0.0


def test_warmup_equals_fedavg_and_the_first_refit_does_not() -> None:
    rounds = {}
    for number in (1, 2):
        one = daf(components=4, adaptive=False, cap=None)
        other = FedAvg(lenet(), lr=0.1, batch_size=8, engine="stacked")
        for method in (one, other):
            fit(method, blobs(SIZES, IMAGE), rounds=number)
        rounds[number] = largest_difference(weights(one), weights(other))
    assert rounds[1] == 0.0
    assert rounds[2] > 1e-6


def test_options_of_the_inference_count() -> None:
    drawn = []
    for weights_ in ("expected", "sampled"):
        method = daf(components=4, weights=weights_, warmup=0)
        fit(method, blobs(SIZES, IMAGE), rounds=1)
        drawn.append(method.client_weights)
    assert max(abs(drawn[0][client] - drawn[1][client]) for client in range(len(SIZES))) > 1e-3
    other = daf(latents="per_client", basis="frozen")
    assert not other.fusion.shared
    assert other.fusion.basis == "frozen"


def test_one_client_equals_fedavg() -> None:
    one, other = daf(warmup=0), FedAvg(lenet(), lr=0.1, batch_size=8, engine="stacked")
    for method in (one, other):
        fit(method, blobs([21], IMAGE), rounds=2)
    assert one.fusion.vae is None
    assert one.client_weights == {0: 1.0}
    assert largest_difference(weights(one), weights(other)) == 0.0


@pytest.mark.parametrize("shared", [True, False])
def test_identical_clients_weigh_the_same(shared: bool) -> None:
    d = groups(1).repeat(8, 1)
    model = fusion(shared=shared)
    b, c = expected_allocation(model.refit(d, list(range(8)), streams(list(range(8)))))
    a, _ = fusion_weights(b, belonging(b, c), torch.full((8,), 1 / 8, dtype=torch.float64))
    torch.testing.assert_close(a, torch.full((8,), 1 / 8, dtype=torch.float64))


# ---- weights ------------------------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    b = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    c = torch.tensor([[1.0, 0.4], [1.0, 0.8]], dtype=torch.float64)
    a, pi = fusion_weights(b, c, torch.tensor([3.0, 1.0], dtype=torch.float64))
    # A = [[2.25, 0.3], [0.5, 0.4]]; shares (0.625, 0.25)
    first = 1 / (1 + math.exp(0.25 - 0.625))
    assert pi.tolist() == pytest.approx([first, 1 - first])
    assert a.tolist() == pytest.approx(
        [first * 2.25 / 2.75 + (1 - first) * 3 / 7, first * 0.5 / 2.75 + (1 - first) * 4 / 7]
    )


@pytest.mark.parametrize("seed", range(5))
def test_everything_is_a_distribution(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    b = torch.softmax(3 * torch.randn(9, 5, generator=rng).double(), -1)
    c = torch.rand(9, 5, generator=rng).double().cumprod(-1)
    if seed == 4:
        c = (c > 0.5).double()  # a draw that leaves components without anybody
    c = belonging(b, c)
    a, pi = fusion_weights(b, c, torch.rand(9, generator=rng).double() + 0.1)
    assert float(a.sum()) == pytest.approx(1)
    assert float(pi.sum()) == pytest.approx(1)
    assert float(a.min()) >= 0
    if seed < 4:
        assert float(pi.max() / pi.min()) <= math.e
    assert bool((c.amax(-1) == 1).all())


def test_expected_allocation_falls_before_it_is_forced() -> None:
    model = fusion()
    posterior = model.refit(groups(), list(range(20)), streams(list(range(20))))
    b, c = expected_allocation(posterior)
    assert b.sum(-1).tolist() == pytest.approx([1.0] * 20)
    assert bool((c.diff(dim=-1) <= 0).all())
    lam = dist.kumaraswamy_moment(posterior.zeta, posterior.kappa)
    torch.testing.assert_close(c[:, 2], lam[:, 0] * lam[:, 1] * lam[:, 2])


@pytest.mark.parametrize("most", [0.2, 0.34, 0.5])
def test_cap(most: float) -> None:
    a = capped(torch.tensor([0.6, 0.25, 0.1, 0.05, 0.0]).double(), most)
    assert float(a.max()) <= most + 1e-12
    assert float(a.sum()) == pytest.approx(1)
    assert torch.equal(capped(a, 0.9), a)


def test_cap_holds_in_a_run() -> None:
    sent = Sent()
    method = daf(cap=1.05, components=4)
    fit(method, blobs(SIZES, IMAGE), rounds=2, callbacks=[sent])
    assert max(sent.weights[0].values()) == pytest.approx(24 / sum(SIZES))  # plain FedAvg is left alone
    assert max(sent.weights[1].values()) <= 1.05 / len(SIZES) + 1e-12


def test_the_cap_is_that_of_the_clients_of_a_round() -> None:
    """Twice the mean of three clients; twice that of all six would leave the three no choice but equal weights."""
    method = daf(cap=2.0)
    method.multiples = {0: 1.5}
    messages = [Message(k, dict(method.server_state()), SIZES[k]) for k in (0, 1, 2)]
    method.refits = lambda round: False  # type: ignore[method-assign]
    method.completed_rounds = 3
    method.aggregate(messages)
    raw = torch.tensor([1.5 * SIZES[0], SIZES[1], SIZES[2]])
    assert list(method.client_weights.values()) == pytest.approx((raw / raw.sum()).tolist())


def test_permuting_clients_permutes_their_weights() -> None:
    d, order = groups(), torch.from_numpy(np.random.default_rng(1).permutation(20))
    size = torch.rand(20, generator=torch.Generator().manual_seed(0)).double() + 0.5
    found = []
    for clients in (list(range(20)), order.tolist()):
        b, c = expected_allocation(fusion(steps=100).refit(d[clients], clients, streams(clients)))
        found.append(fusion_weights(b, belonging(b, c), size[clients])[0])
    assert float((found[0] - found[0].mean()).abs().max()) > 1e-3
    torch.testing.assert_close(found[1], found[0][order], atol=1e-7, rtol=0)


def test_missing_clients_leave_their_share_to_the_others() -> None:
    """A client's weight stays the same multiple of its FedAvg weight; one that was in no refit has that weight."""
    method = daf(cap=None)
    sent = Sent()
    cohorts = {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4], 2: [1, 3, 4], 3: [2, 5], 4: [0, 1, 2, 3, 4, 5]}
    method.cohort = cohorts.__getitem__  # type: ignore[method-assign]
    method.refit_every = 50
    fit(method, blobs(SIZES, IMAGE), rounds=5, callbacks=[sent])
    for round in (2, 3, 4):
        raw = {k: SIZES[k] * method.multiples.get(k, 1.0) for k in cohorts[round]}
        assert sent.weights[round] == pytest.approx({k: v / sum(raw.values()) for k, v in raw.items()})
    assert sorted(method.multiples) == [0, 1, 2, 3, 4]
    assert len(set(sent.weights[1].values())) > 1


# ---- the autoencoder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "least"), [(True, 0.1), (False, 0.001)], ids=["shared", "per client"])
def test_reconstruction_error_falls(shared: bool, least: float) -> None:
    """Latents of their own tell the clients' groups apart much later, if at all: the KL terms hold them at zero."""
    model, clients = fusion(steps=150, shared=shared), list(range(20))
    model.refit(groups(dimensions=60), clients, streams(clients))
    before, after = model.errors
    assert after < (1 - least) * before


def test_shared_latents_find_the_groups() -> None:
    model, clients = fusion(steps=250), list(range(20))
    allocation = expected_allocation(model.refit(groups(dimensions=60), clients, streams(clients)))[0].argmax(-1)
    assert not set(allocation[:10].tolist()) & set(allocation[10:].tolist())


def test_the_bound_by_hand() -> None:
    """Error and KL terms of one pass, written out a second time for two clients and three components."""
    model = fusion(steps=1, components=3)
    d = groups(4)
    model.refit(d, [0, 1, 2, 3], streams([0, 1, 2, 3]))
    vae, projection = model.vae, model.projection
    assert vae is not None
    assert projection is not None
    x = projection(d)
    rng = np.random.default_rng(0)
    score, logistic, latent = (torch.from_numpy(rng.normal(size=shape)) for shape in ((4, 3), (4, 3), (3, 16)))
    noise = Noise(score, torch.from_numpy(rng.random((4, 3))).log(), logistic, latent)
    with torch.no_grad():
        q = vae.posterior(x)
    total = 0.0
    for k in range(4):
        scores = [float(q.nu[k, m] + q.log_s[k, m].exp() * noise.score[k, m]) for m in range(3)]
        b = [math.exp(s) / sum(map(math.exp, scores)) for s in scores]
        z, rho = torch.zeros(16, dtype=torch.float64), 1.0
        for m in range(3):
            u = math.exp(noise.log_u[k, m])
            rho *= (1 - u ** (1 / float(q.kappa[k, m]))) ** (1 / float(q.zeta[k, m]))
            c = 1 / (1 + math.exp(-(math.log(rho) - math.log(1 - rho) + float(noise.logistic[k, m])) / 0.5))
            z = z + b[m] * c * (q.z_mean[m] + q.z_log_s[m].exp() * noise.latent[m])
            total += 0.5 * float(q.nu[k, m] ** 2 + q.log_s[k, m].exp() ** 2 - 1) - float(q.log_s[k, m])
            total += float(dist.kl_kumaraswamy_beta(q.zeta[k, m], q.kappa[k, m], 1.5))
        total += 0.5 * float((x[k] - vae.decoder(z)).detach().pow(2).sum())
    total += float(dist.kl_normal(q.z_mean, q.z_log_s).sum())
    assert float(vae.loss(x, noise, 1.0)) == pytest.approx(total / 4)


def test_kl_terms_grow_in_over_the_first_half_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    betas: list[float] = []
    loss = FusionVAE.loss
    monkeypatch.setattr(FusionVAE, "loss", lambda vae, x, noise, beta: betas.append(beta) or loss(vae, x, noise, beta))
    fusion(steps=8).refit(groups(), list(range(20)), streams(list(range(20))))
    assert betas == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_a_step_of_the_fit_is_adams_with_its_learning_rate() -> None:
    """The first step of Adam moves what has a gradient by the learning rate."""
    model, clients = fusion(steps=1), list(range(20))
    model.refit(groups(), clients, streams(clients))
    before = copy.deepcopy(model.vae)
    model.refit(groups(), clients, streams(clients))
    assert before is not None
    assert model.vae is not None
    moved = [(a - b).abs().max() for a, b in zip(before.parameters(), model.vae.parameters(), strict=True)]
    assert float(torch.stack(moved).max()) == pytest.approx(1e-3, rel=1e-3)


def test_components_that_nobody_belongs_to_are_deleted_and_never_come_back() -> None:
    model, clients = fusion(steps=20, components=6, adaptive=True), list(range(20))
    model.refit(groups(), clients, streams(clients))
    assert model.vae is not None
    with torch.no_grad():
        model.vae.heads["nu"].bias[3] = -30.0
    posterior = model.vae.posterior(model.projection(model.observed))  # type: ignore[misc]
    kept = [m for m in range(posterior.nu.shape[1]) if m != 3]
    model.steps = 1
    after = model.refit(groups(), clients, streams(clients))
    assert after.nu.shape[1] <= len(kept)
    assert model.vae.components == after.nu.shape[1] == after.z_mean.shape[0]
    with torch.no_grad():
        model.vae.heads["nu"].weight.zero_()
        model.vae.heads["nu"].bias.copy_(torch.arange(model.vae.components) * -100.0)
    assert model.refit(groups(), clients, streams(clients)).nu.shape[1] == 1
    assert model.refit(groups(), clients, streams(clients)).nu.shape[1] == 1


def shrunk(shares: list[float], zeta: list[float]) -> list[float]:
    """The components left of some with these b_m; E[lambda_m] is zeta / (1 + zeta)."""
    model, clients = fusion(steps=1, components=len(shares)), list(range(20))
    model.refit(groups(), clients, streams(clients))
    assert model.vae is not None
    values = {"nu": [math.log(share) for share in shares], "zeta": zeta, "kappa": [1.0] * len(zeta)}
    with torch.no_grad():
        for name, value in values.items():
            bias = torch.tensor(value if name == "nu" else [dist.softplus_inverse(v - FLOOR) for v in value])
            model.vae.heads[name].weight.zero_()  # type: ignore[operator]
            model.vae.heads[name].bias.copy_(bias)  # type: ignore[operator]
    model._shrink(model.projection(model.observed))  # type: ignore[misc]
    return [round(math.exp(nu), 3) for nu in model.vae.heads["nu"].bias.tolist()]  # type: ignore[operator, union-attr]


def test_components_with_less_than_a_fiftieth_of_the_clients_are_deleted() -> None:
    assert shrunk([0.96, 0.03, 0.01], zeta=[1e6] * 3) == [0.96, 0.03]


def test_a_component_that_clients_have_most_to_do_with_stays_however_unlikely() -> None:
    assert shrunk([0.4, 0.6], zeta=[1e6, 2e-3]) == [0.4, 0.6]


def test_the_autoencoder_sees_64_axes_at_most() -> None:
    d = torch.from_numpy(np.random.default_rng(0).normal(size=(100, 80)))
    assert Projection.fit(d).axes.shape == (80, 64)


def test_projection_returns_what_it_was_given() -> None:
    d = groups()
    p = Projection.fit(d)
    assert p.axes.shape == (12, 12)
    torch.testing.assert_close(p.inverse(p(d)), d)
    torch.testing.assert_close(p(d).pow(2).sum(1), ((d - p.mean) / p.std).pow(2).sum(1))
    assert float(((d - p.mean) / p.std)[:, 5].abs().max()) == 0  # the constant coordinate says nothing
    few = Projection.fit(d[:4])
    assert few.axes.shape == (12, 3)
    torch.testing.assert_close(few.inverse(few(d[:4])), d[:4])


def test_an_aligned_basis_does_not_turn() -> None:
    """New axes span the new data's space; coordinates of nearly the same data are nearly the same."""
    d = groups(8)
    old = Projection.fit(d)
    moved = d + 0.01 * torch.from_numpy(np.random.default_rng(5).normal(size=d.shape))
    aligned, anew = Projection.fit(moved, old), Projection.fit(moved)
    span = (moved - aligned.mean) / aligned.std
    torch.testing.assert_close(span @ aligned.axes @ aligned.axes.T, span)
    assert float((aligned.axes - old.axes).norm()) <= float((anew.axes - old.axes).norm()) + 1e-9
    turned = Projection(old.mean, old.std, old.axes @ torch.linalg.qr(torch.randn(7, 7).double())[0])
    torch.testing.assert_close(Projection.fit(d, turned).axes, turned.axes)


@pytest.mark.parametrize("basis", ["aligned", "frozen", "refitted"])
def test_refits_with_fewer_and_more_clients(basis: Any) -> None:
    model, d = fusion(steps=5, basis=basis), groups()
    for clients in (list(range(8)), list(range(3)), list(range(20))):
        assert bool(model.refit(d[clients], clients, streams(clients)).nu.isfinite().all())
        assert model.projection is not None
        assert model.projection.axes.shape == (12, 7)


def test_draws_of_the_inferred_distribution() -> None:
    model, clients = fusion(steps=150), list(range(20))
    model.refit(groups(), clients, streams(clients))
    model.weights = torch.tensor([0.5, *[0.0] * 18, 0.5]).double()
    draws, rows = model.inferred(300, np.random.default_rng(0))
    assert draws.shape == (300, 12)
    assert set(rows.tolist()) == {0, 19}
    assert float((draws[:, 5] - 7).abs().max()) < 1e-12
    # Draws lie with their client's group, which the first coordinates tell, and are not all the same.
    first = draws[:, :4].mean(1)
    assert float(first[rows == 0].mean()) > 1.5  # half way between the groups
    assert float(first[rows == 19].mean()) < 1.5
    assert all(float(first[rows == row].std()) > 1e-3 for row in (0, 19))


# ---- what crosses the wire ----------------------------------------------------------------------------------------


class Grouped(nn.Module):
    """GroupNorm and LayerNorm, which keep no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 5, stride=4)
        self.gn = nn.GroupNorm(2, 4)
        self.ln = nn.LayerNorm(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ln(torch.relu(self.gn(self.conv(x))).mean((2, 3))))


def grouped() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Grouped()


def test_measured_statistics_are_declared_in_rounds_of_refit_only() -> None:
    sent, method = Sent(), daf(grouped())
    data = blobs((19, 9, 16), IMAGE)
    fit(method, data, rounds=4, callbacks=[sent])
    model = set(method.net.state_dict())
    measured = {f"{MEASURED}{layer}.{kind}" for layer in ("gn", "ln") for kind in ("mu", "sigma")}
    assert sent.keys == [model, model | measured, model, model | measured]
    net = grouped().double()
    net.load_state_dict({name: sent.tensors[3][name] for name in model})
    x = data.federation.inputs[data.federation.train[0]].double()
    inside = net.conv(x)  # type: ignore[operator]
    torch.testing.assert_close(sent.tensors[3][f"{MEASURED}gn.mu"], inside.mean((0, 2, 3)).detach())
    torch.testing.assert_close(sent.tensors[3][f"{MEASURED}gn.sigma"], inside.std((0, 2, 3), correction=0).detach())
    inside = torch.relu(net.gn(inside)).mean((2, 3))  # type: ignore[operator]
    torch.testing.assert_close(sent.tensors[3][f"{MEASURED}ln.sigma"], inside.std(0, correction=0).detach())
    assert len(method.describe(sent.tensors[3])) == 4 * 4 + 4 * 4


def test_batchnorm_statistics_travel_in_the_model() -> None:
    sent, method = Sent(), daf(warmup=0)
    fit(method, blobs((19, 9, 16), IMAGE), rounds=1, callbacks=[sent])
    assert sent.keys == [set(method.net.state_dict())]
    tensors = sent.tensors[0]
    d = method.describe(tensors)
    parts = [
        part
        for layer in ("bn1", "bn2")
        for part in (
            tensors[f"{layer}.running_mean"],
            (tensors[f"{layer}.running_var"] + 1e-5).sqrt(),
            tensors[f"{layer}.bias"],
            tensors[f"{layer}.weight"],
        )
    ]
    torch.testing.assert_close(d, torch.cat(parts))


def test_feature_statistics_of_an_unchanged_net() -> None:
    sent, method = Sent(), daf(mlp(), warmup=0, feature_stats=True)
    data = blobs()
    fit(method, data, rounds=1, callbacks=[sent])
    assert sent.keys[0] - set(method.net.state_dict()) == {f"{MEASURED}fc1.mu", f"{MEASURED}fc1.sigma"}
    tensors = sent.tensors[0]
    hidden = nn.functional.linear(
        data.federation.inputs[data.federation.train[0]].double(), tensors["fc1.weight"], tensors["fc1.bias"]
    )
    torch.testing.assert_close(tensors[f"{MEASURED}fc1.mu"], hidden.mean(0))
    torch.testing.assert_close(tensors[f"{MEASURED}fc1.sigma"], hidden.std(0, correction=0))


def test_features_of_the_bilstm_are_those_of_its_tokens() -> None:
    """Mean and deviation of both directions over all tokens, by PyTorch's own LSTM over packed sequences."""
    lengths = torch.tensor([1 + i % 4 for i in range(30)])
    x = torch.randint(1, 20, (30, 4), generator=torch.Generator().manual_seed(0))
    x[torch.arange(4) >= lengths[:, None]] = 0
    data = TensorFederation(
        x, torch.arange(30) % 2, train=[range(15), range(15, 24)], test=[range(24, 27), range(27, 30)], val_fraction=0
    )
    sent, net = Sent(), BiLSTM(20, embedding=6, units=5)
    fit(daf(net, warmup=0, feature_stats=True), data, rounds=1, callbacks=[sent])
    tensors = sent.tensors[0]
    lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True).double()
    lstm.load_state_dict({n.removeprefix("lstm."): v for n, v in tensors.items() if n.startswith("lstm.")})
    packed = nn.utils.rnn.pack_padded_sequence(
        tensors["embedding.weight"][x[:15]], lengths[:15], batch_first=True, enforce_sorted=False
    )
    outputs = lstm(packed)[0].data
    torch.testing.assert_close(tensors[f"{MEASURED}lstm.mu"], outputs.mean(0))
    torch.testing.assert_close(tensors[f"{MEASURED}lstm.sigma"], outputs.std(0, correction=0))


class Uncalled(FedNet):
    """A convolution of which only the weights are used, so that nothing can be measured at it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 3, 20), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.conv1d(x[:, None], self.conv.weight, self.conv.bias).mean(2))


def test_a_net_that_cannot_be_measured_is_refused_before_it_is_trained() -> None:
    method = daf(Uncalled(), feature_stats=True, warmup=5)
    with pytest.raises(FederationError, match="Features of conv cannot be measured: Uncalled does not call this layer"):
        fit(method, blobs(), rounds=1)
    assert not len(method.snapshots)


def test_added_norms(tmp_path: Path) -> None:
    method = daf(mlp(), add_norm=True)
    fit(method, blobs(), rounds=3)
    assert "fc1.norm.running_mean" in method.net.state_dict()
    assert method.fusion.observed.shape == (4, 64)
    run_ = fit(daf(mlp(), add_norm=True), blobs(), rounds=2)
    run_.save_checkpoint(tmp_path / "x.ckpt")
    loaded = FedDAF.load_from_checkpoint(tmp_path / "x.ckpt")
    assert "fc1.norm.running_mean" in loaded.net.state_dict()
    assert loaded.fusion.vae is not None


# ---- a run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
def test_engines_agree(engine: str) -> None:
    one, other = daf(mlp(), feature_stats=True, engine="sequential"), daf(mlp(), feature_stats=True, engine=engine)
    for method in (one, other):
        fit(method, blobs(), rounds=4)
    assert largest_difference(weights(one), weights(other)) < 1e-7


def test_weights_and_server_time_are_logged() -> None:
    method, sent = daf(), Sent()
    run_ = fit(method, blobs(SIZES, IMAGE), rounds=2, callbacks=[sent])
    logged = {name: float(value) for name, value in run_.callback_metrics.items()}
    a = list(sent.weights[-1].values())
    assert logged["fusion/largest"] == pytest.approx(max(a))
    assert logged["fusion/effective"] == pytest.approx(1 / sum(w * w for w in a))
    assert logged["fusion/components"] == method.fusion.vae.components  # type: ignore[union-attr]
    assert logged["time/server"] > 0
    assert logged["time/clients"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"net": mlp(), "feature_stats": False},
            "MLP has none: use a net with some, such as LeNetBN, or set add_n",
        ),
        ({"net": mlp(hidden=()), "add_norm": True}, "MLP has no layer to normalise"),
        ({"net": mlp(hidden=()), "feature_stats": True}, "MLP has no hidden layer"),
        ({"add_norm": True, "feature_stats": True}, "set add_norm or feature_stats"),
        ({"add_norm": True}, "LeNetBN has normalisation layers already (bn1): leave add_norm out"),
        ({"components": 0}, "components must be 1 or more, not 0"),
        ({"refit_every": 0}, "refit_every must be 1 or more, not 0"),
        ({"cap": 0.5}, "cap must be 1 or more"),
        ({"buffers": "keep"}, "buffers must not be keep"),
        ({"latents": "own"}, "latents must be shared or per_client, not 'own'"),
    ],
)
def test_bad_arguments_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=re.escape(sentence)):
        daf(**options)
