"""FedBPS: its two ends, its mask, its moments by hand, what crosses, and a proportion that is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.engine import entries
from fl_lightning.errors import FederationError
from fl_lightning.federate import federate
from fl_lightning.methods import FedAvg, FedBPS, FedPer, Local
from fl_lightning.methods.fedbps import MASK, OWN, VARIANCE, largest
from fl_lightning.methods.lib import laplace
from fl_lightning.methods.lib.held_out import held_out
from fl_lightning.methods.lib.laplace import DiagonalCurvature, client_curvature
from fl_lightning.methods.settings import Laplace, Trials
from fl_lightning.nets import BiLSTM, LeNetBN
from fl_lightning.parties import LocalData
from fl_lightning.wire import Message, pack_bits, unpack_bits
from tests.support import CLASSES, FEATURES, blobs, fit, largest_difference, mlp, weights
from tests.support.engines import NETS, differ, seeded
from tests.support.problems import Unused

ENGINES = pytest.mark.parametrize("engine", ["sequential", "stacked", "captured"])
OPTIONS: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 8, "engine": "sequential"}
PARAMETERS = FEATURES * 16 + 16 + 16 * CLASSES + CLASSES


def personal(method: FedBPS) -> Tensor:
    return unpack_bits(method.mask, sum(method.sizes.values()))


def sent(means: list[list[float]], variances: list[list[float]], samples: list[int]) -> tuple[FedBPS, list[Message]]:
    """A method with one weight for each number, and the messages of its clients."""
    method = FedBPS(nn.Linear(len(means[0]), 1, bias=False), p=0.5)
    messages = [
        Message(k, {"weight": torch.tensor([w]), VARIANCE + "weight": torch.tensor([v])}, n)
        for k, (w, v, n) in enumerate(zip(means, variances, samples, strict=True))
    ]
    return method, messages


@ENGINES
def test_p_zero_equals_fedavg_bit_for_bit(engine: str) -> None:
    one, other = FedBPS(mlp(), p=0.0, **{**OPTIONS, "engine": engine}), FedAvg(mlp(), **{**OPTIONS, "engine": engine})
    for method in (one, other):
        fit(method, blobs(), rounds=3)
    assert largest_difference(weights(one), weights(other)) == 0.0
    assert torch.equal(one.evaluator.scores["test"], other.evaluator.scores["test"])
    assert all(largest_difference(one.personal_state(c), other.personal_state(c)) == 0.0 for c in range(4))


@ENGINES
def test_p_one_equals_local_bit_for_bit(engine: str) -> None:
    one, other = FedBPS(mlp(), p=1.0, **{**OPTIONS, "engine": engine}), Local(mlp(), **{**OPTIONS, "engine": engine})
    everything = FedPer(mlp(), personal=["fc1", "head"], **{**OPTIONS, "engine": engine})
    for method in (one, other, everything):
        fit(method, blobs(), rounds=3)
    for client in range(4):
        assert largest_difference(one.personal_state(client), other.personal_state(client)) == 0.0
        assert largest_difference(one.personal_state(client), everything.personal_state(client)) == 0.0
    assert torch.equal(one.evaluator.scores["test"], other.evaluator.scores["test"])


@pytest.mark.parametrize("p", [0.0, 0.123, 0.7, 1.0])
def test_the_mask_has_exactly_its_count(p: float) -> None:
    method = FedBPS(mlp(), p=p, **OPTIONS)
    fit(method, blobs(), rounds=2)
    assert int(personal(method).sum()) == round(p * PARAMETERS)
    tensors = FedBPS(mlp(), p=p, ranking="per_tensor", **OPTIONS)
    fit(tensors, blobs(), rounds=2)
    counts = {name: int(part.sum()) for name, part in tensors._by_name(personal(tensors)).items()}
    assert counts == {name: round(p * size) for name, size in tensors.sizes.items()}


def test_ties_go_to_the_first_and_the_count_stays_exact() -> None:
    values = torch.tensor([2.0, 5.0, 5.0, 5.0, 5.0, 1.0])
    assert [largest(values, k).int().tolist() for k in (0, 2, 5, 6)] == [
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]
    assert int(largest(torch.zeros(100_000), 70_001).sum()) == 70_001


def test_moments_by_hand() -> None:
    """p = (1/4, 3/4), w = (0, 4): mean 3, spread 1/4 * 9 + 3/4 * 1 = 3; v = (2, 6): mean 5; all in all 8."""
    method, messages = sent([[0.0, 1.0], [4.0, 1.0]], [[2.0, 0.5], [6.0, 0.5]], [10, 30])
    within, between = method.moments(messages, [0.25, 0.75])
    assert within.tolist() == [5.0, 0.5]
    assert between.tolist() == [3.0, 0.0]
    assert method.aggregate(messages)["weight"].tolist() == [[3.0, 1.0]]
    assert personal(method).tolist() == [True, False]
    assert method.round_metrics()["variance/between_over_within"] == pytest.approx(3 / 5.5)


def test_the_moment_identity_holds_for_what_clients_send() -> None:
    """v_g = sum p (v + w^2) - w_g^2, on the messages of a real round."""
    method, got = FedBPS(mlp(), p=0.5, **OPTIONS), []
    method.on_before_aggregate = got.extend  # type: ignore[attr-defined]
    fit(method, blobs(), rounds=1)
    share = torch.tensor([float(m.samples) for m in got], dtype=torch.float64) / sum(m.samples for m in got)
    w = torch.stack([method._flat(m.tensors) for m in got])
    v = torch.stack([method._flat(m.tensors, VARIANCE) for m in got])
    w_g = (share[:, None] * w).sum(0)
    within, between = method.moments(got, share.tolist())
    torch.testing.assert_close(within + between, (share[:, None] * (v + w**2)).sum(0) - w_g**2)
    torch.testing.assert_close(method._flat(method.server_state()), w_g)
    ratio = method.round_metrics()["variance/between_over_within"]
    assert ratio == pytest.approx(float(between.sum() / within.sum()))


def test_identical_clients_have_their_own_variance() -> None:
    method, messages = sent([[1.0, -2.0, 3.0]] * 3, [[0.1, 0.9, 0.5]] * 3, [5, 5, 20])
    within, between = method.moments(messages, [1 / 6, 1 / 6, 2 / 3])
    torch.testing.assert_close(within + between, torch.tensor([0.1, 0.9, 0.5]).double())


def test_constant_variance_marks_the_largest_disagreement() -> None:
    method, messages = sent([[0.0, 0.0, 0.0, 0.0], [1.0, 5.0, 2.0, 0.5]], [[0.3] * 4] * 2, [1, 1])
    method.aggregate(messages)
    assert personal(method).tolist() == [False, True, True, False]


def test_weights_without_any_gradient_have_the_largest_variance_and_become_personal() -> None:
    """Inputs that are always 0: their weights never get a gradient."""
    data = blobs()
    data.federation.inputs[:, :5] = 0
    method, got = FedBPS(mlp(), p=5 / FEATURES * 320 / PARAMETERS, prior_precision=4.0, **OPTIONS), []
    method.on_before_aggregate = got.extend  # type: ignore[attr-defined]
    fit(method, data, rounds=2)
    for message in got:
        v = message.tensors[VARIANCE + "fc1.weight"]
        assert bool((v[:, :5] == 1 / 4.0).all())
        assert float(method._flat(message.tensors, VARIANCE).max()) == 1 / 4.0
    marked = method._by_name(personal(method))["fc1.weight"].view(16, FEATURES)
    assert bool(marked[:, :5].all())


@pytest.mark.parametrize("curvature", ["fisher", "ggn", "hessian"])
def test_parameters_that_do_not_reach_the_loss_have_the_variance_of_the_prior(curvature: Any) -> None:
    method = FedBPS(seeded(Unused), p=0.5, laplace=Laplace(curvature), prior_precision=4.0, **OPTIONS)
    got: list[Message] = []
    method.on_before_aggregate = got.extend  # type: ignore[attr-defined]
    fit(method, blobs(), rounds=1)
    for message in got:
        for name in ("never.weight", "nowhere.bias", "free"):
            assert bool((message.tensors[VARIANCE + name] == 1 / 4.0).all())
        assert float(message.tensors[VARIANCE + "head.weight"].min()) < 1 / 4.0


def test_variances_are_those_of_the_trained_model_on_its_own_samples() -> None:
    """By autograd, sample by sample, with n h + delta = the plain sum + delta."""
    data, method, got = blobs(), FedBPS(mlp(), p=0.5, prior_precision=0.5, **OPTIONS), []
    method.on_before_aggregate = got.extend  # type: ignore[attr-defined]
    fit(method, data, rounds=1)
    federation, net = data.federation, mlp().double()
    for message in got:
        net.load_state_dict({name: message.tensors[name] for name in method.sizes})
        total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for n in federation.train[message.client]:
            net.zero_grad()
            output = net(federation.inputs[n][None].double())
            nn.functional.cross_entropy(output, federation.targets[n][None]).backward()
            for name, p in net.named_parameters():
                total[name] += p.grad.square()  # type: ignore[union-attr]
        expected = {name: 1 / (value + 0.5) for name, value in total.items()}
        assert largest_difference({n: message.tensors[VARIANCE + n] for n in method.sizes}, expected) < 1e-9


@pytest.mark.parametrize(
    ("curvature", "settings"), [("fisher", (5, 7, 1)), ("ggn", (5, 3, 2)), ("hessian", (1024, 128, 2))]
)
def test_the_settings_of_the_approximation(
    curvature: Any, settings: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean curvature of the samples that were drawn, times the number of all samples of the client."""
    how = Laplace(curvature, samples=settings[0], chunk_size=settings[1], draws=settings[2])
    method, data = FedBPS(mlp(), laplace=how, prior_precision=0.5, **OPTIONS), blobs()
    got: list[Message] = []
    asked: set[tuple[int, ...]] = set()

    def noted(*args: Any) -> Any:
        asked.add(args[5:])
        return client_curvature(*args)

    monkeypatch.setattr("fl_lightning.methods.fedbps.client_curvature", noted)
    method.on_before_aggregate = got.extend  # type: ignore[attr-defined]
    fit(method, data, rounds=1)
    assert asked == {settings}
    diagonal = DiagonalCurvature(mlp().double(), kind=curvature)
    for message in got:
        client, state = message.client, {name: message.tensors[name] for name in method.sizes}
        own, rng = LocalData(data.federation, client), seeding.stream(0, "laplace", 0, client)
        settled = (torch.float64, settings[0], 64, settings[2])
        (found,) = client_curvature(diagonal, [own], [state], [rng], *settled)
        expected = {name: message.samples * h.clamp(min=0) for name, h in found.items()}
        sent = {name: 1 / message.tensors[VARIANCE + name] - 0.5 for name in method.sizes}
        assert largest_difference(sent, expected) < 1e-9


@pytest.mark.parametrize(("curvature", "draws"), [("fisher", 1), ("ggn", 1), ("hessian", 100)])
def test_signs_are_drawn_a_hundred_times_unless_told_otherwise(
    curvature: Any, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draw of signs, which all samples share, says next to nothing."""
    made: list[Tensor | None] = []
    noise = laplace._noise
    monkeypatch.setattr(laplace, "_noise", lambda *args: (made.append(noise(*args)), made[-1])[1])
    fit(FedBPS(mlp(), laplace=Laplace(curvature), **{**OPTIONS, "epochs": 1}), blobs((8,)), rounds=1)
    assert len(made) == draws
    if curvature != "fisher":  # which draws nothing
        assert len({tuple(drawn.flatten().tolist()) for drawn in made if drawn is not None}) == draws


def test_second_derivatives_of_recurrent_layers_are_refused() -> None:
    net = BiLSTM(10, 4, 2)
    layer = next(name for name, module in net.named_modules() if isinstance(module, nn.LSTM))
    sentence = rf"^curvature='hessian' .* recurrent layer \({layer}\): use fisher or ggn\.$"
    with pytest.raises(FederationError, match=sentence):
        FedBPS(net, laplace=Laplace("hessian"))
    for curvature in ("fisher", "ggn"):
        FedBPS(net, laplace=Laplace(curvature))  # type: ignore[arg-type]


def test_every_round_draws_its_own_samples() -> None:
    """A model that does not move has other variances on other samples."""
    method = FedBPS(mlp(), laplace=Laplace(samples=5), **{**OPTIONS, "lr": 0.0})
    got: list[Message] = []
    method.on_before_aggregate = got.extend  # type: ignore[attr-defined]
    fit(method, blobs([40]), rounds=2)
    one, other = (message.tensors[VARIANCE + "head.bias"] for message in got)
    assert not torch.equal(one, other)


class Scaled(LightningModule):
    """The cross entropy times k."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.net, self.k = mlp(), k

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.k * nn.functional.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(("curvature", "ratio"), [("fisher", 100.0), ("hessian", 10.0)])
def test_a_nets_own_loss_decides_the_variance(curvature: Any, ratio: float) -> None:
    """At the same weights: ten times the loss has a hundred times the squares and ten times the second derivative."""
    curvatures = []
    for k in (1.0, 10.0):
        method: Any = federate(Scaled(k), FedBPS, laplace=Laplace(curvature, draws=2), **{**OPTIONS, "lr": 0.0})
        got: list[Message] = []
        method.on_before_aggregate = got.extend
        fit(method, blobs(), rounds=1)
        curvatures.append(1 / method._flat(got[0].tensors, VARIANCE) - 1)
    assert float(curvatures[0].max()) > 0.1
    torch.testing.assert_close(curvatures[1], ratio * curvatures[0], rtol=1e-6, atol=1e-9)
    with pytest.raises(FederationError, match="curvature='ggn' draws labels"):
        federate(Scaled(1.0), FedBPS, laplace=Laplace("ggn"), lr=0.1)


def test_clients_go_on_from_the_mixture() -> None:
    """State in which a client begins its second round: its own trained weights where marked, else the server's."""
    method, got, begun = FedBPS(mlp(), p=0.4, **OPTIONS), [], {}
    method.on_before_aggregate = got.extend  # type: ignore[attr-defined]
    fit(method, blobs(), rounds=1)
    server, mask = weights(method), method._by_name(personal(method))
    for message in got:
        own = message.tensors
        me = method.simulation.me(message.client, method.setting())
        begun = method.enter(method.message_down(message.client), me)
        assert begun.keys() == server.keys()
        for name, part in mask.items():
            marked = part.view_as(server[name])
            assert torch.equal(begun[name][marked], own[name][marked])
            assert torch.equal(begun[name][~marked], server[name][~marked])
        assert largest_difference(begun, method.personal_state(message.client)) == 0.0


def test_what_crosses_and_how_many_bytes() -> None:
    """Up 2 P floats, down P floats and P bits (methods of twice FedAvg's upload)."""
    method, crossed, received = FedBPS(mlp(), p=0.5, **OPTIONS), set(), []
    method.on_client_start = lambda client, message: received.append(message)  # type: ignore[attr-defined]
    method.on_before_aggregate = lambda messages: crossed.update(*(m.tensors for m in messages))  # type: ignore[attr-defined]
    done = fit(method, blobs(), rounds=2, precision="32-true")
    names = set(method.sizes)
    assert crossed == names | {VARIANCE + name for name in names}
    assert set(received[-1]) == names | {MASK}
    assert set(method.snapshots[0].private) == {OWN + name for name in names}
    assert not set(method.snapshots[0].private) & crossed
    assert received[-1][MASK].dtype == torch.uint8
    assert done.callback_metrics["comm/up_bytes"] == 4 * 2 * 4 * PARAMETERS
    assert done.callback_metrics["comm/down_bytes"] == 4 * (4 * PARAMETERS + (PARAMETERS + 7) // 8)


def test_masks_survive_packing() -> None:
    for n in (1, 7, 8, 9, 1000):
        mask = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5
        assert pack_bits(mask).shape == ((n + 7) // 8,)
        assert torch.equal(unpack_bits(pack_bits(mask), n), mask)


def test_shares_and_ratio_are_logged() -> None:
    method = FedBPS(mlp(), p=0.5, **OPTIONS)
    done = fit(method, blobs(), rounds=2)
    mask = method._by_name(personal(method))
    for layer in ("fc1", "head"):
        both = torch.cat([mask[f"{layer}.weight"], mask[f"{layer}.bias"]])
        assert float(done.callback_metrics[f"personal/{layer}"]) == pytest.approx(float(both.double().mean()))
    assert float(done.callback_metrics["personal/all"]) == 0.5
    assert float(done.callback_metrics["variance/between_over_within"]) > 0


@pytest.mark.parametrize("net", ["mlp", "lenet_bn", "dropout", "frozen layer"])
@pytest.mark.parametrize("curvature", ["fisher", "ggn", "hessian"])
def test_stacked_equals_sequential(net: str, curvature: Any) -> None:
    def trained(engine: str, width: int) -> FedBPS:
        make, shape = NETS[net]
        options: dict[str, Any] = {"clients_per_stack": width, **OPTIONS, "engine": engine}
        method = FedBPS(seeded(make), p=0.5, laplace=Laplace(curvature, draws=2), **options)
        fit(method, blobs((19, 9, 16, 8), shape), rounds=2)
        return method

    one, other = trained("sequential", 16), trained("stacked", 3)
    assert differ(one, other) < 1e-9
    assert torch.equal(one.mask, other.mask)


def test_buffers_are_averaged_and_never_masked() -> None:
    method = FedBPS(seeded(lambda: LeNetBN(num_classes=CLASSES)), p=1.0, **OPTIONS)
    fit(method, blobs((19, 9), (1, 28, 28)), rounds=1)
    assert not any("running" in name for name in method.sizes)
    for client in (0, 1):
        state = method.personal_state(client)
        assert torch.equal(state["bn1.running_mean"], weights(method)["bn1.running_mean"])
        assert not torch.equal(state["bn1.weight"], weights(method)["bn1.weight"])


def test_batch_normalisation_in_mixed_precision() -> None:
    """PyTorch cannot stack BatchNorm under autocast; squares of gradients are taken in full precision anyway."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    sent: list[Message] = []
    method = FedBPS(net, lr=0.1, batch_size=8, engine="sequential")
    method.on_before_aggregate = sent.extend  # type: ignore[attr-defined]
    fit(method, blobs((16, 9)), rounds=1, precision="bf16-mixed")
    assert {m.tensors[VARIANCE + "0.weight"].dtype for m in sent} == {torch.float32}
    assert all(0 < float(m.tensors[VARIANCE + "1.weight"].min()) <= 1 for m in sent)


def test_never_sampled_clients_are_evaluated_with_the_servers_model() -> None:
    method = FedBPS(mlp(), p=0.7, **OPTIONS)
    method.cohort = lambda round: [0, 1]  # type: ignore[method-assign]
    fit(method, blobs())
    assert largest_difference(method.personal_state(3), weights(method)) == 0.0
    models = [method.personal_state(client) for client in range(4)]
    for name, value in entries(method.net).items():
        trained, *others = (model[name].data_ptr() for model in models[1:])
        assert others == [value.data_ptr()] * 2
        assert trained != value.data_ptr()


# ---- p: auto ----------------------------------------------------------------------------------------------------


TRIALS = Trials((0.0, 0.5, 1.0), rounds=2, share=0.25)
AUTO: dict[str, Any] = {"p": "auto", "trials": TRIALS, **OPTIONS}


def test_an_auto_run_is_the_run_with_the_p_that_it_chose() -> None:
    auto = FedBPS(mlp(), **AUTO)
    with pytest.raises(FederationError, match="chosen at the start of the run"):
        _ = auto.p
    fit(auto, blobs(), rounds=2)
    fixed = FedBPS(mlp(), p=auto.p, **OPTIONS)
    fit(fixed, blobs(), rounds=2)
    assert auto.p in TRIALS.values
    assert differ(auto, fixed) == 0.0
    assert torch.equal(auto.evaluator.scores["test"], fixed.evaluator.scores["test"])


def test_auto_takes_what_does_best_on_held_out_samples() -> None:
    """By hand: a run for each value on data that holds the same samples out."""
    scores = {}
    for p in TRIALS.values:
        data = blobs((60, 50, 40, 30))
        data.federation = held_out(data.federation, 0.25, seed=0)
        method = FedBPS(mlp(), p=p, **OPTIONS)
        fit(method, data, rounds=2)
        scores[p] = float(method.evaluator.scores["val"].mean())
    auto = FedBPS(mlp(), **AUTO)
    fit(auto, blobs((60, 50, 40, 30)), rounds=1)
    assert auto.p == max(scores, key=lambda p: scores[p])
    assert len(set(scores.values())) > 1


def test_the_choice_never_sees_a_test_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other test samples, whatever they are, the choice and every number behind it are the same."""

    def chosen(spoil: bool) -> tuple[float, list[str]]:
        data, seen = blobs((60, 50, 40, 30)), list[str]()
        if spoil:
            federation = data.federation
            federation.inputs[federation.test.flat] = 1e6
            federation.targets[federation.test.flat] = 0
        monkeypatch.setattr("fl_lightning.methods.lib.held_out.rank_zero_info", seen.append)
        method = FedBPS(mlp(), **AUTO)
        fit(method, data, rounds=1)
        assert len(seen) == 4  # a line for each trial and one for the choice
        return method.p, seen

    assert chosen(False) == chosen(True)


def test_held_out_samples_are_a_part_of_each_clients_training_samples() -> None:
    whole = blobs((40, 27, 2, 16)).federation
    parted = held_out(whole, 0.1, seed=3)
    assert parted.val is not None
    assert parted.val.sizes.tolist() == [4, 3, 1, 2]
    for client in range(4):
        both = torch.cat([parted.train[client], parted.val[client]])
        assert torch.equal(both.sort().values, whole.train[client].sort().values)
    assert torch.equal(parted.val.flat, held_out(whole, 0.1, seed=3).val.flat)  # type: ignore[union-attr]
    assert not torch.equal(parted.val.flat, held_out(whole, 0.1, seed=4).val.flat)  # type: ignore[union-attr]
    assert held_out(parted, 0.5, seed=0) is parted  # what the data holds out is taken


def test_auto_under_fast_dev_run() -> None:
    method = FedBPS(mlp(), **AUTO)
    fit(method, blobs(), fast_dev_run=True)
    assert method.p in TRIALS.values


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"p": 1.2}, "p must lie between 0 and 1, or be auto, not 1.2"),
        ({"p": "best"}, "p must be a number or auto, not 'best'"),
        ({"p": "auto", "trials": {"values": (0.5, 2.0)}}, r"values\[1\] must lie between 0 and 1, not 2.0"),
        ({"p": "auto", "trials": {"values": ()}}, "values must have at least one share to try"),
        ({"trials": {"rounds": 0}}, "rounds must be 1 or more"),
        ({"ranking": "layer"}, "ranking must be global or per_tensor"),
        ({"prior_precision": 0.0}, "prior_precision must be greater than 0"),
        ({"laplace": {"samples": 0}}, "samples must be 1 or more"),
        ({"laplace": {"draws": 0}}, "draws must be 1 or more"),
        ({"laplace": {"chunk_size": 0}}, "chunk_size must be 1 or more"),
        ({"laplace": {"curvature": "exact"}}, "curvature must be fisher, ggn or hessian"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        FedBPS(mlp(), **options)
