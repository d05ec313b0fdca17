"""Server and clients apart: objects of their own, own data alone, messages as bytes, and the simulation's numbers.

The server is a stock ``Trainer.fit`` without a sample. Every client is a :class:`Site`: a method object of its own,
made anew from the same settings, no Trainer, its own samples and nobody else's, and a folder for what it keeps. What
passes between them is bytes.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from fl_lightning.errors import FederationError
from fl_lightning.local_optim import Adam, RMSprop
from fl_lightning.module import FederatedModule
from fl_lightning.robust import Median
from fl_lightning.schedules import Cosine
from tests.support import cases, untimed
from tests.support.sites import InProcess, case_network, kept, serve

#: Chooses its option by trials on everybody's data, which is for simulations: it refuses, as tested below.
SIMULATED_ONLY = ("FedBPS-auto",)


class StopAfter(Callback):
    """Stops a fit after some rounds; the run is as long as its Trainer says all the same."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.rounds


def apart(case: cases.Case, net: str, policy: str, folder: Path, restart: int | None = None) -> tuple[Any, InProcess]:
    """The case's run with server and clients apart; the server may be made anew after some rounds."""
    sites, path = case_network(case, net, policy, folder), folder / "server.ckpt"
    for last in [cases.ROUNDS] if restart is None else [restart, cases.ROUNDS]:
        server, resumed = case.make(net, policy, "sequential"), str(path) if path.exists() else None
        stop = [StopAfter(last)]
        trainer = serve(server, sites, len(cases.SIZES), cases.ROUNDS, case.fraction, resumed, callbacks=stop)
        if restart is not None:
            trainer.save_checkpoint(path)
    return server, sites


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name].nan_to_num(9e9), right[name].nan_to_num(9e9))]
    assert not different


def noisy(inputs: Tensor, rng: np.random.Generator) -> Tensor:
    """An augmentation: every batch has noise of its client's own."""
    return inputs + 0.1 * torch.from_numpy(rng.standard_normal(tuple(inputs.shape))).to(inputs)


def frozen() -> nn.Module:
    """A perceptron whose first layer is not trained."""
    net = cases.mlp()
    net.fc1.requires_grad_(False)
    return net


def dropping() -> nn.Module:
    """A perceptron with dropout, whose noise is the client's own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(cases.FEATURES, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, cases.CLASSES)]
        return nn.Sequential(OrderedDict(zip(("fc1", "relu", "drop", "fc2"), layers, strict=True)))


NETS = {"frozen": frozen, "dropout": dropping}
CYCLED = {"label_maps": torch.stack([(torch.arange(cases.CLASSES) + shift) % cases.CLASSES for shift in range(5)])}
HELD_OUT, AUGMENTED = {"val_fraction": 0.25}, {"transform": noisy, "augment": True}
CACHED = {**cases.L1, "omega": 0.1, "never_sampled": "adapt", "evaluation": {"dictionary": "cached"}}
REFITTED = {"steps": 20, "basis": "refitted", "adaptive": False}
FEATURES = {"warmup": 1, "feature_stats": True, "inference": REFITTED}
#: What a client may further have of its own, and options that no golden number is recorded of.
MORE = [
    cases.Case("optimizer-kept", "FedAvg", {"optimizer": Adam(), "keep_optimizer": True, "lr": 0.01}, ("norm",)),
    cases.Case("momentum-kept", "FedPer", {"momentum": 0.5, "keep_optimizer": True}, ("mlp",)),
    cases.Case("optimizer", "FedProx", {"mu": 0.5, "optimizer": RMSprop(), "lr": 0.01}, ("mlp",)),
    *(
        cases.Case(f"schedule-by-{unit}", "FedAvg", {"lr_schedule": Cosine(), "lr_schedule_by": unit}, ("mlp",))
        for unit in ("round", "epoch", "step")
    ),
    cases.Case("SCAFFOLD-schedule", "SCAFFOLD", {"lr_schedule": Cosine()}, ("mlp",)),
    cases.Case("frozen", "FedAvg", nets=("frozen",)),
    cases.Case("frozen-APFL", "APFL", nets=("frozen",)),
    cases.Case("dropout", "FedAvg", nets=("dropout",)),
    cases.Case("dropout-WAFFLe", "WAFFLe", cases.FACTORS, ("dropout",)),
    cases.Case("augmented", "FedPer", nets=("mlp",), data=AUGMENTED),
    cases.Case("held-out", "FedAvg", nets=("norm",), policies=cases.ALL, data=HELD_OUT),
    *(
        cases.Case(f"held-out-{name}", name, options, ("mlp",), data=HELD_OUT)
        for name, options in {"IFCA": {"clusters": 2}, "FedBPS": {"p": 0.3}, "WAFFLe": cases.FACTORS}.items()
    ),
    cases.Case("relabelled", "FedCluster", {"clusters": 2, "groups": "dominant"}, ("mlp",), data=CYCLED),
    cases.Case("relabelled-IFCA", "IFCA", {"clusters": 2}, ("mlp",), data=CYCLED),
    cases.Case("median", "SCAFFOLD", {"aggregation": Median()}, ("mlp",)),
    cases.Case("LGFedAvg-shared", "LGFedAvg", {"shared": ["fc1"]}, ("mlp",)),
    cases.Case("FedDAF-refitted", "FedDAF", FEATURES, ("norm",)),
    cases.Case("WAFFLEAvg-available", "WAFFLEAvg", {"before_first": "available"}, ("mlp",)),
    cases.Case("WAFFLeL1-cached", "WAFFLeL1", CACHED, ("mlp",)),
]
ALL = [case for case in (*cases.CASES, *MORE) if case.name not in SIMULATED_ONLY]
RUNS = [(case, *run) for case in ALL for run in case.runs()]


@functools.cache
def together(name: str, net: str, policy: str) -> tuple[FederatedModule, dict[str, dict[str, Tensor]]]:
    """The case's run under one Trainer, and what it came to."""
    case = next(case for case in ALL if case.name == name)
    method = cases.run(case, net, policy, "sequential")
    return method, cases.parts(method)


def assert_equal(server: FederatedModule, sites: InProcess, run: tuple[cases.Case, str, str]) -> None:
    """Weights, what clients keep and what they score are those of the run under one Trainer."""
    case, net, policy = run
    method, expected = together(case.name, net, policy)
    assert_same(dict(server.state_dict()), expected["server"])
    assert_same(kept(sites, server), expected["private"])
    assert_same(server.evaluator.scores, method.evaluator.scores)
    assert untimed(server.summary) == pytest.approx(untimed(method.summary), rel=0, abs=0, nan_ok=True)
    assert (server.bytes_up, server.bytes_down) == (method.bytes_up, method.bytes_down)


@pytest.fixture(autouse=True)
def nets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in NETS.items():
        monkeypatch.setitem(cases.NETS, name, make)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0].name}-{run[1]}-{run[2]}")
def test_separate_processes_equal_the_simulation(run: tuple[cases.Case, str, str], tmp_path: Path) -> None:
    server, sites = apart(*run, tmp_path)
    assert_equal(server, sites, run)
    assert all(site.method._trainer is None for site in sites.sites.values())


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_restarted_server_continues(case: cases.Case, tmp_path: Path) -> None:
    run = (case, *next(iter(case.runs())))
    assert_equal(*apart(*run, tmp_path, restart=2), run)


def test_runs_have_clients_that_never_train() -> None:
    """Which are evaluated all the same; but for those in which all clients take part."""
    for case in cases.CASES[:4]:
        method, _ = together(case.name, "mlp", "average")
        trained = {client for client in method.snapshots if method.snapshots[client].rounds}
        assert 0 < len(trained) < len(cases.SIZES)
        assert method.evaluator.scores["test"].isfinite().all()


def test_trials_on_all_clients_data_are_rejected(tmp_path: Path) -> None:
    case = next(case for case in cases.CASES if case.name == "FedBPS-auto")
    with pytest.raises(
        FederationError, match="p: auto tries values on simulated clients, which real ones are not: give p"
    ):
        apart(case, "mlp", "average", tmp_path)
