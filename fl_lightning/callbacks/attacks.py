"""Base class of attack callbacks: recorded messages, schedule and reports."""

from __future__ import annotations

import copy
import json
import math
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from fl_lightning import seeding
from fl_lightning.callbacks.base import FederatedCallback, Several
from fl_lightning.callbacks.defence import DifferentialPrivacyCallback
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.figures import show_figure
from fl_lightning.privacy.report import BASELINE, Report
from fl_lightning.privacy.views import VIEWS, make_views
from fl_lightning.privacy.wiretap import Protection, Run, Wire, finished, intercept
from fl_lightning.ranges import Count
from fl_lightning.snapshots import SnapshotStore
from fl_lightning.wire import Message, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Views of runs without secure aggregation; ``sums`` and ``colluding`` are for runs with it.
ALL_VIEWS = tuple(name for name, view in VIEWS.items() if not view.sums)


class AttackCallback(Several, FederatedCallback):
    """Base class of attacks, which record messages in a fit and attack at its end, every few rounds, or after a test.

    In a fit, attacks use the recorded messages. After ``trainer.test(ckpt_path=...)``, they request the messages that
    clients would send in the next round, and discard the clients' new state. An attack does not change the run: the
    weights are the same with and without it.

    Writes ``attack_<name>.json`` (all rows) and ``attack_<name>.md`` to the log folder, and logs the strongest attack
    of every view as ``<name>/<view>/<score>``.

    Args:
        views: the adversaries; see :mod:`fl_lightning.privacy.views`.
        clients: number of attacked clients, the most recent ones (after a test, random ones); None means all.
        every: also attack every ``every`` rounds; None attacks at the end only.
        memory: number of a client's messages that the server's view uses.
        group: name in the federation's ``meta`` by which the report groups clients.
        folder: folder of the report; None means the Trainer's log folder.
    """

    #: Name of the attack.
    attack: ClassVar[str]
    #: Prefix of its metrics in published tables.
    metric_prefix: ClassVar[str]
    #: Score that measures the strength of an attack.
    by: ClassVar[str]
    #: Score by which the attacker, who does not know the truth, selects an attack; None selects in hindsight.
    pick: ClassVar[str | None] = None
    #: Uses the clients' private data, so it is refused in deployed runs.
    simulations_only: ClassVar[bool] = True
    #: Supported views, and the reason against others.
    allowed: ClassVar[Sequence[str]] = tuple(VIEWS)
    reason: ClassVar[str] = ""

    def __init__(
        self,
        views: Sequence[str] = ALL_VIEWS,
        clients: Count | None = 10,
        every: Count | None = None,
        memory: Count = 3,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        self.views = make_views(views)
        for view in views:
            if view not in self.allowed:
                raise FederationError(
                    f"The {self.attack} attack has no view {view}, as {self.reason}: choose one of "
                    f"{', '.join(self.allowed)}."
                )
        self.clients, self.every, self.memory, self.group, self.folder = clients, every, memory, group, folder
        #: Reports by number of rounds.
        self.reports: dict[int, Report] = {}
        #: Files of the last attack's figures by name.
        self.pictures: dict[str, str] = {}
        self.wire = Wire(memory=memory)
        #: Progress function, called with the numbers of finished and of all targets.
        self.watch: Callable[[int, int], None] | None = None
        self._module: FederatedModule | None = None
        self._initial: FederatedModule | None = None
        self._began = self._trained = self._hidden = False
        self._heard: dict[int, list[tuple[State, State]]] = {}
        self._means: list[State] = []
        self._left: dict[int, list[State]] = {}

    @abstractmethod
    def strike(self, trainer: Trainer, run: Run) -> list[dict[str, Any]]:
        """Attack the clients of a run; return the report's rows."""

    def notes(self) -> dict[str, Any]:
        """Return additional notes for the report."""
        return {}

    @property
    def sums(self) -> bool:
        """Whether a view uses the means of rounds."""
        return any(view.sums for view in self.views)

    @property
    def report(self) -> Report | None:
        """The last report."""
        return next(reversed(self.reports.values()), None)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start recording, and keep a copy of the untrained method."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"{type(self).__name__} needs a federated method, not {type(pl_module).__name__}.")
        if getattr(pl_module, "everyone", False):
            raise FederationError(
                f"{type(pl_module).__name__} with agent_of_interest=all trains a model for every agent, but attacks "
                "need clients with one model: attack a run for one agent."
            )
        callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
        self._hidden = any(isinstance(one, FederatedCallback) and one.hides_messages for one in callbacks)
        if self._hidden and not self.sums and "sums" in self.allowed:
            self.views += make_views(["sums"])
        self.wire = Wire(self.clients, self.memory)
        if stage == "fit":
            self.reports = {}
        self._trained = pl_module.completed_rounds > 0
        if not self._trained or pl_module is not self._module:
            self._begin(pl_module)
        groups, names = pl_module.federation.groups(self.group)
        self._groups = {client: names[group] for client, group in enumerate(groups.tolist())}

    def _begin(self, module: FederatedModule) -> None:
        """Keep a copy of the method, which is the run's initial one if no rounds are completed."""
        self._module, self._initial = module, _without_clients(module)
        self._began = not module.completed_rounds

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Listen."""
        self.wire.hand(client, message)

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Record the message; if secure aggregation hides it, record only that it was sent."""
        self.wire.note(client, {} if self._hidden else message.tensors)

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Record the mean, for views that use it."""
        if self.sums:
            apart = [*self.wire.sent] if any(view.name == "colluding" for view in self.views) else []
            self.wire.note_mean(messages, federated(pl_module).weighting, apart)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Attack every ``every`` rounds."""
        if self.every is not None and (trainer.current_epoch + 1) % self.every == 0:
            self._carry_out(trainer, pl_module, finished(federated(pl_module), self.wire))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack after the last round."""
        self._carry_out(trainer, pl_module, finished(federated(pl_module), self.wire))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack unless done: a run interrupted in its attack does not reach ``on_train_end`` when resumed."""
        self._carry_out(trainer, pl_module, finished(federated(pl_module), self.wire))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack a trained method, such as one from a checkpoint."""
        module = federated(pl_module)
        stream = seeding.stream(module.seed, "attack.clients")
        chosen = sorted(stream.permutation(module.federation.num_clients)[: self.clients].tolist())
        self.reports.pop(module.completed_rounds, None)  # from another run or from the fit
        others: list[int] | None = None
        if self.sums:
            drawn = module.cohort(module.completed_rounds)
            others = [client for client in drawn if client not in chosen][: max(1, len(drawn) - len(chosen))]
        run = intercept(module, chosen, protection(trainer, pl_module), others, self._hidden)
        self._carry_out(trainer, pl_module, run)

    def state_dict(self) -> dict[str, Any]:
        """Recorded messages, needed to attack a resumed run like an uninterrupted one."""
        kept = {"sent": self.wire.sent, "received": self.wire.received, "left": self.wire.left}
        found = {name: {client: list(heard) for client, heard in every.items()} for name, every in kept.items()}
        return {**found, "means": list(self.wire.means)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        sent, received = state_dict["sent"], state_dict["received"]
        self._heard = {client: list(zip(received[client], messages, strict=True)) for client, messages in sent.items()}
        self._means, self._left = state_dict.get("means", []), state_dict.get("left", {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore recorded messages on the module's device.

        A module that was trained before but has no completed rounds starts a new run.
        """
        if self._trained and not federated(pl_module).completed_rounds:
            self._begin(federated(pl_module))
        for client, exchanged in self._heard.items():
            for messages in exchanged:
                down, up = ({name: value.to(pl_module.device) for name, value in one.items()} for one in messages)
                self.wire.hand(client, down)
                self.wire.note(client, up)
        here = [{name: value.to(pl_module.device) for name, value in one.items()} for one in self._means]
        self.wire.means = deque([*self.wire.means, *here], maxlen=self.memory)
        for client, left in self._left.items():
            moved = ({name: value.to(pl_module.device) for name, value in one.items()} for one in left)
            self.wire.left[client] = deque(moved, maxlen=self.memory)
        self._heard, self._means, self._left = {}, [], {}

    def run_metrics(self) -> dict[str, float]:
        """Return the last report's metrics for the tables of ``fl-lightning reproduce``, in their units.

        ``<name>_<score>`` is the outsider's attack with the first assumption and variant, as in the papers;
        ``<name>_<score>/<view>`` the highest score of any attack of a view, and
        ``<name>_<score>/<view>/<assumption>`` with one assumption; ``<name>_<score>/strongest`` that of all views but
        the insider, who is not an adversary; ``<name>_<score>/baseline/<which>`` that of a baseline.
        """
        report = self.report
        if report is None:
            return {}
        ways: dict[str, list[dict[str, str]]] = {"": [way for way in report.ways() if way["view"] == "outsider"][:1]}
        for way in report.ways():
            view = way["view"]
            outside = ["/strongest"] if view != "insider" else []
            for where in (f"/{view}", f"/{view}/{way['assumption']}", *outside):
                ways.setdefault(where, []).append(way)
        scores = {where: report.best(chosen) for where, chosen in ways.items()}
        scores |= {f"/{BASELINE}/{which}": known for which, known in report.floors().items()}
        return {
            f"{self.metric_prefix}_{name}{where}": value if name in ("psnr", "ssim") else 100 * value
            for where, found in scores.items()
            for name, value in found.items()
            if isinstance(value, float) and not math.isnan(value)
        }

    def _carry_out(self, trainer: Trainer, module: Any, run: Run) -> None:
        rounds = module.completed_rounds
        if trainer.fast_dev_run or rounds in self.reports or not run.clients:  # type: ignore[attr-defined]
            return
        run.watch, run.protect = self.watch, protection(trainer, module)
        self.pictures = {}
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*many workers.*|.*number of training batches.*|.*treespec.*")
            rows = self.strike(trainer, run)
        report = Report(self.attack, type(module).__name__, rounds, rows, self.by, self.notes(), self.pick)
        self.reports[rounds] = report
        for logger in trainer.loggers:
            logger.log_metrics(report.scalars(), step=rounds)
        # Lightning does not log after the last round; dashboard and record read these.
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in report.scalars().items()})
        self._write(trainer, report)

    def picture(self, trainer: Trainer, name: str, make: Callable[[], Figure], rounds: int) -> None:
        """Log a figure and add it to the report."""
        file = show_figure(trainer, name, make, rounds, self.folder)
        if file is not None:
            self.pictures[name] = file

    def _write(self, trainer: Trainer, report: Report) -> None:
        folder = self.folder or trainer.log_dir
        if folder is None or not trainer.is_global_zero:
            return
        path = Path(folder) / f"attack_{self.attack}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([json.loads(one.json()) for one in self.reports.values()], indent=1))
        pictures = "".join(f"\n![{name}]({file})\n" for name, file in self.pictures.items())
        path.with_suffix(".md").write_text(report.markdown() + pictures)
        rank_zero_info(f"{self.attack} attack: {path.with_suffix('.md')}")


def _without_clients(module: FederatedModule) -> FederatedModule:
    """Return a copy without trained clients."""
    twin = copy.deepcopy(module)
    twin.snapshots = SnapshotStore()
    return twin


def protection(trainer: Trainer, module: LightningModule) -> Protection:
    """Apply the run's defences to messages that are requested after training."""
    defences = [c for c in trainer.callbacks if isinstance(c, DifferentialPrivacyCallback)]  # type: ignore[attr-defined]

    def protect(received: State, message: Message) -> None:
        for defence in defences:
            defence.on_client_start(trainer, module, message.client, received)
            defence.on_client_end(trainer, module, message.client, message)

    return protect


def federated(module: LightningModule) -> FederatedModule:
    """Return the module, which setup has checked to be federated."""
    assert isinstance(module, FederatedModule)
    return module
