"""Differential privacy for the clients of any method, at the server or at the client."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer

from fl_lightning import seeding
from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.defence import central_std, clipped, epsilon, noised
from fl_lightning.wire import Message, State

#: Sampling rate and clients of rounds, by number.
Rounds = dict[int, tuple[float, list[int]]]


class DifferentialPrivacyCallback(FederatedCallback):
    """Bounds every client's update and adds Gaussian noise; logs what that amounts to, ``privacy/epsilon``, by round.

    ``central``: a trusted server clips the updates and noises their mean (DP-FedAvg, McMahan et al., 2018). Its model
    hides whether a client's update is in the mean or nothing (0) in its place, weights being public; whoever reads the
    wire sees updates as they were. The accountant takes the cohort for a Poisson sample, which a cohort of fixed size
    is nearly.

    ``local``: every client clips and noises its own message before it leaves. Whatever data a client has, its messages
    look alike; two updates differ by up to twice the bound, so the same noise is worth half. Epsilon is that of the
    client that took part most often.

    The update is the message less what the client received; all that crosses is bounded and noised together: weights,
    running statistics, control variates, losses. Integer entries are left as they are.

    What an earlier fit with this callback released counts, too, and noise is never used twice.

    Args:
        clip: largest norm of a client's update.
        noise_multiplier: standard deviation of the noise as a multiple of ``clip``: of the sum of the updates if
            ``central`` (for clients of equal weight), of every message if ``local``.
        where: ``central`` or ``local``.
        delta: the probability with which the bound may fail; None means one over ten times the number of clients.
        accountant: opacus's ``rdp`` (quick) or ``prv`` (tighter).
    """

    def __init__(
        self,
        clip: float = 1.0,
        noise_multiplier: float = 1.0,
        where: Literal["central", "local"] = "central",
        delta: float | None = None,
        accountant: Literal["rdp", "prv"] = "rdp",
    ) -> None:
        if not clip > 0:
            raise FederationError(f"clip must be greater than 0, not {clip}.")
        if not noise_multiplier >= 0:
            raise FederationError(f"noise_multiplier must be 0 or more, not {noise_multiplier}.")
        if where not in ("central", "local"):
            raise FederationError(f"where must be central or local, not {where!r}.")
        if accountant not in ("rdp", "prv"):
            raise FederationError(f"accountant must be rdp or prv, not {accountant!r}.")
        if delta is not None and not 0 < delta < 1:
            raise FederationError(f"delta must lie between 0 and 1, not at {delta}.")
        self.clip, self.noise_multiplier, self.where = clip, noise_multiplier, where
        self.delta, self.accountant = delta, accountant
        #: Sampling rate and clients of every round so far.
        self.rounds: Rounds = {}
        #: The same of every fit before this one.
        self.earlier: list[Rounds] = []
        self._received: dict[int, State] = {}
        self._clients = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods whose server makes something else than a mean, and a missing accountant."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(
                f"DifferentialPrivacyCallback needs a federated method, not {type(pl_module).__name__}."
            )
        if self.where == "central" and not pl_module.aggregates_by_mean:
            raise FederationError(
                f"The server of {type(pl_module).__name__} does not take a mean under fixed weights, so no noise is "
                "known to hide a client in it: use where='local'."
            )
        self._clients = pl_module.federation.num_clients
        epsilon([], 0.5, self.accountant)
        if stage == "fit" and self.rounds:  # a checkpoint that is resumed says otherwise
            self.earlier, self.rounds = [*self.earlier, self.rounds], {}

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Note who takes part; a round that is run again counts once."""
        assert isinstance(pl_module, FederatedModule)
        self.rounds = {number: took for number, took in self.rounds.items() if number < round}
        # A client that trains several models sends as many messages.
        self.rounds[round] = (min(1.0, len(cohort) / self._clients), sorted(map(pl_module.client_of, cohort)))
        self._received.clear()

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Keep what the client received: its update is measured from there."""
        self._received[client] = message

    def on_client_end(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """At the client: clip and noise before anything leaves."""
        if self.where == "local":
            self._protect(trainer, pl_module, message, self.noise_multiplier * self.clip)

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """At the server: clip, and noise so that the mean hides any one client."""
        assert isinstance(pl_module, FederatedModule)
        if self.where == "central":
            std = central_std(self.noise_multiplier, self.clip, messages, pl_module.weighting)
            for message in messages:
                self._protect(trainer, pl_module, message, std)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log epsilon so far."""
        pl_module.log("privacy/epsilon", self.epsilon(), on_step=False, on_epoch=True, batch_size=1)

    def epsilon(self) -> float:
        """What the rounds so far amount to."""
        delta = 1 / (10 * self._clients) if self.delta is None else self.delta
        every = [took for fit in (*self.earlier, self.rounds) for took in fit.values()]
        if self.where == "central":
            rates = Counter(rate for rate, _ in every)
            steps = [(self.noise_multiplier, rate, number) for rate, number in rates.items()]
        else:
            took = Counter(client for _, clients in every for client in clients)
            steps = [(self.noise_multiplier / 2, 1.0, max(took.values()))] if took else []
        return epsilon(steps, delta, self.accountant)

    def run_metrics(self) -> dict[str, float]:
        """Epsilon, for the tables of ``fl-lightning reproduce``."""
        return {"epsilon": self.epsilon()}

    def state_dict(self) -> dict[str, Any]:
        """The rounds that count, for a run that is resumed."""
        rounds, *earlier = (
            {number: [rate, list(took)] for number, (rate, took) in fit.items()} for fit in (self.rounds, *self.earlier)
        )
        return {"rounds": rounds, "earlier": earlier}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.rounds, *self.earlier = (
            {int(number): (rate, list(took)) for number, (rate, took) in fit.items()}
            for fit in (state_dict["rounds"], *state_dict.get("earlier", ()))
        )

    def _protect(self, trainer: Trainer, module: Any, message: Message, std: float) -> None:
        rng = seeding.stream(module.seed, self._purpose(module), trainer.current_epoch, message.client)
        bounded = clipped(message.tensors, self._received[message.client], self.clip)
        message.tensors = noised(bounded, std, rng) if std else bounded

    def _purpose(self, module: FederatedModule) -> str:
        """What the noise is drawn for: another fit, and another stage of a round, draw their own."""
        parts = (len(self.earlier), module.completed_stages)
        return ".".join([f"privacy.{self.where}", *(map(str, parts) if any(parts) else ())])
