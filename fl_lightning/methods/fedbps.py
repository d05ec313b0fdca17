"""FedBPS: personalise the weights that clients are least certain of or disagree on most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.held_out import best_on_held_out
from fl_lightning.methods.lib.laplace import (
    DiagonalCurvature,
    check_curvature,
    client_curvature,
    posterior_variance,
)
from fl_lightning.methods.settings import Laplace, Trials
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me, Reply
from fl_lightning.ranges import Positive, Share
from fl_lightning.wire import Message, State, message_weights, pack_bits, prefixed, under, unpack_bits, without

#: Prefixes of a client's variances and its own model, and the name of the packed mask.
VARIANCE, OWN, MASK = "variance.", "own.", "mask"
#: Default number of draws for each kind of curvature.
DRAWS: dict[str, int] = {"fisher": 1, "ggn": 1, "hessian": 100}


class FedBPS(FederatedModule):
    """Every client keeps the share p of the parameters whose variance over clients is largest.

    After its local training a client estimates the variance v_i of each of its weights by a diagonal Laplace
    approximation, v_i = 1 / (n_i h + delta) with h the mean curvature of its samples' losses. The server averages the
    models and matches the moments of the mixture of the clients' Gaussians,

        w_g = sum_i p_i w_i,    v_g = sum_i p_i v_i + sum_i p_i (w_i - w_g)^2,

    and marks the round(p P) parameters with the largest v_g, ties by their order, in a mask M. A client continues from
    w_i M + w_g (1 - M), with which it is also evaluated; a client that never trained uses w_g. M is recomputed in every
    round, so that a parameter may become shared again. Buffers are averaged.

    With ``p: auto`` the run begins with short trials on the clients' training data, a fraction of which is held out to
    score them, and then starts over with the best p. No test samples are used.

    Args:
        net: the network.
        p: share of personal parameters, 0 (FedAvg) to 1 (Local), or ``auto``.
        ranking: rank all parameters together (``global``) or within each tensor (``per_tensor``).
        prior_precision: delta, the inverse of the largest variance.
        laplace: options of the clients' variance estimates; see :class:`~fl_lightning.methods.settings.Laplace`.
        trials: options of ``p: auto``; see :class:`~fl_lightning.methods.settings.Trials`.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    aggregates_sums = False  # the variance between the clients' weights decides the mask

    mask: Tensor
    chosen: Tensor

    def __init__(
        self,
        net: FedNet,
        p: Share | Literal["auto"] = 0.7,
        ranking: Literal["global", "per_tensor"] = "global",
        prior_precision: Positive = 1.0,
        laplace: Laplace = Laplace(),  # noqa: B008 - frozen
        trials: Trials = Trials(),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        self.laplace, self.trials = Laplace.of(laplace, "laplace"), Trials.of(trials, "trials")
        check_curvature(self.net, self.laplace.curvature)
        if self.laplace.curvature == "ggn":
            self.needs_classes = "draws classes for curvature='ggn'"
        self.given_p, self.ranking, self.prior_precision = p, ranking, prior_precision
        self.sizes = {name: p.numel() for name, p in self.net.named_parameters() if p.requires_grad}
        self.register_buffer("mask", pack_bits(torch.zeros(sum(self.sizes.values()), dtype=torch.bool)))
        self.register_buffer("chosen", torch.tensor(-1))  # which of the trials' values; -1 before them
        self._metrics: dict[str, float] = {}

    # server: the proportion

    @property
    def p(self) -> float:
        """Share of personal parameters, given or chosen."""
        if self.given_p != "auto":
            return self.given_p
        if int(self.chosen) < 0:
            raise FederationError("p is chosen at the start of the run and not known before.")
        return self.trials.values[int(self.chosen)]

    def on_fit_start(self) -> None:
        """Choose p if it is ``auto`` and was not chosen yet."""
        super().on_fit_start()
        if self.given_p == "auto" and int(self.chosen) < 0:
            if not self.exchange.simulated:
                raise FederationError(
                    "p: auto tries values on simulated clients, which real ones are not: give p, such as one that a "
                    "simulation chose."
                )
            self.chosen.fill_(best_on_held_out(self, "p", *astuple(self.trials)))

    # client

    def enter(self, received: State, me: Me) -> State:
        """Return the client's own weights where the mask is set, else the server's."""
        state = super().enter(received, replace(me, private=without(OWN, me.private)))
        return state | self._mixed(state, under(OWN, me.private), state.pop(MASK))

    def survey(self, states: Sequence[State], mes: Sequence[Me]) -> None:
        """Estimate every client's variances at its trained weights."""
        how = self.laplace
        diagonal = DiagonalCurvature(self.net, list(self.sizes), self.loss, how.curvature)
        data, rngs = [me.data for me in mes], [me.stream("laplace") for me in mes]
        settings = (how.samples, how.chunk_size, DRAWS[how.curvature] if how.draws is None else how.draws)
        found = client_curvature(diagonal, data, states, rngs, self.compute_dtype, *settings)
        for state, own, curvature in zip(states, data, found, strict=True):
            state.update(prefixed(VARIANCE, posterior_variance(curvature, len(own), self.prior_precision)))

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send model and variances; keep the model."""
        variance = {VARIANCE + name: state[VARIANCE + name] for name in self.sizes}
        return super().leave(state, received, me).plus(up=variance, keep=prefixed(OWN, state, self.sizes))

    def personal(self, received: State, me: Me) -> State:
        """Return the client's own weights where the mask is set, else the server's."""
        state = super().personal(received, me)
        return state | self._mixed(state, under(OWN, me.private), received[MASK])

    def _mixed(self, state: State, own: State, mask: Tensor) -> State:
        personal = self._by_name(unpack_bits(mask, sum(self.sizes.values())))
        return {name: torch.where(personal[name].view_as(w), w, state[name]) for name, w in own.items()}

    # server

    def evaluation_down(self, client: int) -> State:
        """Return the server's model and the mask, one bit per parameter."""
        return super().evaluation_down(client) | {MASK: self.mask}

    def aggregate(self, messages: list[Message]) -> State:
        """Average the models and compute the mask from the matched moments."""
        weights = message_weights(messages, self.weighting)
        mean = self.mean(messages, weights, self.shared_names)
        within, between = self.moments(messages, weights)
        personal = self.select(within + between)
        self.mask.copy_(pack_bits(personal))
        self._metrics = self._shares(personal)
        self._metrics["variance/between_over_within"] = float(between.sum() / within.sum())
        return mean

    def moments(self, messages: list[Message], weights: list[float]) -> tuple[Tensor, Tensor]:
        """Return both terms of v_g: the clients' mean variance and the variance of their means, float64, shape (P,)."""
        means = [self._flat(message.tensors) for message in messages]
        mean = sum(weight * own for weight, own in zip(weights, means, strict=True))
        pairs = list(zip(weights, messages, means, strict=True))
        within = sum(weight * self._flat(message.tensors, VARIANCE) for weight, message, _ in pairs)
        between = sum(weight * (own - mean).square() for weight, _, own in pairs)
        assert isinstance(within, Tensor)
        assert isinstance(between, Tensor)
        return within, between

    def select(self, variance: Tensor) -> Tensor:
        """Return the mask of the round(p P) largest variances, overall or per tensor; bool, shape (P,)."""
        if self.ranking == "global":
            return largest(variance, round(self.p * len(variance)))
        parts = self._by_name(variance).values()
        return torch.cat([largest(part, round(self.p * len(part))) for part in parts])

    def round_metrics(self) -> dict[str, float]:
        """Return the share of personal parameters by layer and the ratio of the variance's terms."""
        return self._metrics

    def _shares(self, personal: Tensor) -> dict[str, float]:
        counts: dict[str, list[int]] = {}
        for name, part in self._by_name(personal).items():
            layer = counts.setdefault(name.rpartition(".")[0] or name, [0, 0])
            layer[0] += int(part.sum())
            layer[1] += len(part)
        shares = {f"personal/{layer}": marked / size for layer, (marked, size) in counts.items()}
        return {"personal/all": float(personal.double().mean()), **shares}

    def _flat(self, tensors: State, prefix: str = "") -> Tensor:
        return torch.cat([tensors[prefix + name].flatten() for name in self.sizes]).double()

    def _by_name(self, flat: Tensor) -> State:
        return dict(zip(self.sizes, torch.split(flat, list(self.sizes.values())), strict=True))


def largest(values: Tensor, count: int) -> Tensor:
    """Return a mask of the ``count`` largest entries; the first ones among equals.

    Example:
        >>> largest(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2).tolist()
        [False, True, True, False]
    """
    mask = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    mask[values.argsort(descending=True, stable=True)[:count]] = True
    return mask
