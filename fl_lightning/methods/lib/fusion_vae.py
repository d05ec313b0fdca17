"""The variational autoencoder of FedDAF (section 4.1), which allocates clients to virtual components.

Equation numbers refer to "Federated Learning with Data-Agnostic Distribution Fusion".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fl_lightning import distributions as dist

#: Lower bound of zeta and kappa.
FLOOR = 1e-3
LATENT, HIDDEN = 16, (128, 64)
TEMPERATURE = 0.5


class Posterior(NamedTuple):
    """Parameters of the variational posterior; K clients, M components, L latent dimensions."""

    nu: Tensor
    """Mean of the allocation scores, shape (K, M)."""
    log_s: Tensor
    """Log standard deviation of the allocation scores, shape (K, M)."""
    zeta: Tensor
    """First shape parameter of Kumaraswamy, shape (K, M)."""
    kappa: Tensor
    """Second shape parameter, shape (K, M)."""
    z_mean: Tensor
    """Mean of the components' latents, shape (M, L) if the clients share them, else (K, M, L)."""
    z_log_s: Tensor
    """Log standard deviation of the latents, same shape."""


class Noise(NamedTuple):
    """Noise of one pass: standard normal, log uniform and logistic of shape (K, M), normal like the latents."""

    score: Tensor
    log_u: Tensor
    logistic: Tensor
    latent: Tensor

    def at(self, step: int) -> Noise:
        """Return the noise of one of several passes."""
        return Noise(*(part[step] for part in self))


class FusionVAE(nn.Module):
    """Encoder with Gaussian, Kumaraswamy and latent heads, and decoder (section 4.1).

    Args:
        inputs: number of features of a client.
        components: number of virtual components, M.
        shared: one latent z_m per component, as the paper's subscript suggests; otherwise every client has its own
            latents z_km.
        alpha: parameter of the prior of lambda, Beta(alpha, 1), from which the posterior starts.
        generator: generator for the initial weights.
    """

    def __init__(self, inputs: int, components: int, shared: bool, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        wide, narrow = HIDDEN
        self.encoder = nn.Sequential(nn.Linear(inputs, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(narrow, components) for name in ("nu", "log_s", "zeta", "kappa")})
        if shared:
            self.z_mean, self.z_log_s = (nn.Parameter(torch.empty(components, LATENT)) for _ in range(2))
        else:
            self.heads.update({name: nn.Linear(narrow, components * LATENT) for name in ("z_mean", "z_log_s")})
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, narrow), nn.ReLU(), nn.Linear(narrow, wide), nn.ReLU(), nn.Linear(wide, inputs)
        )
        self.shared, self.alpha = shared, alpha
        self.double()
        self._initialise(generator)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Initialise with PyTorch's scales; lambda starts at its prior, shared latents at different values."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                bound = max(module.in_features, 1) ** -0.5
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.uniform_(-bound, bound, generator=generator)
        for name, start in (("zeta", self.alpha), ("kappa", 1.0)):
            self.heads[name].bias.fill_(dist.softplus_inverse(start - FLOOR))  # type: ignore[operator]
        if self.shared:
            self.z_mean.normal_(generator=generator)
            self.z_log_s.fill_(-1.0)

    @property
    def components(self) -> int:
        """Number of components, M."""
        return int(self.heads["nu"].out_features)  # type: ignore[arg-type]

    def posterior(self, d: Tensor) -> Posterior:
        """Return the encoder's six outputs for the clients' features ``d``, shape (K, inputs)."""
        h = self.encoder(d)
        nu, log_s, zeta, kappa = (self.heads[name](h) for name in ("nu", "log_s", "zeta", "kappa"))
        if self.shared:
            latents = (self.z_mean, self.z_log_s)
        else:
            latents = tuple(self.heads[name](h).view(len(d), -1, LATENT) for name in ("z_mean", "z_log_s"))
        return Posterior(nu, log_s, softplus(zeta) + FLOOR, softplus(kappa) + FLOOR, *latents)

    def decode(self, b: Tensor, c: Tensor, z: Tensor) -> Tensor:
        """Decode z_k = sum_m b_km c_km z_m."""
        mixed: Tensor = torch.einsum("km,ml->kl" if z.dim() == 2 else "km,kml->kl", b * c, z)
        decoded: Tensor = self.decoder(mixed)
        return decoded

    def sample(self, posterior: Posterior, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
        """Draw b (softmax of Gaussians), c (relaxed, Eq. 6-9) and z differentiably."""
        b = torch.softmax(posterior.nu + posterior.log_s.exp() * noise.score, -1)
        sticks = dist.log_sticks(dist.log_kumaraswamy(posterior.zeta, posterior.kappa, noise.log_u))
        c = dist.relaxed_bernoulli(dist.log_odds(sticks), noise.logistic, TEMPERATURE)
        return b, c, posterior.z_mean + posterior.z_log_s.exp() * noise.latent

    def loss(self, d: Tensor, noise: Noise, beta: float) -> Tensor:
        """Return the negative bound (13) per client, with KL terms weighted by ``beta``."""
        q = self.posterior(d)
        error = 0.5 * (d - self.decode(*self.sample(q, noise))).pow(2).sum(-1).mean()
        own = dist.kl_normal(q.nu, q.log_s) + dist.kl_kumaraswamy_beta(q.zeta, q.kappa, self.alpha)
        latent = dist.kl_normal(q.z_mean, q.z_log_s).sum() / len(d)
        return error + beta * (own.sum(-1).mean() + latent)

    @torch.no_grad()
    def keep(self, kept: Tensor) -> None:
        """Delete all components but ``kept``, boolean of shape (M,)."""
        for name, head in self.heads.items():
            assert isinstance(head, nn.Linear)
            rows = kept.repeat_interleave(LATENT) if name.startswith("z_") else kept
            head.weight, head.bias = nn.Parameter(head.weight[rows]), nn.Parameter(head.bias[rows])
            head.out_features = len(head.bias)
        if self.shared:
            self.z_mean, self.z_log_s = nn.Parameter(self.z_mean[kept]), nn.Parameter(self.z_log_s[kept])


def expected_allocation(q: Posterior) -> tuple[Tensor, Tensor]:
    """Return point estimates without noise: softmax of nu and E[rho_km], the product over j <= m of E[lambda_kj]."""
    return torch.softmax(q.nu, -1), dist.kumaraswamy_moment(q.zeta, q.kappa).cumprod(-1)


def sampled_allocation(q: Posterior, noise: Noise) -> tuple[Tensor, Tensor]:
    """Draw b and the binary c, Eq. (8) and (9)."""
    b = torch.softmax(q.nu + q.log_s.exp() * noise.score, -1)
    sticks = dist.log_sticks(dist.log_kumaraswamy(q.zeta, q.kappa, noise.log_u))
    return b, (dist.log_odds(sticks) + noise.logistic > 0).double()


def belonging(b: Tensor, c: Tensor) -> Tensor:
    """Return ``c`` with membership 1 for every client's main component."""
    return c.scatter(-1, b.argmax(-1, keepdim=True), 1.0)
