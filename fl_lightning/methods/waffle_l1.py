"""WAFFLe without Bayes: factor scores with an L1 penalty instead of the Indian Buffet Process (an ablation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.engine import Batch, Phase
from fl_lightning.methods.lib.factorized import FactorizedModule, widened
from fl_lightning.nets import FedNet
from fl_lightning.ranges import Count, NonNegative
from fl_lightning.wire import State


class WAFFLeL1(FactorizedModule):
    """The ablation of WAFFLe's Table 8: real scores, W_i = wa diag(r * s_i) wb, with omega / n_k times their L1 norm.

    Dictionary and messages are those of :class:`~fl_lightning.methods.WAFFLe`. A client keeps one score per factor,
    initially 1, and trains it together with the dictionary.

    Args:
        net: the network, dense or with factorised layers.
        factors: number of factors of each layer to factorise, by name; None as in WAFFLe.
        omega: weight of the L1 norm; the paper tries 0, 0.1, 1, 2 and 10.
        score_lr_mult: learning rate of the scores as a multiple of ``lr``; 0 keeps them at 1.
        never_sampled: evaluate a client that never trained with all scores at 1 (``ones``), or after fitting only its
            scores to its training data (``adapt``).
        active_score: absolute score from which a factor is reported as active.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`; default of ``weighting``: ``uniform``.
    """

    kinds = ("scores",)

    def __init__(
        self,
        net: FedNet,
        factors: dict[str, Count] | None = None,
        omega: NonNegative = 1.0,
        score_lr_mult: NonNegative = 1.0,
        never_sampled: Literal["ones", "adapt"] = "ones",
        active_score: NonNegative = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, never_sampled=never_sampled, **kwargs)
        self.omega, self.score_lr_mult, self.active_score = omega, score_lr_mult, active_score
        self.factorise(self.asked_factors(factors), {})

    # client

    def initial(self, layer: str, number: int) -> State:
        """Return scores of 1."""
        return {"scores": torch.ones(number).to(self.layers[layer].r.detach())}

    def phases(self) -> Sequence[Phase]:
        """Return one phase that trains dictionary and scores."""
        return [Phase(self.local.epochs, (*self.trainable_names, *self.own_names))]

    def training_masks(self, state: State, noise: State) -> State:
        """Return the scores."""
        return {f"{layer}.mask": state[f"{layer}.scores"] for layer in self.factors}

    def penalty(self, state: State, batch: Batch) -> Tensor:
        """Return omega / n_k times the L1 norm of the scores; its subgradient at 0 is 0."""
        norm = torch.stack([state[f"{layer}.scores"].abs().sum() for layer in self.factors]).sum()
        return self.omega / batch.scalars["samples"] * norm

    def own_step(self, name: str, value: Tensor, gradient: Tensor, lr: float | Tensor) -> Tensor:
        """Take one SGD step with the scores' learning rate."""
        return value - lr * self.score_lr_mult * gradient

    def selection(self, own: State, rng: np.random.Generator) -> Tensor:
        """Return the scores."""
        return own["scores"]

    # reports

    def active_factors(self, client: int) -> dict[str, Tensor]:
        """Return the active factors of a trained client by layer, shape (F,)."""
        private = self.snapshots[client].private
        pad = {layer: torch.zeros(n, dtype=torch.bool, device=self.device) for layer, n in self.factors.items()}
        active = {layer: private[f"{layer}.scores"].abs() >= self.active_score for layer in self.factors}
        return {layer: widened(active[layer], pad[layer]) for layer in self.factors}

    def selection_terms(self, client: int) -> dict[str, float]:
        """Return the L1 norm of a trained client's scores by layer."""
        private = self.snapshots[client].private
        return {f"{layer}/l1": float(private[f"{layer}.scores"].abs().sum()) for layer in self.factors}
