"""FedDAF ("Federated Learning with Data-Agnostic Distribution Fusion"): weights from normalisation statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.fusion import Fusion, capped, fusion_weights
from fl_lightning.methods.lib.fusion_vae import Posterior, belonging, expected_allocation, sampled_allocation
from fl_lightning.methods.lib.norm_statistics import (
    SAMPLES,
    STATISTICS,
    LayerStatistics,
    measured_statistics,
    model_statistics,
    without_running,
)
from fl_lightning.methods.settings import Inference
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.nets.norms import add_norms, feature_layers, norm_layers
from fl_lightning.parties import Me, Reply
from fl_lightning.ranges import Count, CountOrZero
from fl_lightning.wire import Message, State

#: Prefix of the measured statistics in an up message.
MEASURED = "statistics."


class FedDAF(FederatedModule):
    """FedAvg with weights computed from the statistics of the clients' normalisation layers.

    A client's statistics d_k = (mu, sigma, beta, gamma) describe its distribution. Periodically, the server fits a
    variational autoencoder to the d_k of all clients, which allocates each to some of M virtual components; a client's
    weight is its share of its components (:func:`~fl_lightning.methods.lib.fusion.fusion_weights`).

    BatchNorm's statistics are part of the model. GroupNorm, LayerNorm and plain features (``feature_stats``) have none:
    clients measure them with their trained model in rounds with a refit, and send them with the model under names that
    begin with ``statistics.``.

    Between refits, a client's weight is a constant multiple of its FedAvg weight, renormalised over the cohort. Clients
    that took part in no refit have their FedAvg weight.

    Args:
        net: the network.
        warmup: rounds of plain FedAvg before the first fit.
        refit_every: rounds between fits.
        latents: latents of components are ``shared`` by the clients, or inferred for each (``per_client``).
        add_norm: add normalisation layers to a net without any.
        feature_stats: describe clients by mean and standard deviation of features instead of normalisation layers; None
            does so if the net has no normalisation layers and ``add_norm`` is off.
        inference: options of the server's inference; see :class:`~fl_lightning.methods.settings.Inference`.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    aggregates_by_mean = takes_rules = False  # the clients' statistics decide the weights

    def __init__(
        self,
        net: FedNet,
        warmup: CountOrZero = 5,
        refit_every: Count = 5,
        latents: Literal["shared", "per_client"] = "shared",
        add_norm: bool = False,
        feature_stats: bool | None = None,
        inference: Inference = Inference(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> None:
        whole: nn.Module = FedNet.from_spec(net) if isinstance(net, dict) else net
        if feature_stats is None:
            feature_stats = not add_norm and not norm_layers(whole)
        _check_net(whole, add_norm, feature_stats)
        super().__init__(add_norms(whole) if add_norm else whole, **kwargs)  # type: ignore[arg-type]
        if self.buffers_policy == "keep":
            raise FederationError("FedDAF reads running statistics from the messages: buffers must not be keep.")
        self.warmup, self.refit_every, self.feature_stats = warmup, refit_every, feature_stats
        self.inference = how = Inference.of(inference, "inference")
        self.fusion = Fusion(how.components, latents == "shared", how.steps, how.basis, how.adaptive)
        #: Weight of each client as a multiple of its FedAvg weight.
        self.multiples: dict[int, float] = {}
        #: Weights of the last round's clients.
        self.client_weights: dict[int, float] = {}

    def refits(self, round: int) -> bool:
        """Whether the server fits its autoencoder in this round."""
        return round >= self.warmup and (round - self.warmup) % self.refit_every == 0

    # client

    def measure(self, state: State, batches: Iterable[Tensor]) -> LayerStatistics:
        """Measure statistics that are not part of the model."""
        layers = list(feature_layers(self.net)) if self.feature_stats else without_running(self.net)
        of: Literal["input", "output"] = "output" if self.feature_stats else "input"
        return measured_statistics(self, state, batches, layers, of) if layers else {}

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send the trained model and, in rounds with a refit, measured statistics of the client's data."""
        reply = super().leave(state, received, me)
        if not self.refits(me.round):
            return reply
        found = self.measure(state, (x for x, _ in me.data.batches(SAMPLES, self.compute_dtype)))
        named = {f"{MEASURED}{layer}.{kind}": value for layer, own in found.items() for kind, value in own.items()}
        return reply.plus(up={name: value.to(self.compute_dtype) for name, value in named.items()})

    # server

    def on_fit_start(self) -> None:
        """Measure random samples, so that unsupported nets are refused before training."""
        super().on_fit_start()
        self.measure(self.server_state(), [self.example()])

    def describe(self, tensors: State) -> Tensor:
        """Return d_k of a message: mu, sigma, beta, gamma (if present) by layer, float64, shape (D,)."""
        layers = {} if self.feature_stats else model_statistics(self.net, tensors)
        for name, value in tensors.items():
            if name.startswith(MEASURED):
                layer, _, kind = name.removeprefix(MEASURED).rpartition(".")
                layers.setdefault(layer, {})[kind] = value.double()
        return torch.cat([own[kind] for own in layers.values() for kind in STATISTICS if kind in own]).cpu()

    def aggregate(self, messages: list[Message]) -> State:
        """Average the models with the fusion weights, which are refitted first if due."""
        if self.refits(self.completed_rounds) and len(messages) > 1:
            self.multiples |= self._infer(messages)
        multiples = torch.tensor([self.multiples.get(m.client, 1.0) for m in messages], dtype=torch.float64)
        weights = self._sizes(messages) * multiples
        weights /= weights.sum()
        if self.inference.cap is not None and self.multiples:
            weights = capped(weights, self.inference.cap / len(messages))
        self.client_weights = {m.client: float(w) for m, w in zip(messages, weights, strict=True)}
        return self.mean(messages, weights.tolist(), self.shared_names)

    def _infer(self, messages: list[Message]) -> dict[int, float]:
        """Refit; return the clients' weights as multiples of their FedAvg weights."""
        clients, round = [m.client for m in messages], self.completed_rounds
        rngs = {client: seeding.stream(self.seed, "fusion", round, client) for client in clients}
        rngs[-1] = seeding.stream(self.seed, "fusion.server", round)
        posterior = self.fusion.refit(torch.stack([self.describe(m.tensors) for m in messages]), clients, rngs)
        sizes = self._sizes(messages)
        self.fusion.weights, _ = fusion_weights(*self._allocation(posterior, clients), sizes)
        ratios = self.fusion.weights / (sizes / sizes.sum())
        return {client: float(ratio) for client, ratio in zip(clients, ratios, strict=True)}

    def _allocation(self, posterior: Posterior, clients: list[int]) -> tuple[Tensor, Tensor]:
        if self.inference.weights == "expected":
            b, c = expected_allocation(posterior)
        else:
            round = self.completed_rounds
            rngs = [seeding.stream(self.seed, "fusion.draw", round, client) for client in clients]
            b, c = sampled_allocation(posterior, self.fusion.draw(rngs, rngs[0], 1).at(0))
        return b, belonging(b, c)

    def _sizes(self, messages: list[Message]) -> Tensor:
        """Return n_k, or 1 for all clients if weighted uniformly, shape (K,)."""
        return torch.tensor([m.samples if self.weighting == "samples" else 1 for m in messages]).double()

    def round_metrics(self) -> dict[str, float]:
        """Return largest weight and effective number of clients, 1 / sum a_k^2; after a fit, components and error."""
        weights = list(self.client_weights.values())
        found = {"fusion/largest": max(weights), "fusion/effective": 1 / sum(w * w for w in weights)}
        if self.fusion.vae is not None:
            found |= {"fusion/components": self.fusion.vae.components, "fusion/error": self.fusion.errors[1]}
        return found

    def server_extras(self) -> dict[str, Any]:
        """Return the autoencoder, whose size changes, and the clients' weights."""
        return {**self.fusion.state_dict(), "multiples": dict(self.multiples)}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Restore the server's state."""
        self.fusion.load_state_dict(extras)
        self.multiples = {int(client): float(value) for client, value in extras["multiples"].items()}


def _check_net(net: nn.Module, add_norm: bool, feature_stats: bool) -> None:
    name = type(net).__name__
    if add_norm and feature_stats:
        raise FederationError("FedDAF reads either normalisation layers or features: set add_norm or feature_stats.")
    if feature_stats and not feature_layers(net):
        raise FederationError(f"{name} has no hidden layer whose features FedDAF could describe: use another net.")
    if add_norm and (found := list(norm_layers(net))):
        raise FederationError(f"{name} has normalisation layers already ({found[0]}): leave add_norm out.")
    if not (add_norm or feature_stats or norm_layers(net)):
        raise FederationError(
            f"FedDAF reads statistics of normalisation layers and {name} has none: use a net with some, such as "
            "LeNetBN, or set add_norm=True or feature_stats=True."
        )
