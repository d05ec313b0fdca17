"""Sample-level differential privacy at the clients of any method."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.engine import WorkerEngine
from fl_lightning.engine.per_sample import PrivateSGD
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.accounting import Release, epsilon
from fl_lightning.ranges import NonNegative, Part, Positive
from fl_lightning.secret import SecretStream
from fl_lightning.wire import Message, State

#: Attributes of a method that private SGD replaces.
REPLACED = ("moves", "opening", "draw_noise", "dropout_shapes")


class PrivateSGDCallback(FederatedCallback):
    """Trains every client by private SGD (Abadi et al., 2016) and logs its epsilon, ``privacy/epsilon_samples``.

    In every local step, each sample's gradient is clipped and noise from the operating system is added to the sum. The
    trained entries then hide whether a sample is in a client's data; other entries of messages (the losses of q-FFL)
    are not protected. A sample is in one batch of every epoch, so a client is accounted for one release of the Gaussian
    mechanism per epoch, without amplification, because the order of batches is derived from the seed. The largest
    epsilon of a client is logged; :meth:`sites` returns all of them.

    Args:
        clip: maximum norm of a sample's gradient.
        noise_multiplier: standard deviation of the noise on a batch's sum as a multiple of ``clip``.
        delta: probability that the bound fails; None means one over ten times the client's number of samples.
    """

    def __init__(self, clip: Positive = 1.0, noise_multiplier: NonNegative = 1.0, delta: Part | None = None) -> None:
        self.clip, self.noise_multiplier, self.delta = clip, noise_multiplier, delta
        #: Number of steps with a given sample, by round and client.
        self.rounds: dict[int, dict[int, int]] = {}
        self._earlier: Counter[int] = Counter()
        self._private: PrivateSGD | None = None
        self._sizes: dict[int, int] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the method's clients train privately."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"PrivateSGDCallback needs a federated method, not {type(pl_module).__name__}.")
        if stage != "fit":
            return
        if isinstance(pl_module.engine, WorkerEngine):
            raise FederationError("PrivateSGDCallback trains clients in one process: set workers=1.")
        self._sizes = dict(enumerate(pl_module.federation.train.sizes.tolist()))
        self._earlier, self.rounds = self._releases(), {}
        self.install(pl_module)  # deployed sites do the same themselves

    #: The defence runs at the clients.
    guards = True

    def settings(self) -> dict[str, Any]:
        """Return the client's part of the defence."""
        return {"clip": self.clip, "noise_multiplier": self.noise_multiplier}

    def install(self, method: FederatedModule) -> None:
        """Let a method's clients train by private SGD."""
        self._private = PrivateSGD(
            _plain(method),
            self.clip,
            self.noise_multiplier,
            {name: tuple(p.shape) for name, p in method.net.named_parameters() if p.requires_grad},
            lambda: SecretStream().normal,
        )
        for name in REPLACED:
            setattr(method, name, getattr(self._private, name))

    def protect(self, method: FederatedModule, received: State, message: Message) -> None:
        """Do not change messages: their entries were trained privately."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the method."""
        if self._private is not None:
            for name in REPLACED:
                delattr(pl_module, name)
            self._private = None

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Record who trains; a repeated round counts once."""
        assert isinstance(pl_module, FederatedModule)
        assert self._private is not None
        self.rounds = {number: took for number, took in self.rounds.items() if number < round}
        each = Counter(map(pl_module.client_of, cohort))
        self.rounds[round] = {client: often * self._private.releases() for client, often in each.items()}

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Any]) -> None:
        """Log the largest epsilon."""
        value = max(self.sites().values())
        pl_module.log("privacy/epsilon_samples", value, on_step=False, on_epoch=True, batch_size=1)

    def sites(self) -> dict[int, float]:
        """Return the epsilon of every trained client."""
        return {client: self._epsilon(client, number) for client, number in sorted(self._releases().items())}

    def run_metrics(self) -> dict[str, float]:
        """Return the largest epsilon of a client, for the tables of ``fl-lightning reproduce``."""
        return {"epsilon_samples": max(self.sites().values(), default=0.0)}

    def state_dict(self) -> dict[str, Any]:
        """Return participation by round, for a resumed run."""
        return {"rounds": {n: dict(took) for n, took in self.rounds.items()}, "earlier": dict(self._earlier)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.rounds, self._earlier = dict(state_dict["rounds"]), Counter(state_dict["earlier"])

    def _releases(self) -> Counter[int]:
        """Return the number of steps with a given sample by client."""
        return sum((Counter(took) for took in self.rounds.values()), self._earlier)

    def _epsilon(self, client: int, number: int) -> float:
        delta = 1 / (10 * self._sizes[client]) if self.delta is None else self.delta
        return epsilon([Release("gaussian", self.noise_multiplier, 1.0, number)], delta)


def _plain(module: FederatedModule) -> Any:
    """Return the method's original attributes that private SGD uses."""
    names = (*REPLACED, "phases", "local", "seed", "batch_statistics", "compute_dtype")
    return SimpleNamespace(**{name: getattr(module, name) for name in names})
