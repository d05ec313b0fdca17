"""``FederatedModule``: a federated method as a LightningModule, with a client side and a server side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning import lightning_checks, persistence, schedules, seeding, tasks
from fl_lightning.arguments import NamedArguments
from fl_lightning.contract import AdversarySide, ClientSide
from fl_lightning.engine import MOST_WORKERS, Engine, LocalTraining, entries, make_engine
from fl_lightning.engine.contract import ScheduleUnit
from fl_lightning.errors import FederationError
from fl_lightning.evaluation import ClientOutput, Evaluator, evaluation_setting
from fl_lightning.exchange import Clients
from fl_lightning.federation import Federation, Split
from fl_lightning.local_optim import LocalOptimizer
from fl_lightning.loop import FederatedLoop, Tally
from fl_lightning.model import BufferPolicy
from fl_lightning.nets import FedNet
from fl_lightning.optim import step_schedulers
from fl_lightning.parties import Introduction, Setting, Stage
from fl_lightning.progress import federated_progress_bars
from fl_lightning.ranges import AtMost, Count, CountOrZero, CountUpToAMillion, NonNegative, Positive, ShareBelowOne
from fl_lightning.robust import Aggregation
from fl_lightning.schedules import Schedule
from fl_lightning.signals import SignalsCallback
from fl_lightning.simulation import RankedClients, SimulatedClients
from fl_lightning.snapshots import DiskSnapshotStore, SnapshotStore
from fl_lightning.tasks import Task
from fl_lightning.wire import State, Weighting

ServerOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class FederatedModule(NamedArguments, ClientSide, AdversarySide, LightningModule):
    """A federated method as a LightningModule: ``Trainer(max_epochs=rounds).fit(method, datamodule)``.

    The module holds the server's model. A client is a snapshot of this module's state: the shared entries it
    receives and the private ones it keeps. A method overrides only what differs from FedAvg, on two sides:
    :class:`~fl_lightning.contract.ClientSide` and :class:`~fl_lightning.contract.ServerSide`.

    Args:
        net: the network; any ``nn.Module`` from Python, a ``FedNet`` on the command line.
        lr: clients' learning rate.
        epochs: passes over a client's data per round.
        batch_size: clients' minibatch size.
        momentum: momentum of the clients' SGD.
        weight_decay: weight decay of the clients' optimizer.
        clip_norm: maximum norm of a client's gradient at every local step.
        optimizer: the clients' optimizer, an object or name of ``fl_lightning.local_optim``; SGD by default.
        keep_optimizer: whether clients keep the optimizer's state between rounds; else it is new in every round.
        lr_schedule: factor of the learning rate, a schedule of ``fl_lightning.schedules``; None is 1.
        lr_schedule_by: the unit that the schedule counts: rounds, epochs over all rounds, or the steps of one round.
        task: loss and metrics, an object or name of ``fl_lightning.tasks``; classification by default.
        weighting: weight clients by their number of samples, or uniformly.
        buffers: running statistics are averaged like weights (``average``), stay with the client (``keep``), or
            start anew in every round and are averaged for evaluation (``reset``).
        server_optimizer: makes the optimizer that steps the server's model along the mean change; plain SGD with
            learning rate 1, the default, is FedAvg, adaptive ones give FedOpt.
        aggregation: a rule of :mod:`fl_lightning.robust`, such as ``Median()``, instead of the mean of the clients'
            messages; None takes the mean.
        engine: how a cohort is trained: ``auto``, ``sequential``, ``stacked``, ``captured`` or ``compiled``.
        clients_per_stack: maximum number of clients trained together.
        workers: number of processes that train the clients of a round, each with one core.
        store: a folder for the clients' snapshots; None keeps them in memory.
        seed: seed of all streams; None takes that of ``seed_everything``, else 0.
    """

    def __init__(
        self,
        net: FedNet,
        lr: NonNegative = 0.01,
        epochs: CountUpToAMillion = 1,
        batch_size: CountUpToAMillion = 10,
        momentum: ShareBelowOne = 0.0,
        weight_decay: NonNegative = 0.0,
        clip_norm: Positive | None = None,
        optimizer: LocalOptimizer | str | None = None,
        keep_optimizer: bool = False,
        lr_schedule: Schedule | str | None = None,
        lr_schedule_by: ScheduleUnit = "round",
        task: Task | str | None = None,
        weighting: Weighting = "samples",
        buffers: BufferPolicy = "average",
        server_optimizer: ServerOptimizer | None = None,
        aggregation: Aggregation | None = None,
        engine: str = "auto",
        clients_per_stack: Count = 16,
        workers: Annotated[Count, AtMost(MOST_WORKERS)] = 1,
        store: str | None = None,
        seed: CountOrZero | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seed = seeding.default_seed() if seed is None else seed
        self.save_hyperparameters(ignore=["net", "server_optimizer", "aggregation", "optimizer", "lr_schedule", "task"])
        schedule = None if lr_schedule is None else schedules.made(lr_schedule, "lr_schedule")
        local = LocalTraining(lr, epochs, batch_size, momentum, weight_decay, clip_norm, optimizer, keep_optimizer)
        self.local = replace(local, schedule=schedule, schedule_by=lr_schedule_by)
        self.task = tasks.made(task)
        persistence.note_hyperparameters(self, net)
        self.net: nn.Module = FedNet.from_spec(net) if isinstance(net, dict) else net
        self.weighting: Weighting = weighting
        self.buffers_policy: BufferPolicy = buffers
        self.server_optimizer, self.aggregation = server_optimizer, aggregation
        lightning_checks.check_aggregation(self)
        self.engine: Engine = make_engine(engine, clients_per_stack, workers)
        #: Snapshots of all clients between rounds.
        self.snapshots = SnapshotStore() if store is None else DiskSnapshotStore(store)
        self.exchange: Clients = SimulatedClients(self)
        self.roster: list[Introduction] = []
        self.evaluator, self.loop = Evaluator(), FederatedLoop(self)
        self.bytes_up = self.bytes_down = self.completed_rounds = self.completed_stages = 0
        self.stage, self.tally = Stage(()), Tally()  # current stage, and totals of the earlier ones of the round
        self.summary: dict[str, float] = {}
        parameters = dict(self.net.named_parameters())
        self.initial_buffers = {n: v.detach().clone() for n, v in entries(self.net).items() if n not in parameters}
        self.forget_net()

    @classmethod
    def check_arguments(cls, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Reject arguments that the method does not have, and a net that is not a module."""
        super().check_arguments(given, named)
        lightning_checks.check_net_argument(cls.__name__, given, named)

    # ---- the exchange with the clients ------------------------------------------------------------------------

    @property
    def simulation(self) -> SimulatedClients:
        """The clients if they are simulated, for reports and attacks, which read clients' private state."""
        if not isinstance(self.exchange, SimulatedClients):
            raise FederationError("Clients that are elsewhere keep their models and data: this is for simulations.")
        return self.exchange

    @property
    def is_fitting(self) -> bool:
        """Whether a fit is running."""
        return self._trainer is not None and self._trainer.training

    def setting(self, stage: str = "train") -> Setting:
        """Return the setting that the server sends to every client of a stage."""
        rounds = -1 if self._trainer is None else int(self._trainer.max_epochs or -1)
        return Setting(self.completed_rounds, rounds, stage, len(self.roster))

    def cohort(self, round: int) -> list[int]:
        """Return the clients that train in a round."""
        return list(self.datamodule.cohort(round))

    def personal_state(self, client: int) -> State:
        """Return the model on which a simulated client is evaluated, even if it never trained."""
        ((_, state),) = self.simulation.personal(evaluation_setting(self), {client: self.evaluation_down(client)})
        return state

    @property
    def federation(self) -> Federation:
        """The simulated clients' data, on the module's device."""
        federation: Federation = self.datamodule.federation.to(self.device)
        self.datamodule.federation = federation
        return federation

    @property
    def datamodule(self) -> Any:
        """The Trainer's federated DataModule."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def for_worker(self) -> Self:
        """Return a copy with which another process can train clients: no Trainer, clients or server optimizer."""
        twin = copy.copy(self)
        twin._modules = {**self._modules, "net": copy.deepcopy(self.net)}
        twin._trainer = twin.server_optimizer = None
        twin.engine, twin.snapshots, twin.exchange = make_engine("sequential"), SnapshotStore(), SimulatedClients(twin)
        twin.roster, twin.evaluator, twin.loop = [], Evaluator(), FederatedLoop(twin)
        twin.forget_net()
        return twin

    # ---- Lightning ------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """Reject unsupported Trainer options, and show clients in the Trainer's own progress bar."""
        lightning_checks.check_trainer(self.trainer)
        persistence.watch(self.trainer)
        return [SignalsCallback(), *federated_progress_bars(self.trainer.progress_bar_callback)]

    def setup(self, stage: str) -> None:
        """Check net and data, and collect the clients' introductions."""
        self.evaluator.prepare(lightning_checks.check_run(self, stage).num_clients)
        self.forget_net()  # rebuilt on the module's device
        kind = RankedClients if self.trainer.world_size > 1 else SimulatedClients
        if isinstance(self.exchange, SimulatedClients) and type(self.exchange) is not kind:
            self.exchange = kind(self)
        self.roster = list(self.exchange.introduce())
        if stage == "fit":
            self.exchange.reset()
            # A resumed checkpoint overwrites these afterwards.
            self.completed_rounds, self.completed_stages, self.tally = 0, 0, Tally()

    def teardown(self, stage: str) -> None:
        """Let the engine release its resources, and stop its processes."""
        self.exchange.reset()

    def on_fit_start(self) -> None:
        """Move snapshots to the module's device and precision; checkpoints are loaded before these are set."""
        self.snapshots.to(self.device, self.compute_dtype)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_train_start(self) -> None:
        """Require exactly one server optimizer."""
        lightning_checks.check_server_optimizer(self)

    def configure_optimizers(self) -> Optimizer:
        """Build the server's optimizer."""
        parameters = [p for p in self.server.parameters() if p.requires_grad]
        if not parameters:
            raise FederationError(f"{type(self.net).__name__} has no trainable parameters.")
        return (
            torch.optim.SGD(parameters, lr=1.0) if self.server_optimizer is None else self.server_optimizer(parameters)
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run one federated round."""
        self._log(self.loop.run())

    def on_train_epoch_end(self) -> None:
        """Step the schedulers of the server's optimizer, once per round."""
        step_schedulers(self.trainer.lr_scheduler_configs, self.completed_rounds, self.trainer.callback_metrics)

    @torch.no_grad()
    def server_step(self, target: State) -> None:
        """Step the server's model towards ``target``: the optimizer's gradient is minus the change."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for name, parameter in self.server.named_parameters():
            parameter.grad = parameter.detach() - target[name] if name in target and parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
        for name, value in self.server.named_buffers():
            if name in target:
                value.copy_(target[name])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate a chunk of clients after a round, on held-out samples if there are any, else on test samples."""
        self.evaluator.update(self, batch, self.federation.validated)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate a chunk of clients on their test sets."""
        self.evaluator.update(self, batch, "test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> dict[int, Tensor]:
        """Return predictions, such as classes, for each client's test samples."""
        return {client: self.task.predict(output) for client, output, _ in self.outputs(batch.tolist(), "test")}

    def outputs(self, clients: Sequence[int], split: Split) -> Iterator[ClientOutput]:
        """Yield outputs and targets of simulated clients' samples, each with the client's own model."""
        messages = {client: self.evaluation_down(client) for client in clients}
        return self.simulation.outputs(evaluation_setting(self), messages, split)

    def on_validation_epoch_end(self) -> None:
        """Log the clients' scores."""
        if not self.trainer.sanity_checking:
            self._log(self.evaluator.compute(self, self.federation.validated))
        self.evaluator.clear()

    def on_test_epoch_end(self) -> None:
        """Log the clients' scores."""
        self._log(self.evaluator.compute(self, "test"))
        self.evaluator.clear()

    def _log(self, values: Mapping[str, float | Tensor]) -> None:
        shown = ("train/loss", f"{self.federation.validated}/{self.task.headline}")
        for name, value in values.items():
            self.log(name, value, on_step=False, on_epoch=True, batch_size=1, prog_bar=name in shown)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load the method with every client's snapshot; takes Lightning's arguments.

        A net that is not a ``FedNet`` must be passed again: ``load_from_checkpoint(path, net=net)``.
        """
        with persistence.readable(checkpoint_path, cls.__name__):
            return super().load_from_checkpoint(checkpoint_path, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save every client's snapshot with the server's model."""
        persistence.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore every client's snapshot."""
        persistence.load(self, checkpoint)
