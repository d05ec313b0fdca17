"""Every method and variant on small nets, with results recorded in ``golden.json``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning import methods
from fl_lightning.module import FederatedModule
from fl_lightning.optim import FedAdam
from tests.support import CLASSES, FEATURES, blobs, fit, mlp, untimed

SIZES = (19, 9, 16, 8, 24)
ROUNDS = 3
ENGINES = ("sequential", "stacked")


class Normed(nn.Module):
    """A perceptron with BatchNorm: running statistics as well as weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, 12)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.fc1(x))))


def normed() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Normed()


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "norm": normed, "deep": partial(mlp, hidden=(12, 10))}


@dataclass(frozen=True)
class Case:
    """One variant of a method.

    Args:
        name: name of the case.
        method: name of the method.
        options: its options.
        nets: nets it is run on.
        policies: the ``buffers`` policies on the net with BatchNorm.
        fraction: share of the clients in a round.
        data: further settings of the data.
    """

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    nets: tuple[str, ...] = ("mlp", "norm")
    policies: tuple[str, ...] = ("average",)
    fraction: float = 0.4
    data: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, net: str, policy: str = "average", engine: str = "stacked", **more: Any) -> FederatedModule:
        """Build the method."""
        settings = {"lr": 0.1, "epochs": 2, "batch_size": 8, "engine": engine, "seed": 3, "buffers": policy}
        kind: Callable[..., FederatedModule] = getattr(methods, self.method)
        return kind(NETS[net](), **{**settings, **self.options, **more})

    def runs(self) -> Iterable[tuple[str, str]]:
        """The nets and buffer policies of the case."""
        for net in self.nets:
            yield from ((net, policy) for policy in (self.policies if net == "norm" else ("average",)))


ALL = ("average", "keep", "reset")
L1 = {"factors": {"fc1": 6}}
FACTORS = {**L1, "vi_lr_mult": 100.0}
STEPS = {"inference": {"steps": 20}}
CASES = [
    Case("FedAvg", "FedAvg", policies=ALL),
    Case("FedAvg-adam", "FedAvg", {"server_optimizer": partial(FedAdam, lr=0.05)}),
    Case("FedAvg-momentum", "FedAvg", {"momentum": 0.5, "weight_decay": 0.01, "clip_norm": 0.5}),
    Case("FedAvg-uniform", "FedAvg", {"weighting": "uniform"}, ("mlp",)),
    Case("FedProx", "FedProx", {"mu": 0.5}, policies=ALL),
    Case("FedProx-momentum", "FedProx", {"mu": 0.5, "momentum": 0.5, "clip_norm": 0.5}, ("mlp",)),
    Case("QFFL", "QFFL", {"q": 0.5}, policies=ALL),
    Case("FedPer", "FedPer", policies=ALL),
    Case("FedPer-norm", "FedPer", {"personal": ["norm"]}, ("norm",)),
    Case("LGFedAvg", "LGFedAvg", policies=ALL),
    Case("Local", "Local"),
    Case("Local-some", "Local", {"clients": [1, 3]}, ("mlp",)),
    Case("FedGN", "FedGN", {"groups": 4}, ("norm",)),
    Case("PFedMe", "PFedMe", {"lam": 5.0, "inner_steps": 3, "beta": 0.5}, policies=ALL),
    Case("APFL", "APFL", policies=ALL),
    Case("APFL-fixed", "APFL", {"adaptive": False, "alpha": 0.3}, ("mlp",)),
    Case("APFL-reg", "APFL", {"alpha_reg": 0.02, "momentum": 0.5, "clip_norm": 0.5}, ("mlp",)),
    Case("SCAFFOLD", "SCAFFOLD", policies=ALL),
    Case("SCAFFOLD-momentum", "SCAFFOLD", {"momentum": 0.5, "weight_decay": 0.01}, ("mlp",)),
    Case("SCAFFOLD-clip", "SCAFFOLD", {"clip_norm": 0.5}, ("mlp",)),
    Case("WeightErosion", "WeightErosion", {"distance_penalty": 0.1}),
    Case("WeightErosion-all", "WeightErosion", {"distance_penalty": 0.1, "agent_of_interest": "all"}, policies=ALL),
    Case("WAFFLEAvg", "WAFFLEAvg"),
    Case("WAFFLEAvg-mean", "WAFFLEAvg", {"control": "weighted_mean", "smoothing": 2, "local_from": 2}, policies=ALL),
    Case("WAFFLEAvg-all", "WAFFLEAvg", {"agent_of_interest": "all", "local_from": 0.5, "smoothing": 2}, policies=ALL),
    Case("WAFFLEAvg-mean-all", "WAFFLEAvg", {"control": "weighted_mean", "agent_of_interest": "all"}, ("mlp",)),
    Case("WAFFLe", "WAFFLe", FACTORS, policies=ALL),
    Case("WAFFLe-joint", "WAFFLe", {**FACTORS, "schedule": "joint", "vi_lr_mult": 1.0, "never_sampled": "ones"}),
    Case(
        "WAFFLe-prior",
        "WAFFLe",
        {**FACTORS, "never_sampled": "prior_mean", "evaluation": {"selection": "threshold"}},
        ("mlp",),
    ),
    Case(
        "WAFFLe-cached",
        "WAFFLe",
        {**FACTORS, "evaluation": {"dictionary": "cached", "selection": "sampled"}, "momentum": 0.5},
    ),
    Case("WAFFLeL1", "WAFFLeL1", {**L1, "omega": 0.1}),
    Case("WAFFLeL1-adapt", "WAFFLeL1", {**L1, "omega": 0.1, "never_sampled": "adapt"}, ("mlp",)),
    Case("FedBPS", "FedBPS", {"p": 0.3}, policies=ALL),
    Case("FedBPS-tensor", "FedBPS", {"p": 0.5, "ranking": "per_tensor", "laplace": {"curvature": "ggn"}}, ("mlp",)),
    Case("FedBPS-hessian", "FedBPS", {"p": 0.5, "laplace": {"curvature": "hessian", "draws": 3}}, ("mlp",)),
    Case("FedBPS-auto", "FedBPS", {"p": "auto", "trials": {"values": (0.1, 0.6), "rounds": 1}}, ("mlp",)),
    Case("FedDAF", "FedDAF", {"warmup": 1, "refit_every": 1, **STEPS}, ("norm",), ("average", "reset")),
    Case("FedDAF-add", "FedDAF", {"warmup": 0, "refit_every": 2, **STEPS, "add_norm": True}, ("mlp",)),
    Case(
        "FedDAF-features",
        "FedDAF",
        {"warmup": 1, "feature_stats": True, "latents": "per_client", "inference": {"steps": 20, "weights": "sampled"}},
        ("mlp",),
    ),
    Case("FedMA", "FedMA", {}, ("mlp", "norm", "deep"), fraction=1.0),
    Case("FedMA-some", "FedMA", {"sigma": 0.3}, ("deep",)),
    Case("FedMA-grow", "FedMA", {"mode": "grow", "sigma": 0.1, "gamma0": 50.0}, ("mlp", "norm")),
    Case("FedMA-layerwise", "FedMA", {"layerwise": True, "sigma": 0.3}, ("mlp", "norm", "deep")),
    Case("FedMA-layerwise-all", "FedMA", {"layerwise": True, "sigma": 0.3}, ("deep",), fraction=1.0),
    Case("FeSEM", "FeSEM", {"clusters": 2}, policies=ALL),
    Case("FeSEM-same", "FeSEM", {"clusters": 2, "centres": "same"}, ("mlp",)),
    Case("IFCA", "IFCA", {"clusters": 2}, policies=ALL),
    Case("IFCA-warmup", "IFCA", {"clusters": 3, "warmup": 1, "weighting": "samples"}, ("mlp",)),
    Case("FedGroup", "FedGroup", {"clusters": 2, "cold_steps": 4}, policies=ALL),
    Case("FedCluster", "FedCluster", {"clusters": 2}, policies=ALL),
    Case("FedCluster-dominant", "FedCluster", {"clusters": 2, "groups": "dominant"}, ("mlp",)),
]


def data(case: Case) -> Any:
    """Five ragged clients, some of which never train."""
    return blobs(SIZES, fraction=case.fraction, seed=3, **case.data)


def run(case: Case, net: str, policy: str, engine: str, callbacks: Sequence[Any] = ()) -> FederatedModule:
    """Fit the case for three rounds."""
    method = case.make(net, policy, engine)
    torch.manual_seed(0)
    fit(method, data(case), ROUNDS, callbacks=list(callbacks))
    return method


def parts(method: FederatedModule) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a finished run by part: server, clients, personal models and scores."""
    private: dict[str, Tensor] = {}
    for client in method.snapshots:
        shot = method.snapshots[client]
        private |= {f"{client}.{name}": value for name, value in shot.private.items()}
        private[f"{client}.counters"] = torch.tensor([shot.rounds, shot.steps, shot.last_round])
    names = set(method.server_state())
    personal: dict[str, Tensor] = {}
    for client in range(len(SIZES)):
        state = method.personal_state(client)
        personal |= {f"{client}.{name}": value for name, value in state.items() if name in names}
    scores = method.evaluator.scores[method.federation.validated]
    numbers = {"scores": scores, "bytes": torch.tensor([method.bytes_up, method.bytes_down])}
    summary = {name: torch.tensor(float(value)) for name, value in untimed(method.summary).items()}
    server = dict(method.state_dict())
    return {"server": server, "private": private, "personal": personal, "numbers": {**numbers, **summary}}


def digest(tensors: dict[str, Tensor]) -> str:
    """Hash names, shapes, types and bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def checksum(tensors: dict[str, Tensor]) -> float:
    """Return a weighted sum of all entries, which other rounding hardly changes."""
    total = 0.0
    for place, name in enumerate(sorted(tensors)):
        value = tensors[name].detach().cpu().double().flatten().nan_to_num(-1.0)
        weights = torch.cos(torch.arange(len(value), dtype=torch.float64) + place)
        total += float((value * weights).sum())
    return total


def platform() -> str:
    """Return the versions and processor features for which bits are reproducible."""
    vendor = "unknown"
    try:
        with open("/proc/cpuinfo") as file:
            vendor = next((line.split(":")[1].strip() for line in file if line.startswith("vendor_id")), vendor)
    except OSError:
        pass
    return f"torch {torch.__version__}, {vendor}, {torch.backends.cpu.get_cpu_capability()}"


def same(found: float, wanted: float) -> bool:
    """Return whether two checksums agree up to rounding."""
    return math.isclose(found, wanted, rel_tol=1e-7, abs_tol=1e-7)
