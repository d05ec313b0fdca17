"""FedDAF's inference on the server: from the clients' statistics to their weights.

Equation numbers refer to "Federated Learning with Data-Agnostic Distribution Fusion". Everything runs in float64 on the
CPU: there is only one vector per client, and the result must not depend on the run's precision or device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning import distributions as dist
from fl_lightning.methods.lib.fusion_vae import (
    LATENT,
    FusionVAE,
    Noise,
    Posterior,
    belonging,
    expected_allocation,
    sampled_allocation,
)

Basis = Literal["aligned", "frozen", "refitted"]
#: A coordinate with a standard deviation over clients below this counts as constant.
CONSTANT = 1e-6
#: Maximum number of principal components passed to the autoencoder.
DIMENSIONS = 64
#: Components with a smaller share of the clients are deleted.
SMALLEST = 0.02
LEARNING_RATE = 1e-3


@dataclass
class Projection:
    """Standardised principal components of the clients' statistics, and their inverse.

    Args:
        mean: mean of each coordinate over clients, shape (D,).
        std: standard deviation of each coordinate; infinite for constant ones, which removes them, shape (D,).
        axes: the components as columns, shape (D, P).
    """

    mean: Tensor
    std: Tensor
    axes: Tensor

    @classmethod
    def fit(cls, d: Tensor, old: Projection | None = None, dimensions: int = DIMENSIONS) -> Projection:
        """Fit to the clients' vectors ``d``, shape (K, D).

        A new basis would rotate the inputs of an encoder that continues from the last fit: with ``old``, the new axes
        are rotated, within their span, as near to the old ones as possible (orthogonal Procrustes).
        """
        mean, std = d.mean(0), d.std(0, correction=0)
        std = torch.where(std < CONSTANT, torch.inf, std)
        wanted = min(len(d) - 1, dimensions, d.shape[1]) if old is None else old.axes.shape[1]
        axes = torch.linalg.svd((d - mean) / std, full_matrices=False).Vh.T[:, :wanted]
        axes = torch.nn.functional.pad(axes, (0, wanted - axes.shape[1]))
        if old is None:
            largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
            return cls(mean, std, axes * torch.where(largest < 0, -1.0, 1.0))  # the sign of an axis is arbitrary
        u, _, vh = torch.linalg.svd(axes.T @ old.axes)
        return cls(mean, std, axes @ (u @ vh))

    def __call__(self, d: Tensor) -> Tensor:
        """Return the coordinates of vectors, shape (n, P)."""
        return ((d - self.mean) / self.std) @ self.axes

    def inverse(self, x: Tensor) -> Tensor:
        """Return vectors with these coordinates, shape (n, D); constant coordinates are restored."""
        return x @ self.axes.T * torch.where(self.std.isinf(), 0.0, self.std) + self.mean


def fusion_weights(b: Tensor, c: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clients' weights, with each component normalised over its clients.

    A_km = n_k b_km c_km, pi = softmax_m of (1/K) sum_k c_km b_km (Eq. 10), a_k = sum_m pi_m A_km / sum_j A_jm. The sum
    of pi_m b_km c_km w_k, as printed, is not a mean: with one component it is the sum of all models.

    Args:
        b: allocation weights, shape (K, M), rows sum to 1.
        c: allocations in [0, 1], shape (K, M); see :func:`belonging`.
        size: n_k, shape (K,).

    Returns:
        a, shape (K,), and pi, shape (M,); both sum to 1.
    """
    amount = size[:, None] * b * c
    total = amount.sum(0)
    score = torch.where(total > 0, (c * b).mean(0), -torch.inf)  # a component may have no clients after a draw
    pi = torch.softmax(score, 0)
    return (amount / torch.where(total > 0, total, 1.0)) @ pi, pi


def capped(weights: Tensor, most: float) -> Tensor:
    """Limit weights to ``most``; distribute the excess to the others in proportion.

    Example:
        >>> capped(torch.tensor([0.7, 0.2, 0.1]), 0.5)
        tensor([0.5000, 0.3333, 0.1667])
    """
    if most * len(weights) <= 1:
        return torch.full_like(weights, 1 / len(weights))
    over = torch.zeros_like(weights, dtype=torch.bool)
    while bool((found := (weights > most) & ~over).any()):
        over |= found
        rest = weights[~over].sum()
        room = 1 - most * over.sum()
        weights = torch.where(over, most, weights * (room / rest) if rest > 0 else room / (~over).sum())
    return weights


class Fusion:
    """The server's inference; each refit continues from the last one.

    Args:
        components: initial number of components, M_max.
        shared: whether the components' latents are shared by the clients.
        steps: steps of Adam per refit.
        basis: principal axes of later refits: new ones rotated to the old (``aligned``), those of the first refit
            (``frozen``), or new ones (``refitted``).
        adaptive: whether to delete components with hardly any clients.
    """

    def __init__(self, components: int, shared: bool, steps: int, basis: Basis, adaptive: bool = True) -> None:
        self.most, self.shared, self.steps, self.basis, self.adaptive = components, shared, steps, basis, adaptive
        self.vae: FusionVAE | None = None
        self.projection: Projection | None = None
        #: The vectors of the last refit, shape (K, D), their clients and their weights.
        self.observed, self.clients, self.weights = torch.empty(0, 0), torch.empty(0), torch.empty(0)
        #: Mean squared error of the reconstruction, before and after the last refit.
        self.errors = (float("nan"), float("nan"))

    def refit(self, d: Tensor, clients: list[int], rngs: Mapping[int, np.random.Generator]) -> Posterior:
        """Fit to the clients' vectors and return the posterior, after deleting components.

        Args:
            d: one vector per client, float64, shape (K, D), K at least 2.
            clients: the clients' numbers.
            rngs: generators by client, and a common one under -1.
        """
        self.observed, self.clients = d, torch.tensor(clients)
        if self.projection is None or self.basis != "frozen":
            old = self.projection
            fitted = Projection.fit(d, old if self.basis == "aligned" else None)
            if old is not None and fitted.axes.shape != old.axes.shape:  # other clients than in the last fit
                fitted = Projection.fit(d, old)
            self.projection = fitted
        x = self.projection(d)
        if self.vae is None:
            components = min(self.most, len(d))
            self.vae = FusionVAE(x.shape[1], components, self.shared, components / 2, _generator(rngs[-1]))
        before = self.error(x)
        self._fit(self.vae, x, [rngs[client] for client in clients], rngs[-1])
        self.errors = (before, self.error(x))
        if self.adaptive:
            self._shrink(x)
        with torch.no_grad():
            return self.vae.posterior(x)

    def _fit(self, vae: FusionVAE, x: Tensor, rngs: list[np.random.Generator], rng: np.random.Generator) -> None:
        """Optimise the bound with Adam, all clients in one batch; anneal KL terms over the first half of the steps."""
        noises = self.draw(rngs, rng, self.steps)
        with torch.enable_grad(), torch.inference_mode(False):
            optimizer = torch.optim.Adam(vae.parameters(), lr=LEARNING_RATE)
            for step in range(self.steps):
                optimizer.zero_grad()
                vae.loss(x, noises.at(step), min(1.0, 2 * step / self.steps)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    def draw(self, rngs: list[np.random.Generator], rng: np.random.Generator, steps: int) -> Noise:
        """Draw noise for several passes, each tensor of shape (steps, ...); clients' noise from their own streams."""
        assert self.vae is not None
        shape = (steps, self.vae.components)
        parts = [(_normal(r, shape), dist.log_uniform(r, shape), dist.logistic(r, shape)) for r in rngs]
        if self.shared:
            latent = _normal(rng, (*shape, LATENT))
        else:
            latent = torch.stack([_normal(r, (*shape, LATENT)) for r in rngs], 1)
        score, log_u, logistic = (torch.stack(part, 1) for part in zip(*parts, strict=True))
        return Noise(score, log_u, logistic, latent)

    @torch.no_grad()
    def error(self, x: Tensor) -> float:
        """Return the mean squared reconstruction error of the point estimates, in projected coordinates."""
        assert self.vae is not None
        q = self.vae.posterior(x)
        b, c = expected_allocation(q)
        return float((self.vae.decode(b, c, q.z_mean) - x).pow(2).mean())

    @torch.no_grad()
    def _shrink(self, x: Tensor) -> None:
        assert self.vae is not None
        b, c = expected_allocation(self.vae.posterior(x))
        share = (belonging(b, c) * b).mean(0)
        kept = share >= SMALLEST
        kept[share.argmax()] = True
        if not bool(kept.all()):
            self.vae.keep(kept)

    @torch.no_grad()
    def inferred(self, number: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Sample from the inferred distribution: a client by its weight, then its b, c and z, and decode.

        Returns:
            Vectors in the original coordinates, shape (number, D), and the index of each vector's client in
            ``clients``.
        """
        assert self.vae is not None
        assert self.projection is not None
        rows = torch.from_numpy(rng.choice(len(self.weights), number, p=(self.weights / self.weights.sum()).numpy()))
        q = self.vae.posterior(self.projection(self.observed[rows]))
        m = self.vae.components
        score, log_u, logistic = (draw(rng, (number, m)) for draw in (_normal, dist.log_uniform, dist.logistic))
        noise = Noise(score, log_u, logistic, _normal(rng, (number, m, LATENT)))
        b, c = sampled_allocation(q, noise)
        z = q.z_mean + q.z_log_s.exp() * noise.latent
        return self.projection.inverse(self.vae.decode(b, belonging(b, c), z)), rows

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain dicts of tensors and numbers."""
        state: dict[str, Any] = {"observed": self.observed, "clients": self.clients, "weights": self.weights}
        if self.vae is not None and self.projection is not None:
            state["vae"], state["alpha"] = self.vae.state_dict(), self.vae.alpha
            state["projection"] = vars(self.projection)
            state["errors"] = list(self.errors)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.observed, self.clients, self.weights = state["observed"], state["clients"], state["weights"]
        self.vae = self.projection = None
        if "vae" in state:
            self.projection = Projection(**state["projection"])
            sizes = self.projection.axes.shape[1], len(state["vae"]["heads.nu.bias"])
            self.vae = FusionVAE(*sizes, self.shared, state["alpha"], torch.Generator())
            self.vae.load_state_dict(state["vae"])
            self.errors = (state["errors"][0], state["errors"][1])


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape))


def _generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**31)))
