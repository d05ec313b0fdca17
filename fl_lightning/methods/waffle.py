"""WAFFLe: weight-anonymized factorization for federated learning (Hao et al.), with an Indian Buffet Process prior.

Equation numbers refer to the journal version (IEEE Access, 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from fl_lightning import distributions as dist
from fl_lightning import seeding
from fl_lightning.engine import Batch, Phase
from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.factorized import FactorizedModule, widened
from fl_lightning.methods.settings import Evaluation, Posterior
from fl_lightning.nets import FedNet
from fl_lightning.ranges import Above, Count, CountUpToAMillion, NonNegative, Positive
from fl_lightning.wire import State

Schedule = Literal["alternate", "joint"]
NeverSampled = Literal["adapt", "ones", "prior_mean"]
#: Lower bound of c and d.
FLOOR = 1e-3
#: Minimum distance of initial selection probabilities from 0 and 1.
EDGE = 0.05
#: Number of draws of v in the reported KL terms.
REPORTED_DRAWS = 16


class WAFFLe(FactorizedModule):
    """Clients share a dictionary of weight factors and privately infer which factors they use.

    The weight of a factorised layer is W_i = wa diag(r * b_i) wb, Eq. (2)-(4). Under the prior, Eq. (5)-(7),
    v_k ~ Beta(alpha, 1), p_k = v_1 ... v_k and b_k ~ Bernoulli(p_k); the posterior, Eq. (8)-(10), is
    q(v_k) = Kumaraswamy(c_k, d_k) and q(b_k) = Bernoulli(pi_k). Clients minimise the negative of the bound (11): per
    minibatch, the loss under a relaxed sample of b plus 1 / n_k of KL(q(b) || p(b | v)) + KL(q(v) || p(v)) with sampled
    v. Their pi, c and d never leave them.

    ``alternate``, the default schedule, trains the selection in the first epochs of a round, with the received
    dictionary, and the dictionary in the others, with that selection. The paper's Algorithm 2 is ``joint``, with
    ``vi_lr_mult=1`` and ``never_sampled="ones"``; its factors fit a client's data before the selection can, so clients
    hardly differ and results are close to FedAvg.

    Args:
        net: the network, dense or with factorised layers.
        factors: number of factors of each layer to factorise, by name; None factorises all dense and convolution layers
            but the last dense one, with 3/5 of the smaller dimension of their weights
            (:func:`~fl_lightning.nets.factorized.default_factors`).
        alpha_ratio: concentration of the prior as a share of the number of factors, alpha / F.
        alpha: concentration by layer, instead of ``alpha_ratio``; above 0.001, the lower bound of c.
        schedule: ``alternate`` or ``joint``.
        selection_epochs: number of a round's epochs that train the selection with ``alternate``.
        vi_lr_mult: learning rate of the selection logits as a multiple of ``lr``.
        never_sampled: evaluate a client that never trained after fitting pi, c and d to its training data (``adapt``),
            or with b = 1 (``ones``, as in the paper) or b = E[p] (``prior_mean``).
        posterior: options of the clients' posterior; see :class:`~fl_lightning.methods.settings.Posterior`.
        evaluation: options of evaluation; see :class:`~fl_lightning.methods.settings.Evaluation`.
        epochs: number of passes over a client's data per round; ``alternate`` needs 2 or more.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`; default of ``weighting``: ``uniform``.
    """

    kinds = ("logits", "c", "d")
    evaluated: Evaluation

    def __init__(
        self,
        net: FedNet,
        factors: dict[str, Count] | None = None,
        alpha_ratio: Positive = 0.8,
        alpha: dict[str, Annotated[float, Above(FLOOR)]] | None = None,
        schedule: Schedule = "alternate",
        selection_epochs: Count = 1,
        vi_lr_mult: NonNegative = 1000.0,
        never_sampled: NeverSampled = "adapt",
        posterior: Posterior = Posterior(),  # noqa: B008 - frozen
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        epochs: CountUpToAMillion = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, epochs=epochs, never_sampled=never_sampled, **kwargs)
        self.evaluated = Evaluation.of(evaluation, "evaluation")
        self.schedule, self.posterior = schedule, Posterior.of(posterior, "posterior")
        if schedule == "alternate" and self.local.epochs < 2:
            raise FederationError(
                "schedule='alternate' needs epochs for the selection and for the factors: set epochs to 2 or more, "
                f"not {self.local.epochs}, or schedule='joint'."
            )
        if schedule == "alternate" and not 0 < selection_epochs < self.local.epochs:
            raise FederationError(
                f"schedule='alternate' needs epochs for the selection and for the factors: selection_epochs must lie "
                f"between 1 and {self.local.epochs - 1}, one less than epochs={self.local.epochs}, not at "
                f"{selection_epochs}."
            )
        self.selection_epochs, self.vi_lr_mult = selection_epochs, vi_lr_mult
        asked = self.asked_factors(factors)
        numbers = {layer: module.factors for layer, module in self.layers.items()} | asked
        self.alpha = {layer: alpha_ratio * number for layer, number in numbers.items()} | (alpha or {})
        if self.alpha.keys() != numbers.keys() or not all(value > FLOOR for value in self.alpha.values()):
            raise FederationError(
                f"alpha (alpha_ratio times the number of factors, unless given) must be greater than {FLOOR}, for "
                f"factorised layers only, not {self.alpha}."
            )
        self.factorise(asked, {layer: dist.expected_active(n, self.alpha[layer]) for layer, n in numbers.items()})

    # client: the posterior

    def initial(self, layer: str, number: int) -> State:
        """Return logits of the prior's mean, and c, d (before softplus) at which q(v) is the prior."""
        reference, alpha = self.layers[layer].r, self.alpha[layer]
        mean = dist.prior_mean(number, alpha).clamp(EDGE, 1 - EDGE).logit()
        logits = mean.clamp(-self.posterior.logit_bound, self.posterior.logit_bound).to(reference.detach())
        return {
            "logits": logits,
            "c": torch.full_like(logits, dist.softplus_inverse(alpha - FLOOR)),
            "d": torch.full_like(logits, dist.softplus_inverse(1 - FLOOR)),
        }

    def noise(self, rng: np.random.Generator, steps: int, counts: Mapping[str, int]) -> State:
        """Draw the noise of b and v for every step and layer."""
        noise: State = {}
        for layer, number in counts.items():
            noise[f"{layer}.logistic"] = dist.logistic(rng, (steps, number)).to(self.compute_dtype)
            noise[f"{layer}.log_u"] = dist.log_uniform(rng, (steps, number)).to(self.compute_dtype)
        return noise

    def training_masks(self, state: State, noise: State) -> State:
        """Draw one relaxed sample of b per layer for the whole minibatch."""
        return {
            f"{layer}.mask": dist.relaxed_bernoulli(
                state[f"{layer}.logits"], noise[f"{layer}.logistic"], self.posterior.temperature
            )
            for layer in self.factors
        }

    def divergence(self, own: State, log_u: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """Return the KL of q(b) given a sampled v and the KL of q(v), both summed over factors.

        Args:
            own: a layer's own entries by kind, each of shape (F,).
            log_u: noise of v, shape (..., F).
            alpha: the layer's concentration.

        Returns:
            The first of shape (...), the second 0-dim.
        """
        c, d = softplus(own["c"]) + FLOOR, softplus(own["d"]) + FLOOR
        log_p = dist.log_sticks(dist.log_kumaraswamy(c, d, log_u))
        return dist.kl_bernoulli(own["logits"], log_p).sum(-1), dist.kl_kumaraswamy_beta(c, d, alpha).sum()

    def penalty(self, state: State, batch: Batch) -> Tensor:
        """Return the KL terms of (11), weighted so that one epoch of minibatch means sums to the bound."""
        terms = [
            sum(self.divergence(self.own(state, layer), batch.noise[f"{layer}.log_u"], self.alpha[layer]))
            for layer in self.factors
        ]
        return self.posterior.kl_weight / batch.scalars["samples"] * torch.stack(terms).sum()  # type: ignore[arg-type]

    def own_step(self, name: str, value: Tensor, gradient: Tensor, lr: float | Tensor) -> Tensor:
        """Take a step; logits have a larger learning rate than c and d and are clipped."""
        if not name.endswith(".logits"):
            return value - lr * gradient
        moved = value - lr * self.vi_lr_mult * gradient
        return moved.clamp(-self.posterior.logit_bound, self.posterior.logit_bound)

    # client: the round

    def phases(self) -> Sequence[Phase]:
        """Return the phases: selection, then dictionary, or both together."""
        epochs, own, weights = self.local.epochs, self.own_names, self.trainable_names
        if self.schedule == "joint":
            return [Phase(epochs, (*weights, *own), "joint")]
        return [
            Phase(self.selection_epochs, own, "selection"),
            Phase(epochs - self.selection_epochs, weights, "factors"),
        ]

    # client: personal models

    def selection(self, own: State, rng: np.random.Generator) -> Tensor:
        """Return b = pi, b = 1[pi >= 1/2], or one fixed draw of b."""
        pi = torch.sigmoid(own["logits"])
        if self.evaluated.selection == "expected":
            return pi
        bar = seeding.uniform(rng, pi.shape, pi.dtype).to(pi.device) if self.evaluated.selection == "sampled" else 0.5
        return (pi >= bar).to(pi.dtype)

    def unfitted_masks(self, counts: Mapping[str, int]) -> State:
        """Return masks with b = 1 or the prior's mean."""
        return self.prior_masks(counts) if self.never_sampled == "prior_mean" else super().unfitted_masks(counts)

    def prior_masks(self, counts: Mapping[str, int]) -> State:
        """Return masks with b at the prior's mean."""
        return {f"{m}.mask": dist.prior_mean(n, self.alpha[m]).to(self.layers[m].r) for m, n in counts.items()}

    # adversary

    def assumptions(self) -> dict[str, State]:
        """Assume b = 1 or b at the prior's mean."""
        return super().assumptions() | {"prior_mean": self.prior_masks(self.factors)}

    # growth

    def grow(self, extra: int | Mapping[str, int]) -> None:
        """Append factors, see :meth:`FactorizedModule.grow`; alpha and the prior of existing factors do not change."""
        super().grow(extra)
        self.hparams["alpha"] = dict(self.alpha)

    # reports

    def active_factors(self, client: int) -> dict[str, Tensor]:
        """Return the factors that a trained client selects with probability 1/2 or more, by layer, shape (F,)."""
        private = self.snapshots[client].private
        pad = {layer: torch.zeros(n, dtype=torch.bool, device=self.device) for layer, n in self.factors.items()}
        return {layer: widened(private[f"{layer}.logits"] >= 0, pad[layer]) for layer in self.factors}

    def selection_terms(self, client: int) -> dict[str, float]:
        """Return the KL terms of a trained client by layer, the first one as a mean over fixed draws of v."""
        private = self.snapshots[client].private
        terms: dict[str, float] = {}
        for layer in self.factors:
            own = self.own(private, layer)
            rng = seeding.stream(self.seed, "report", client=client)
            log_u = dist.log_uniform(rng, (REPORTED_DRAWS, len(own["logits"]))).to(own["logits"])
            of_b, of_v = self.divergence(own, log_u, self.alpha[layer])
            terms |= {f"{layer}/kl_b": float(of_b.mean()), f"{layer}/kl_v": float(of_v)}
        return terms
