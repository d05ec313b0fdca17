"""Parameter bias: normalisation statistics of the federated model compared with a centrally trained one."""

from __future__ import annotations

import csv

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from fl_lightning.callbacks.central import CentralCallback, samples_trained, some_tests
from fl_lightning.engine import entries
from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.norm_statistics import SAMPLES as BATCH
from fl_lightning.methods.lib.norm_statistics import (
    STATISTICS,
    LayerStatistics,
    measured_statistics,
    model_statistics,
    without_running,
)
from fl_lightning.module import FederatedModule
from fl_lightning.nets.norms import norm_layers
from fl_lightning.wire import State

#: Number of test samples to measure statistics of layers without running statistics.
SAMPLES = 2000


class ParameterBiasCallback(CentralCallback):
    """Mean absolute error of mu, sigma, beta and gamma against a central model, at the end of a fit.

    Written to ``parameter_bias.csv`` in the log folder: one row for every layer and statistic, for every statistic over
    all layers, and for all together. All models start from the same weights, so that their units correspond. Layers
    without running statistics are measured on up to 2,000 test samples. For methods with one model per cluster, errors
    are means over the clusters that have clients.

    Attributes:
        bias: errors by statistic, and under ``all``.
        by_layer: errors by layer and statistic.

    Args:
        central: file of the central model; None stores it as ``central.pt`` in ``folder``.
        folder: folder of the table; None means the Trainer's log folder.
    """

    def __init__(self, central: str | None = None, folder: str | None = None) -> None:
        super().__init__(central, folder)
        self.bias: dict[str, float] = {}
        self.by_layer: dict[str, dict[str, float]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse nets and methods without statistics to compare."""
        super().setup(trainer, pl_module, stage)
        assert isinstance(pl_module, FederatedModule)
        if not norm_layers(pl_module.net):
            name = type(pl_module.net).__name__
            raise FederationError(f"{name} has no normalisation layers to compare.")
        if pl_module.grows:
            raise FederationError(
                f"{type(pl_module).__name__} adds units that a central model does not have: let it keep its widths, as "
                "FedMA does with mode=fixed_width, or leave ParameterBiasCallback out."
            )
        if kept := pl_module.private_names:
            raise FederationError(
                f"{type(pl_module).__name__} has no shared model to compare, as clients keep {kept[0]}: leave "
                "ParameterBiasCallback out."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse methods whose models start with different weights, unlike a single central model."""
        assert isinstance(pl_module, FederatedModule)
        if not self.initial and not begin_alike(pl_module):
            raise FederationError(
                f"The models of {type(pl_module).__name__} start with different weights, so their units do not match "
                "one central model: let them start equal, as FeSEM does with centres=same, or leave "
                "ParameterBiasCallback out."
            )
        super().on_fit_start(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train the central model, compare, and write the table."""
        assert isinstance(pl_module, FederatedModule)
        if trainer.fast_dev_run or samples_trained(pl_module) == self.before:  # type: ignore[attr-defined]
            return
        central = self.central_state(trainer, pl_module)
        other = all_statistics(pl_module, central)
        errors = {layer: {k: torch.zeros_like(v) for k, v in found.items()} for layer, found in other.items()}
        for share, state in pl_module.global_models():
            for layer, found in all_statistics(pl_module, state).items():
                for k, v in found.items():
                    errors[layer][k] += share * (v - other[layer][k]).abs()
        self.by_layer = {layer: {k: float(v.mean()) for k, v in found.items()} for layer, found in errors.items()}
        parts = {k: [found[k] for found in errors.values() if k in found] for k in STATISTICS}
        self.bias = {k: float(torch.cat(values).mean()) for k, values in parts.items() if values}
        self.bias["all"] = float(torch.cat([v for values in parts.values() for v in values]).mean())
        self._write(trainer, parts)

    def run_metrics(self) -> dict[str, float]:
        """Return the errors over all layers, for tables of results."""
        return {f"bias/{statistic}": value for statistic, value in self.bias.items()}

    def _write(self, trainer: Trainer, parts: dict[str, list[Tensor]]) -> None:
        path = self.out(trainer) / "parameter_bias.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["layer", "statistic", "mean absolute error"])
            for layer, found in self.by_layer.items():
                writer.writerows([layer, statistic, f"{value:.6g}"] for statistic, value in found.items())
            writer.writerows(["all", statistic, f"{value:.6g}"] for statistic, value in self.bias.items())
        rank_zero_info(f"Parameter bias {self.bias['all']:.4g}: {path}")


def begin_alike(module: FederatedModule) -> bool:
    """Whether all models of the server have the same values; true for a single model."""
    models = list(module.server) if isinstance(module.server, nn.ModuleList) else [module.server]
    first, *others = map(entries, models)
    return all(torch.equal(value, other[name]) for other in others for name, value in first.items())


def all_statistics(module: FederatedModule, state: State) -> LayerStatistics:
    """Return the statistics of a model's normalisation layers, measured on test samples if not stored."""
    found, missing = model_statistics(module.net, state), without_running(module.net)
    if missing:
        federation = module.federation
        x = federation.features(federation.inputs[some_tests(module, SAMPLES)], module.compute_dtype)
        for layer, own in measured_statistics(module, state, torch.split(x, BATCH), missing).items():
            found[layer] = {**own, **found[layer]}
    return found
