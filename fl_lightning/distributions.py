"""Distributions of variational methods: stick-breaking prior, Kumaraswamy, relaxed Bernoulli, Gaussian, their KLs.

Sampling is split in two: noise is drawn in float64 once per epoch, and a pure function turns it into a sample, so that
a step can be differentiated, stacked over clients and repeated. Probabilities are stored as logarithms where the
product of many of them would underflow.

References: Teh, Gorur and Ghahramani (2007) for the stick-breaking form of the Indian Buffet Process; Nalisnick and
Smyth (2017) for the Kumaraswamy posterior; Maddison, Mnih and Teh (2017) for the relaxed Bernoulli variable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

#: Uniform noise is kept this far from 0 and 1, where its logarithms are infinite.
MARGIN = 1e-6
#: Prior log probabilities are kept this far below 0, where log(1 - p) is infinite.
LOG_MARGIN = 1e-6
EULER = 0.5772156649015329


def log_uniform(rng: np.random.Generator, shape: Sequence[int]) -> Tensor:
    """Draw log u for u uniform in (1e-6, 1 - 1e-6): the noise of :func:`log_kumaraswamy`, in float64."""
    return _uniform(rng, shape).log()


def logistic(rng: np.random.Generator, shape: Sequence[int]) -> Tensor:
    """Draw the log odds of u uniform in (1e-6, 1 - 1e-6): the noise of :func:`relaxed_bernoulli`, in float64."""
    u = _uniform(rng, shape)
    return u.log() - torch.log1p(-u)


def _uniform(rng: np.random.Generator, shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(rng.random(tuple(shape))).mul_(1 - 2 * MARGIN).add_(MARGIN)


def relaxed_bernoulli(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Return a relaxed (concrete) sample in (0, 1): sigmoid((a + noise) / temperature).

    It exceeds 1/2 with probability sigmoid(a) at every temperature; its mean is not sigmoid(a).

    Args:
        logits: a, the log odds, any shape.
        noise: from :func:`logistic`, same shape.
        temperature: as it approaches 0, samples become binary.

    Example:
        >>> relaxed_bernoulli(torch.zeros(3), torch.tensor([-9.0, 0.0, 9.0]), 0.5).round(decimals=3)
        tensor([0.0000, 0.5000, 1.0000])
    """
    return torch.sigmoid((logits + noise) / temperature)


def log_kumaraswamy(c: Tensor, d: Tensor, log_u: Tensor) -> Tensor:
    """Return log v for v = (1 - u^(1/d))^(1/c), a sample of Kumaraswamy(c, d).

    Args:
        c: first shape parameter, positive.
        d: second shape parameter, positive.
        log_u: from :func:`log_uniform`.

    Example:
        >>> log_kumaraswamy(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.25).log()).exp()
        tensor(0.7500)
    """
    return torch.log(-torch.expm1(log_u / d)) / c


def kumaraswamy_moment(c: Tensor, d: Tensor, order: float = 1.0) -> Tensor:
    """Compute E[v^n] = d Beta(1 + n / c, d) for v of Kumaraswamy(c, d).

    Example:
        >>> kumaraswamy_moment(torch.tensor(3.0), torch.tensor(1.0))  # c / (c + 1)
        tensor(0.7500)
    """
    first = 1 + order / c
    return d * (torch.lgamma(first) + torch.lgamma(d) - torch.lgamma(first + d)).exp()


def kl_kumaraswamy_beta(c: Tensor, d: Tensor, alpha: float) -> Tensor:
    """Compute KL(Kumaraswamy(c, d) || Beta(alpha, 1)), elementwise, in closed form.

    The infinite series of the general formula has the factor (second shape of the Beta - 1), which is 0 here.

    Example:
        >>> kl_kumaraswamy_beta(torch.tensor(3.0), torch.tensor(0.5), 2.0)
        tensor(0.5077)
    """
    spread = (c - alpha) / c * (-EULER - torch.digamma(d) - 1 / d)
    return spread + torch.log(c * d) - math.log(alpha) - (d - 1) / d


def kl_normal(mean: Tensor, log_std: Tensor) -> Tensor:
    """Compute KL(N(mean, std^2) || N(0, 1)), elementwise.

    Example:
        >>> kl_normal(torch.tensor([0.0, 1.0]), torch.zeros(2))
        tensor([0.0000, 0.5000])
    """
    return 0.5 * (mean**2 + torch.exp(2 * log_std) - 1) - log_std


def log_odds(log_p: Tensor) -> Tensor:
    """Compute log p - log(1 - p) from log p, for probabilities below 1.

    Example:
        >>> log_odds(torch.tensor([0.5, 0.2]).log()).round(decimals=4)
        tensor([ 0.0000, -1.3863])
    """
    return log_p - torch.log(-torch.expm1(log_p))


def log_sticks(log_v: Tensor) -> Tensor:
    """Compute the logarithms of the sticks p_k = v_1 v_2 ... v_k, clamped just below 0.

    Args:
        log_v: logarithms of the fractions v, shape (..., F).

    Example:
        >>> log_sticks(torch.tensor([0.5, 0.5, 0.8]).log()).exp()
        tensor([0.5000, 0.2500, 0.2000])
    """
    return log_v.cumsum(-1).clamp(max=-LOG_MARGIN)


def kl_bernoulli(logits: Tensor, log_p: Tensor) -> Tensor:
    """Compute KL(Bernoulli(sigmoid(logits)) || Bernoulli(p)), elementwise.

    Args:
        logits: log odds of the posterior.
        log_p: logarithm of the prior probability, below 0.

    Example:
        >>> kl_bernoulli(torch.tensor(0.0), torch.tensor(0.5).log())
        tensor(0.)
    """
    pi = torch.sigmoid(logits)
    log_not_p = torch.log(-torch.expm1(log_p))
    return pi * (logsigmoid(logits) - log_p) + (1 - pi) * (logsigmoid(-logits) - log_not_p)


def prior_mean(factors: int, alpha: float) -> Tensor:
    """Compute E[p_k] = (alpha / (alpha + 1))^k for k = 1 ... F and v_k ~ Beta(alpha, 1); float64, shape (F,).

    Example:
        >>> prior_mean(3, 1.0)
        tensor([0.5000, 0.2500, 0.1250], dtype=torch.float64)
    """
    return (alpha / (alpha + 1)) ** torch.arange(1, factors + 1, dtype=torch.float64)


def expected_active(factors: int, alpha: float) -> float:
    """Compute the expected number of active factors of F under the prior: alpha (1 - (alpha / (alpha + 1))^F).

    Example:
        >>> round(expected_active(120, 96.0), 3)
        68.317
    """
    return alpha * (1 - (alpha / (alpha + 1)) ** factors)


def softplus_inverse(y: float) -> float:
    """Compute the x with softplus(x) = y, for y > 0.

    Example:
        >>> round(math.log1p(math.exp(softplus_inverse(2.0))), 12)
        2.0
    """
    return y + math.log(-math.expm1(-y))
