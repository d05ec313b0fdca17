"""FedMA: matching, what may be permuted, its limits, growth and the paper's schedule."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.densenet import _DenseBlock
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock

from fl_lightning.callbacks import FederatedCallback
from fl_lightning.engine import entries
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedMA
from fl_lightning.methods.fedma import OWN, PLACES, stages_of
from fl_lightning.methods.lib.matching import Matching
from fl_lightning.nets import CNNCifar, DLATiny, FedNet, LeNet5, LeNetBN, ResNet18, ResNet20
from fl_lightning.nets.derive import block_units, chain_units, check_units, derived_units
from fl_lightning.nets.norms import add_norms, norm_layers
from fl_lightning.nets.units import Units, recurrent_units, units_between
from fl_lightning.parties import Reply
from tests.support import CLASSES, blobs, fit, largest_difference, mlp, weights
from tests.support.stops import assert_same, make, run, state_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Inverted(nn.Module):
    """Expansion, depthwise convolution, projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x_ = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        return x + self.conv3(x_)


class Residual(FedNet):
    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, stride=2)
        self.blocks = nn.Sequential(Block(4), Inverted(4))
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def units(self) -> list[Units]:
        first = units_between(self, ["blocks.0.conv1", "blocks.0.bn1"], ["blocks.0.conv2"])
        makers = [f"blocks.1.{name}" for name in ("conv1", "bn1", "conv2", "bn2")]
        return [first, units_between(self, makers, ["blocks.1.conv3"])]


class Lstm(FedNet):
    def __init__(self, kind: str = "LSTM", layers: int = 1, bidirectional: bool = True) -> None:
        super().__init__()
        self.lstm = getattr(nn, kind)(3, 5, layers, batch_first=True, bidirectional=bidirectional)
        out = 10 if bidirectional else 5
        self.norm, self.head = nn.LayerNorm(out), nn.Linear(out, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.lstm(x)[0].mean(1)))

    def units(self) -> list[Units]:
        return recurrent_units(self, "lstm", ["head"], ["norm"])


class Blocks(nn.Module):
    """One of each of torchvision's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            BasicBlock(4, 4),
            InvertedResidual(4, 4, 1, 1),
            InvertedResidual(4, 4, 1, 3),
            _DenseBlock(2, 4, 2, 3, 0.0),
        )
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: mlp(hidden=(16, 8)), (20,)),
    "lenet": (lambda: LeNet5(num_classes=CLASSES), (1, 28, 28)),
    "lenet_bn": (lambda: LeNetBN(num_classes=CLASSES), (1, 28, 28)),
    "cnn without biases": (lambda: CNNCifar(num_classes=CLASSES), (3, 32, 32)),
    "added norms": (lambda: add_norms(mlp(hidden=(16, 8))), (20,)),
    "residual": (Residual, (1, 10, 10)),
    "thin resnet": (lambda: ResNet20(num_classes=CLASSES), (3, 8, 8)),
    "dla": (lambda: DLATiny(num_classes=CLASSES), (3, 32, 32)),
    "torchvision's blocks": (Blocks, (1, 10, 10)),
    "bilstm": (Lstm, (4, 3)),
    "two layers of gru": (lambda: Lstm("GRU", 2), (4, 3)),
    "rnn one way": (lambda: Lstm("RNN", 1, False), (4, 3)),
}


def seeded(name: str, seed: int = 0) -> nn.Module:
    """A net in float64 whose entries all differ, running statistics too; features do not grow with its depth."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net: nn.Module = NETS[name][0]().double()
        with torch.no_grad():
            for value in entries(net).values():
                if value.is_floating_point():
                    value += 0.3 * (torch.rand_like(value) - 0.5 * (value.dim() > 1))
    return net


def inputs(name: str, number: int = 6) -> Tensor:
    return torch.randn(number, *NETS[name][1], generator=torch.Generator().manual_seed(1)).double()


def units_of(net: Any, x: Tensor) -> list[Units]:
    declared = net.units() if isinstance(net, FedNet) else None
    return derived_units(net, x) if declared is None else declared


def output(net: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.func.functional_call(net.eval(), state, x)


def shuffled(state: dict[str, Tensor], units: list[Units], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for group in units:
        state = group.placed(state, torch.randperm(group.width, generator=generator))
    return state


# ---- units --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_a_permutation_leaves_the_outputs_unchanged(name: str) -> None:
    net, x = seeded(name), inputs(name)
    units, state = units_of(net, x), net.state_dict()
    assert units
    moved = shuffled(state, units)
    assert largest_difference(state, moved) > 0.01
    torch.testing.assert_close(output(net, moved, x), output(net, state, x))
    check_units(net, lambda s, x: output(net, s, x), state, x, units)


@pytest.mark.parametrize("name", NETS)
def test_an_axis_left_out_is_noticed(name: str) -> None:
    """Without any one of its places a set of units cannot move, but for running statistics that nothing depends on."""
    net, x = seeded(name), inputs(name, 2)
    whole = list(enumerate(units_of(net, x)))
    for number, group in whole if len(whole) < 6 else [*whole[::6], whole[-1]]:
        for left_out in group.axes:
            wrong = units_of(net, x)
            wrong[number] = Units(group.name, group.width, tuple(a for a in group.axes if a is not left_out))
            with pytest.raises(FederationError, match=r"hidden units of .* cannot be derived"):
                check_units(net, lambda s, x: output(net, s, x), net.state_dict(), x, wrong)


def test_widths_and_places() -> None:
    net = seeded("lenet_bn")
    units = chain_units(net, inputs("lenet_bn"))
    assert [(u.name, u.width) for u in units] == [("conv1", 6), ("conv2", 16), ("fc1", 120), ("fc2", 84)]
    assert units[1].describe(net.state_dict()).shape == (16, 6 * 25 + 1 + 2)
    row = units[1].describe(net.state_dict())[3]
    torch.testing.assert_close(row[:150], net.state_dict()["conv2.weight"][3].flatten())
    assert units[1].fills(net.state_dict())
    assert [u.name for u in Lstm("LSTM", 2).units()] == ["lstm_l0", "lstm_l0_reverse", "lstm_l1", "lstm_l1_reverse"]
    assert not Lstm().units()[0].fills(Lstm().state_dict())


class Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(20, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        return self.head(x + torch.relu(self.fc2(x)))


class Parallel(Undeclared):
    def __init__(self) -> None:
        super().__init__()
        self.fc2 = nn.Linear(20, 8)  # 20 inputs are not 8 units

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc1(x)) + torch.relu(self.fc2(x)))


@pytest.mark.parametrize("kind", [Undeclared, Parallel])
def test_nets_that_are_no_chain_must_declare_their_units(kind: type[nn.Module]) -> None:
    sentence = f"hidden units of {kind.__name__} that may be permuted cannot be derived: declare them in"
    with pytest.raises(FederationError, match=sentence):
        fit(FedMA(kind(), batch_size=8), blobs(), rounds=1)  # type: ignore[arg-type]


# ---- matching -----------------------------------------------------------------------------------------------------


def total_score(prior: Matching, reference: Any, clients: Any, places: Any) -> float:
    """Log posterior of an assignment up to a constant, times two: sum over atoms of m_i^2 / S_i."""
    precision = 1 / prior.sigma**2
    score = 0.0
    for atom in range(len(reference)):
        units = [reference[atom], *(c[list(p).index(atom)] for c, p in zip(clients, places, strict=True))]
        m = np.sum(units, axis=0) * precision
        score += float((m**2).sum() / (1 / prior.sigma0**2 + len(units) * precision))
    return score


def test_one_client_is_matched_as_well_as_by_trying_everything() -> None:
    rng, prior = np.random.default_rng(0), Matching(sigma=0.7, sigma0=1.3)
    reference, client = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    (place,), width = prior(reference, [client], rng)
    best = max(permutations(range(4)), key=lambda p: total_score(prior, reference, [client], [p]))
    assert place.tolist() == list(best)
    assert width == 4


def test_scores_by_hand() -> None:
    prior = Matching(sigma=2.0, sigma0=0.5, gamma0=3.0)
    sums, counts, units = np.array([[1.0, 2.0]]), np.array([2.0]), np.array([[4.0, -1.0]])
    spread = 1 / 0.25 + 2 / 4
    gain = ((1 + 4 / 4) ** 2 + (2 - 1 / 4) ** 2) / (spread + 1 / 4) - (1 + 4) / spread
    assert prior.old_score(sums, counts, units, 5)[0, 0] == pytest.approx(gain + 2 * np.log(2 / 3))
    new = (1 + 1 / 16) / (4 + 1 / 4)
    assert prior.new_score(units, 2, 5)[0].tolist() == pytest.approx(
        [new + 2 * np.log(3 / 5), new - 2 * np.log(2) + 2 * np.log(3 / 5)]
    )


def test_clients_are_matched_anew_until_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sweep matches a client to what came before it, later ones to all others; the server's model counts."""
    parties: list[int] = []
    score = Matching.old_score

    def spy(self: Matching, *args: Any) -> Any:
        parties.append(args[-1])
        return score(self, *args)

    monkeypatch.setattr(Matching, "old_score", spy)
    rng = np.random.default_rng(0)
    reference, clients = rng.normal(size=(5, 2)), [rng.normal(size=(5, 2)) for _ in range(4)]
    once, often = (Matching(sweeps=n)(reference, clients, np.random.default_rng(0))[0] for n in (0, 5))
    assert any(not np.array_equal(a, b) for a, b in zip(once, often, strict=True))
    before, after = (total_score(Matching(), reference, clients, places) for places in (once, often))
    assert after > before
    assert set(parties) == {len(clients) + 1}


@pytest.mark.parametrize("most", [None, 20])
def test_assignments_are_bijections_and_find_permuted_copies(most: int | None) -> None:
    rng = np.random.default_rng(0)
    reference = 3 * rng.normal(size=(10, 6))
    orders = [rng.permutation(10) for _ in range(4)]
    clients = [reference[order] + 0.1 * rng.normal(size=(10, 6)) for order in orders]
    places, width = Matching(gamma0=1e-3)(reference, clients, rng, most)
    assert width == 10
    for place, order in zip(places, orders, strict=True):
        assert sorted(place.tolist()) == list(range(10))
        assert place.tolist() == order.tolist()


def test_new_units_get_atoms_of_their_own_up_to_the_most() -> None:
    rng = np.random.default_rng(0)
    reference = 10 * np.eye(12)[:4]
    clients = [10 * np.eye(12)[4:8], 10 * np.eye(12)[[7, 6, 5, 4]], reference[::-1]]
    places, width = Matching()(reference, clients, rng, most=8)
    assert width == 8
    assert sorted(places[0].tolist()) == [4, 5, 6, 7]
    assert places[1].tolist() == places[0][::-1].tolist()
    assert places[2].tolist() == [3, 2, 1, 0]
    assert Matching()(reference, clients, rng, most=6)[1] == 6
    assert Matching()(reference, clients, rng)[1] == 4


def test_new_atoms_come_in_the_order_of_the_units_that_take_them() -> None:
    """Any order of theirs scores the same: rounding, which differs between engines, would choose one."""
    for seed in range(20):
        units = 5 * np.random.default_rng(seed).standard_normal((8, 6))
        (place,), _ = Matching()(np.zeros((8, 6)), [units], np.random.default_rng(0), most=16)
        new = place[place >= 8]
        assert len(new) > 2
        assert new.tolist() == list(range(8, 8 + len(new)))


# ---- a round ------------------------------------------------------------------------------------------------------


def aggregated(
    net: nn.Module, states: list[dict[str, Tensor]], name: str, sizes: list[int] | None = None, **kwargs: Any
) -> dict[str, Tensor]:
    """Aggregate of FedMA for clients that send these states."""

    class Sends(FedMA):
        def leave(self, state: Any, received: Any, me: Any) -> Reply:
            return Reply(dict(states[me.client]), {})

    method = Sends(net, batch_size=8, lr=0.0, engine="sequential", **kwargs)  # type: ignore[arg-type]
    fit(method, blobs(sizes or [8] * len(states), NETS[name][1]), rounds=1)
    return weights(method)


@pytest.mark.parametrize("name", NETS)
def test_permuted_copies_give_the_same_function(name: str) -> None:
    net, x = seeded(name), inputs(name)
    state = {n: v.clone() for n, v in net.state_dict().items()}
    units = units_of(net, x)
    copies = [state, shuffled(state, units, 1), shuffled(state, units, 2)]
    start = seeded(name)
    with torch.no_grad():  # the server's model is another one, but near enough to keep the order
        for value in start.parameters():
            value += 0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).double()
    mean = aggregated(start, copies, name)
    torch.testing.assert_close(output(net, mean, x), output(net, state, x))
    plain = {n: sum(c[n].double() for c in copies) / 3 for n in state if state[n].is_floating_point()}
    assert float((output(net, {**state, **plain}, x) - output(net, state, x)).abs().max()) > 1e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mlp", "lenet_bn", "residual", "bilstm"])
def test_identity_assignment_equals_fedavg(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Matching, "__call__", lambda self, r, clients, rng, most=None: ([np.arange(len(r)) for _ in clients], len(r))
    )
    one, other = (kind(seeded(name), lr=0.1, batch_size=8, engine="stacked") for kind in (FedMA, FedAvg))  # type: ignore[arg-type]
    for method in (one, other):
        fit(method, blobs((19, 9, 16), NETS[name][1]), rounds=2)
    assert largest_difference(weights(one), weights(other)) == 0.0


def test_one_client_and_softmax_regression_equal_fedavg() -> None:
    for sizes, hidden in (([21], (16,)), ([19, 9], ())):
        one, other = (kind(mlp(hidden=hidden), lr=0.1, batch_size=8, engine="stacked") for kind in (FedMA, FedAvg))
        for method in (one, other):
            fit(method, blobs(sizes), rounds=3)
        assert largest_difference(weights(one), weights(other)) < 1e-14


@pytest.mark.parametrize("engine", ["stacked", "captured"])
def test_engines_agree(engine: str) -> None:
    one, other = (FedMA(mlp(), lr=0.1, batch_size=8, engine=name) for name in ("sequential", engine))
    for method in (one, other):
        fit(method, blobs(fraction=0.5), rounds=3)
    assert largest_difference(weights(one), weights(other)) < 1e-9


# ---- growth -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "lenet_bn", "residual", "rnn one way"])
def test_nothing_grows_that_need_not(name: str) -> None:
    """Clients that have nothing new add nothing."""
    net, x = seeded(name), inputs(name)
    state = {n: v.clone() for n, v in net.state_dict().items()}
    mean = aggregated(seeded(name), [state, state], name, mode="grow", gamma0=1e-9)
    assert {n: v.shape for n, v in mean.items()} == {n: v.shape for n, v in state.items()}  # nothing to add
    torch.testing.assert_close(output(net, mean, x), output(net, state, x))


def test_grown_units_by_hand() -> None:
    """One hidden unit, the client's is opposite to the server's: both stay, each with what is known of it."""
    net = mlp(hidden=(1,)).double()
    with torch.no_grad():
        net.fc1.weight.fill_(5.0)  # type: ignore[union-attr, operator]
        net.fc1.bias.fill_(1.0)  # type: ignore[union-attr, operator]
    client = {n: -v.clone() if n.startswith("fc1") else v.clone() for n, v in net.state_dict().items()}
    client["head.weight"] = torch.full((CLASSES, 1), 2.0).double()
    before = {n: v.clone() for n, v in net.state_dict().items()}
    NETS["one unit"] = (None, (20,))
    mean = aggregated(net, [client], "one unit", mode="grow")
    assert mean["fc1.weight"].shape == (2, 20)
    torch.testing.assert_close(mean["fc1.weight"], torch.cat([before["fc1.weight"], client["fc1.weight"]]))
    torch.testing.assert_close(mean["head.weight"], torch.cat([0 * client["head.weight"], client["head.weight"]], 1))
    assert net.fc1.out_features == net.head.in_features == 2  # type: ignore[union-attr]


def test_running_statistics_of_grown_units_are_those_of_the_clients_that_have_them() -> None:
    net = add_norms(mlp(hidden=(1,))).double()
    with torch.no_grad():
        net.fc1.weight.fill_(5.0)  # type: ignore[union-attr, operator]
    own, other = ({n: v.clone() for n, v in net.state_dict().items()} for _ in range(2))
    other["fc1.weight"] = -own["fc1.weight"]
    own["fc1.norm.running_var"].fill_(2.0)
    other["fc1.norm.running_var"].fill_(3.0)
    mean = aggregated(net, [own, other], "added norms", [8, 24], mode="grow")
    torch.testing.assert_close(mean["fc1.weight"], torch.cat([own["fc1.weight"], other["fc1.weight"]]))
    assert mean["fc1.norm.running_var"].tolist() == pytest.approx([2.0, 3.0])


def test_growing_runs_are_capped_and_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "grow", "sigma": 0.02, "gamma0": 1e6, "sweeps": 0}
    whole = make(FedMA, **options)
    run(whole, tmp_path / "whole")
    assert whole.net.conv1.out_channels == 12  # type: ignore[union-attr]
    assert whole.net.fc1.out_features == 240  # type: ignore[union-attr]
    part = make(FedMA, **options)
    run(part, tmp_path / "part", ckpt_path=str(tmp_path / "whole" / "epoch=1.ckpt"))
    assert_same(state_of(part), state_of(whole))
    loaded = FedMA.load_from_checkpoint(tmp_path / "whole" / "last.ckpt")
    assert loaded.net.bn1.num_features == 12  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {"layerwise": True}), ("residual", {"mode": "grow", "sigma": 0.02, "gamma0": 1e6, "sweeps": 0})],
    ids=["layerwise", "grow"],
)
def test_workers_agree(name: str, options: dict[str, Any]) -> None:
    one, two = (
        FedMA(seeded(name), lr=0.05, batch_size=8, engine="sequential", workers=n, **options)  # type: ignore[arg-type]
        for n in (1, 2)
    )
    for method in (one, two):
        fit(method, blobs((19, 9, 16), NETS[name][1]), rounds=3)
    assert largest_difference(weights(one), weights(two)) == 0
    assert options.get("layerwise") or one.net.blocks[1].conv2.groups == 16  # type: ignore[union-attr,index]


# ---- one layer per round ------------------------------------------------------------------------------------------


class Wire(FederatedCallback):
    def __init__(self) -> None:
        self.up: list[set[str]] = []
        self.down: list[set[str]] = []
        self.model: list[dict[str, Tensor]] = []
        self.sent: list[dict[str, Tensor]] = []

    def on_client_start(self, trainer: Any, pl_module: Any, client: int, message: Any) -> None:
        if client == 0:
            self.down.append(set(message))

    def on_round_end(self, trainer: Any, pl_module: Any, messages: Any) -> None:
        self.up.append(set(messages[0].tensors))
        self.model.append(weights(pl_module))
        self.sent.append(messages[0].tensors)


def layerwise(**kwargs: Any) -> FedMA:
    return FedMA(mlp(hidden=(16, 8)), layerwise=True, lr=0.1, batch_size=8, engine="stacked", **kwargs)


def test_layer_by_layer() -> None:
    wire, method = Wire(), layerwise()
    fit(method, blobs(), rounds=4, callbacks=[wire])
    layers = [{f"{layer}.weight", f"{layer}.bias"} for layer in ("fc1", "fc2", "head")]
    everything = set().union(*layers)
    assert wire.up == [*layers, layers[0]]
    assert wire.down == [everything, layers[0] | {PLACES}, layers[1] | {PLACES}, everything]
    start = weights(layerwise())
    for round, changed in enumerate(layers):
        before = wire.model[round - 1] if round else {n: v.double() for n, v in start.items()}
        same = {n for n in everything if torch.equal(wire.model[round][n], before[n])}
        assert same == everything - changed
    assert set(method.snapshots[0].private) == {OWN + name for name in layers[1] | layers[2]}


def test_the_layer_of_a_round_is_matched_before_it_is_averaged() -> None:
    """Clients that send permuted copies of a layer leave it as it was."""
    method, net = layerwise(), mlp(hidden=(16, 8)).double()
    state = {n: v.clone() for n, v in net.state_dict().items()}
    units, leave = units_of(net, inputs("mlp")), method.leave
    copies = [state, *(shuffled(state, units, seed) for seed in (1, 2, 3))]
    method.leave = lambda _, received, me: leave(copies[me.client], received, me)  # type: ignore[method-assign]
    fit(method, blobs(), rounds=1)
    assert largest_difference(copies[1], state) > 0.1
    assert largest_difference(weights(method), state) < 1e-12


def test_the_layer_of_a_round_is_averaged_by_samples() -> None:
    method, sent = layerwise(), {}
    method.matching = lambda reference, clients, rng, most: (  # type: ignore[assignment]
        [np.arange(len(reference)) for _ in clients],
        len(reference),
    )
    method.on_before_aggregate = lambda messages: sent.update({m.samples: m.tensors["fc1.weight"] for m in messages})  # type: ignore[attr-defined]
    fit(method, blobs((19, 9, 16)), rounds=1)
    mean = sum(samples * value for samples, value in sent.items()) / (19 + 9 + 16)
    torch.testing.assert_close(weights(method)["fc1.weight"], mean)


def test_a_client_goes_on_from_its_own_upper_layers_in_the_matched_order() -> None:
    method = layerwise()
    order = np.random.default_rng(0).permutation(16)
    seen: list[dict[str, Tensor]] = []
    enter = method.enter

    def watched(received: Any, me: Any) -> Any:
        state = enter(received, me)
        if me.client == 1 and method.turn(me.round) == 1:
            seen.append({n: v.clone() for n, v in state.items()})
            own = method.snapshots[1].private
            torch.testing.assert_close(state["fc2.weight"][:, order], own[f"{OWN}fc2.weight"])
            assert torch.equal(state["fc2.bias"], own[f"{OWN}fc2.bias"])
            assert torch.equal(state["head.weight"], own[f"{OWN}head.weight"])
        return state

    method.enter = watched  # type: ignore[method-assign]

    def matching(reference: Any, clients: Any, rng: Any, most: Any) -> Any:
        stay = [np.arange(len(reference)) for _ in clients]
        return ([stay[0], order, *stay[2:]] if len(reference) == 16 else stay), len(reference)

    method.matching = matching  # type: ignore[assignment]
    fit(method, blobs(), rounds=2)
    assert len(seen) == 1
    assert seen[0].keys() == entries(method.net).keys()


def test_a_second_fit_knows_who_was_there_in_its_own_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1 was in round 0 of the first fit, not of the second: in round 1 it is sent the whole model."""
    method, data, cohorts, wire = layerwise(), blobs((9, 8)), [[0, 1]], []
    monkeypatch.setattr(data, "cohort", lambda round: cohorts[round])
    fit(method, data, rounds=1)
    cohorts[:] = [[0], [0, 1]]
    method.on_client_start = lambda client, message: wire.append((client, PLACES in message))  # type: ignore[attr-defined]
    fit(method, data, rounds=2)
    assert sorted(wire[1:]) == [(0, True), (1, False)]


@pytest.mark.parametrize("name", ["residual", "bilstm", "lenet_bn"])
def test_cycles_of_other_nets(name: str) -> None:
    method = FedMA(seeded(name), layerwise=True, lr=0.05, batch_size=8, engine="stacked")  # type: ignore[arg-type]
    wire = Wire()
    fit(method, blobs((19, 9, 16), NETS[name][1], fraction=0.7), rounds=7, callbacks=[wire])
    cycle = len(method.units) + 1
    assert set().union(*wire.up[:cycle]) == set(entries(method.net))


def test_stages() -> None:
    net = Residual()
    stages = stages_of(net, net.units())
    assert stages["stem.weight"] == stages["blocks.0.bn1.running_var"] == 0
    assert stages["blocks.0.conv2.weight"] == stages["blocks.0.bn2.bias"] == stages["blocks.1.conv2.weight"] == 1
    assert stages["blocks.1.conv3.weight"] == stages["head.bias"] == 2


def test_a_normalisation_layer_is_averaged_in_one_round() -> None:
    """Running statistics go with the weights of their layer, also outside all units, as on a residual stream."""
    net = ResNet18()
    stages = stages_of(net, block_units(net))
    assert set(stages.values()) == set(range(9))
    layers = norm_layers(net)
    assert len(layers) == 20
    for layer, module in layers.items():
        assert len({stages[f"{layer}.{part}"] for part in module.state_dict()}) == 1, layer


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sigma": 0.0}, "sigma must be greater than 0"),
        ({"sweeps": -1}, "sweeps must be 0 or more"),
        ({"mode": "shrink"}, "mode must be fixed_width or grow, not 'shrink'"),
        ({"mode": "grow", "layerwise": True}, "leave out layerwise"),
        ({"buffers": "keep"}, "buffers must not be keep"),
        ({"layerwise": True, "store": "folder"}, "leave store out"),
    ],
)
def test_bad_arguments_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        FedMA(mlp(), **options)


def test_units_that_share_a_dimension_cannot_grow() -> None:
    with pytest.raises(FederationError, match="use fixed_width"):
        fit(FedMA(Lstm(), mode="grow", batch_size=8), blobs(shape=(4, 3)), rounds=1)
