"""Differential privacy for the clients of any method, at the server or at the client."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Literal, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning import seeding
from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.accounting import Kind, Release
from fl_lightning.privacy.defence import (
    Normal,
    central_std,
    change,
    clipped,
    epsilon,
    next_bound,
    noised,
    norm,
    scaled,
    seeded_normal,
    split_noise,
)
from fl_lightning.ranges import NonNegative, Part, Positive
from fl_lightning.secret import SecretStream, new_key
from fl_lightning.wire import Message, State

#: Noise on the count of bounded updates, as a share of the expected cohort (Andrew et al., 2021).
COUNT_NOISE = 1 / 20


class Round(NamedTuple):
    """Participation in a round, for the accountant."""

    kind: Kind
    rate: float
    """Participation probability of a client; 1 if the cohort is known."""
    clients: list[int]
    """Clients that took part, repeated for each message."""


#: Rounds by number.
Rounds = dict[int, Round]


class DifferentialPrivacyCallback(FederatedCallback):
    """Clips every client's update, adds Gaussian noise, and logs ``privacy/epsilon`` after every round.

    ``central``: a trusted server clips the updates and adds noise to their mean (DP-FedAvg, McMahan et al., 2018). The
    model hides whether a client's update is in the mean or replaced by 0, for public weights; an eavesdropper sees the
    original updates.

    ``local``: every client clips its message and adds noise before sending it, which hides which data a client has. Two
    updates differ by up to twice the bound, so the effective noise is halved. Epsilon is that of the client that took
    part most often.

    Sampling of clients reduces epsilon only if participation is secret: the DataModule needs ``secret_cohorts``, the
    method ``weighting="uniform"``, and the noise must be central. The mean is then taken over the expected cohort.
    ``sampling="poisson"`` is accounted for exactly, cohorts of a fixed size by a much looser bound. In all other cases
    every client is accounted for the rounds in which it took part.

    The update is the difference of the sent and the received message; all entries are clipped together: weights,
    running statistics, control variates, losses. Integer entries are not changed.

    Noise comes from the operating system, so a resumed or repeated run has different noise. With
    ``reproducible_noise`` it is derived from the seed (default 0), so anyone who knows the seed can remove it: for
    experiments only. ``privacy/noise_reproducible`` is logged with every epsilon.

    Releases of earlier fits with this callback are included, and noise is never reused.

    Args:
        clip: maximum norm of a client's update; with ``quantile``, the initial one.
        noise_multiplier: standard deviation of the noise as a multiple of ``clip``: of the sum of the updates if
            ``central`` (for clients of equal weight), of every message if ``local``.
        where: ``central`` or ``local``.
        delta: probability that the bound fails; None means one over ten times the number of clients.
        accountant: ``pld``, or opacus's ``rdp`` or ``prv``.
        reproducible_noise: derive the noise from the run's seed.
        quantile: let ``clip`` track this quantile of the updates' norms by a noisy count, which epsilon includes; None
            keeps ``clip`` fixed.
        clip_rate: learning rate of ``clip``.
    """

    changes_messages = True

    def __init__(
        self,
        clip: Positive = 1.0,
        noise_multiplier: NonNegative = 1.0,
        where: Literal["central", "local"] = "central",
        delta: Part | None = None,
        accountant: Literal["pld", "rdp", "prv"] = "pld",
        reproducible_noise: bool = False,
        quantile: Part | None = None,
        clip_rate: NonNegative = 0.2,
    ) -> None:
        if quantile is not None and where != "central":
            raise FederationError(f"quantile={quantile} lets the server choose clip: it needs where='central'.")
        self.clip, self.noise_multiplier, self.where = clip, noise_multiplier, where
        self.delta, self.accountant, self.reproducible_noise = delta, accountant, reproducible_noise
        self.quantile, self.clip_rate = quantile, clip_rate
        #: Participation by round.
        self.rounds: Rounds = {}
        #: Participation in earlier fits.
        self.earlier: list[Rounds] = []
        self._received: dict[int, State] = {}
        self._clients = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods whose server does not compute a mean, and a missing accountant."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(
                f"DifferentialPrivacyCallback needs a federated method, not {type(pl_module).__name__}."
            )
        if self.where == "central" and not pl_module.aggregates_by_mean:
            raise FederationError(
                f"The server of {type(pl_module).__name__} does not take a mean with fixed weights, so central noise "
                "gives no guarantee: use where='local'."
            )
        self._clients = pl_module.federation.num_clients
        epsilon([], 0.5, self.accountant)
        if self.reproducible_noise and self.noise_multiplier:
            rank_zero_warn(
                "reproducible_noise draws the noise from the seed: epsilon holds only against those who do not know it."
            )
        if stage == "fit" and self.rounds:  # a resumed checkpoint restores its own
            self.earlier, self.rounds = [*self.earlier, self.rounds], {}

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Record participation; a repeated round counts once."""
        assert isinstance(pl_module, FederatedModule)
        self.rounds = {number: took for number, took in self.rounds.items() if number < round}
        # A client that trains several models sends as many messages.
        clients = sorted(map(pl_module.client_of, cohort))
        self.rounds[round] = Round(*self._sampled(pl_module, clients, round), clients)
        self._received.clear()

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Keep the received message, to compute the update."""
        self._received[client] = message

    def on_client_end(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Clip and add noise at a simulated client; deployed clients do so themselves."""
        assert isinstance(pl_module, FederatedModule)
        if self.where == "local" and pl_module.exchange.simulated:
            normal = self._normal(trainer, pl_module, client, new_key())
            self._protect(message, self.noise_multiplier * self.clip, normal)

    @property
    def guards(self) -> bool:
        """Whether the defence runs at the clients."""
        return self.where == "local"

    def settings(self) -> dict[str, Any]:
        """Return the client's part of the defence."""
        return {"where": self.where, "clip": self.clip, "noise_multiplier": self.noise_multiplier}

    def install(self, method: FederatedModule) -> None:
        """Refuse reproducible noise at a site, because the server could remove it."""
        if self.reproducible_noise:
            raise FederationError(
                "reproducible_noise derives the noise from the seed, which the server knows: leave it out in deployed "
                "runs."
            )

    def protect(self, method: FederatedModule, received: State, message: Message) -> None:
        """Clip and add noise at a site."""
        self._received[message.client] = received
        normal = SecretStream(new_key(), str(message.client)).normal
        self._protect(message, self.noise_multiplier * self.clip, normal)

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Clip and add noise at the server."""
        assert isinstance(pl_module, FederatedModule)
        if self.where == "local":
            return
        key: bytes = trainer.strategy.broadcast(new_key())
        took = self.rounds[trainer.current_epoch]
        if took.rate < 1 and len(pl_module.stage.clients) != len(took.clients):
            raise FederationError(
                f"{type(pl_module).__name__} divides a round into stages with separate means, for which secret cohorts "
                "give no guarantee: set secret_cohorts to false."
            )
        drawn = set(took.clients)
        expected = float(len(messages))
        if took.rate < 1:
            drawn = set(pl_module.datamodule.drawn(trainer.current_epoch))
            expected = took.rate * self._clients
        noise, bound = self._noise(expected), self.clip
        if self.quantile is not None:
            self._follow(
                [m for m in messages if m.client in drawn], expected, self._normal(trainer, pl_module, -1, key)
            )
        if took.rate < 1:
            std, share = noise * bound * math.sqrt(len(messages)) / expected, len(messages) / expected
        else:
            std, share = central_std(noise, bound, messages, pl_module.weighting), 1.0
        for message in messages:
            factor = share if took.rate == 1 or message.client in drawn else 0.0
            self._protect(message, std, self._normal(trainer, pl_module, message.client, key), bound, factor)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log epsilon so far and whether its noise is reproducible."""
        logged = {"privacy/epsilon": self.epsilon()}
        if self.reproducible_noise:
            logged["privacy/noise_reproducible"] = 1.0
        if self.quantile is not None:
            logged["privacy/clip"] = self.clip
        for name, value in logged.items():
            pl_module.log(name, value, on_step=False, on_epoch=True, batch_size=1)

    def epsilon(self) -> float:
        """Return the epsilon of all rounds so far."""
        delta = 1 / (10 * self._clients) if self.delta is None else self.delta
        every = [took for fit in (*self.earlier, self.rounds) for took in fit.values()]
        secret = Counter((took.kind, took.rate) for took in every if took.rate < 1)
        known = _seen(every, self._worth)
        if not secret:
            return epsilon(known, delta, self.accountant)
        sampled = [Release(kind, self.noise_multiplier, rate, number) for (kind, rate), number in secret.items()]
        sampled += _seen([took for took in every if took.rate == 1], self._worth)
        found = epsilon(sampled, delta, self.accountant)
        # Epsilon for known cohorts is an upper bound.
        return min(found, epsilon(known, delta)) if self.accountant == "pld" else found

    def run_metrics(self) -> dict[str, float]:
        """Return epsilon and whether its noise is reproducible, for the tables of ``fl-lightning reproduce``."""
        return {"epsilon": self.epsilon()} | ({"noise_reproducible": 1.0} if self.reproducible_noise else {})

    def state_dict(self) -> dict[str, Any]:
        """Return participation and bound, for a resumed run."""
        rounds, *earlier = (
            {number: [took.kind, took.rate, list(took.clients)] for number, took in fit.items()}
            for fit in (self.rounds, *self.earlier)
        )
        return {"rounds": rounds, "earlier": earlier, "clip": self.clip}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.rounds, *self.earlier = (
            {int(number): Round(*took) for number, took in fit.items()}
            for fit in (state_dict["rounds"], *state_dict.get("earlier", ()))
        )
        if self.quantile is not None:
            self.clip = state_dict["clip"]

    @property
    def _worth(self) -> float:
        """Return the noise over the sensitivity: the bound, or twice the bound if local."""
        return self.noise_multiplier / (1 if self.where == "central" else 2)

    def _sampled(self, module: FederatedModule, clients: list[int], round: int) -> tuple[Kind, float]:
        """Return how the cohort was drawn, and the sampling rate usable for amplification."""
        data = module.datamodule
        secret = getattr(data, "secret_cohorts", False) and self.where == "central" and module.weighting == "uniform"
        if not secret or data.fraction == 1 or clients != sorted(data.cohort(round)):
            return "gaussian", 1.0
        if data.sampling == "poisson":
            return "poisson", data.fraction
        return "fixed", len(clients) / self._clients

    def _noise(self, expected: float) -> float:
        """Return the noise multiplier of the updates."""
        if self.quantile is None or not self.noise_multiplier:
            return self.noise_multiplier
        return split_noise(self.noise_multiplier, COUNT_NOISE * expected)

    def _follow(self, messages: list[Message], expected: float, normal: Normal) -> None:
        """Move the bound towards the quantile of the norms."""
        assert self.quantile is not None
        inside = sum(0.5 if norm(change(m.tensors, self._received[m.client])) <= self.clip else -0.5 for m in messages)
        noise = COUNT_NOISE * expected * float(normal((1,))) if self.noise_multiplier else 0.0
        self.clip = next_bound(self.clip, 0.5 + (inside + noise) / expected, self.quantile, self.clip_rate)

    def _protect(
        self, message: Message, std: float, normal: Normal, bound: float | None = None, factor: float = 1.0
    ) -> None:
        """Clip a message's update, scale it and add noise."""
        received = self._received[message.client]
        bounded = clipped(message.tensors, received, self.clip if bound is None else bound)
        if factor != 1.0:
            bounded = scaled(bounded, received, factor)
        message.tensors = noised(bounded, std, normal) if std else bounded

    def _normal(self, trainer: Trainer, module: Any, client: int, key: bytes) -> Normal:
        """Return the noise source of a message."""
        if not self.reproducible_noise:
            return SecretStream(key, str(client)).normal
        purpose = self._purpose(module) if client >= 0 else f"{self._purpose(module)}.count"
        return seeded_normal(seeding.stream(module.seed, purpose, trainer.current_epoch, max(client, 0)))

    def _purpose(self, module: FederatedModule) -> str:
        """Return the purpose of the noise stream, which differs between fits and between stages of a round."""
        parts = (len(self.earlier), module.completed_stages)
        return ".".join([f"privacy.{self.where}", *(map(str, parts) if any(parts) else ())])


def _seen(rounds: list[Round], noise: float) -> list[Release]:
    """Return the releases of the client that took part most often, for known cohorts."""
    took = Counter(client for one in rounds for client in one.clients)
    return [Release("gaussian", noise, 1.0, max(took.values()))] if took else []
