"""``FederatedModule``: the contract that every method fills in, and FedAvg where it says nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning import persistence, seeding
from fl_lightning.client import DiskSnapshotStore, SnapshotStore
from fl_lightning.engine import (
    Batch,
    FunctionalNet,
    Gradient,
    LocalTraining,
    Move,
    Phase,
    Stage,
    Update,
    entries,
    make_engine,
)
from fl_lightning.errors import FederationError
from fl_lightning.evaluation import Evaluator
from fl_lightning.federation import Federation
from fl_lightning.lightning_checks import check_batches, check_data, check_net, check_trainer
from fl_lightning.loop import FederatedLoop, Tally
from fl_lightning.nets import FedNet, LossNet
from fl_lightning.progress import federated_progress_bar
from fl_lightning.wire import Message, State, Weighting, message_weights, weighted_mean

BufferPolicy = Literal["average", "keep", "reset"]
#: What the progress bar shows.
SHOWN = ("train/loss", "val/acc")
ServerOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class FederatedModule(LightningModule):
    """A federated method as a LightningModule: ``Trainer(max_epochs=rounds).fit(method, datamodule)``.

    The module holds the server's model. A client is a snapshot of this module's state: the shared entries it
    receives and the private ones it keeps. A method overrides only what differs from FedAvg:

    ==================  =======================================================================================
    ``is_private``      which entries of the net stay with the client
    ``client_loss``     the local objective
    ``moves``           what happens on a minibatch, if it is not one SGD step on ``client_loss``
    ``phases``          what is trained for how many epochs
    ``stages``          who trains after whom within a round
    ``message_down``    what the server sends; ``begin`` makes the client's state of it
    ``finish``          what the client sends up and what it keeps
    ``aggregate``       what the server makes of the messages
    ``personal_state``  the model that a client is evaluated with
    ==================  =======================================================================================

    Everything between ``begin`` and ``finish`` is a pure function of named tensors, so an engine may train one
    client or stack fifty.

    Args:
        net: the network; any ``nn.Module`` from Python, a ``FedNet`` on the command line.
        lr: clients' learning rate.
        epochs: passes over a client's data per round.
        batch_size: clients' minibatch size.
        momentum: momentum of the clients' SGD.
        weight_decay: weight decay of the clients' SGD.
        clip_norm: bound on the norm of a client's gradient at every local step.
        weighting: weigh clients by their number of samples, or all the same.
        buffers: running statistics are averaged like weights (``average``), stay with the client (``keep``), or
            start anew in every round and are averaged for evaluation (``reset``).
        server_optimizer: makes the optimizer that steps the server's model along the mean change; plain SGD with
            learning rate 1, the default, is FedAvg, adaptive ones give FedOpt.
        engine: how a cohort is trained: ``auto``, ``sequential``, ``stacked``, ``captured`` or ``compiled``.
        clients_per_stack: how many clients are trained together at most.
        workers: how many processes the clients of a round are shared out to, each with one core.
        store: a folder for files that hold what clients keep between rounds; None keeps it in memory.
        seed: seed of all streams; None takes that of ``seed_everything``, else 0.
    """

    def __init__(
        self,
        net: FedNet,
        lr: float = 0.01,
        epochs: int = 1,
        batch_size: int = 10,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        weighting: Weighting = "samples",
        buffers: BufferPolicy = "average",
        server_optimizer: ServerOptimizer | None = None,
        engine: str = "auto",
        clients_per_stack: int = 16,
        workers: int = 1,
        store: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seed = seeding.default_seed() if seed is None else seed
        self.save_hyperparameters(ignore=["net", "server_optimizer"])
        persistence.note_hyperparameters(self, net)
        self.net: nn.Module = FedNet.from_spec(net) if isinstance(net, dict) else net
        self.local = LocalTraining(lr, epochs, batch_size, momentum, weight_decay, clip_norm)
        self.weighting: Weighting = _one_of("weighting", weighting, ("samples", "uniform"))
        self.buffers_policy: BufferPolicy = _one_of("buffers", buffers, ("average", "keep", "reset"))
        self.server_optimizer = server_optimizer
        self.engine = make_engine(engine, clients_per_stack, workers)
        self.snapshots = SnapshotStore() if store is None else DiskSnapshotStore(store)
        self.evaluator = Evaluator()
        self.bytes_up = self.bytes_down = self.completed_rounds = self.completed_stages = 0
        self.stage, self.tally = Stage(()), Tally()  # under way, and what those before it in the round add up to
        self.summary: dict[str, float] = {}
        buffers_of_net = entries(self.net).keys() - dict(self.net.named_parameters()).keys()
        self._initial_buffers = {n: v.detach().clone() for n, v in entries(self.net).items() if n in buffers_of_net}
        # Not registered and made where it is used: it is neither saved nor shared with other processes.
        self.__dict__["_functional"] = None

    #: Whether the server's model is a mean of the clients' under weights that their data does not decide.
    aggregates_by_mean: ClassVar[bool] = True
    #: Whether the server's model may get units that it did not begin with.
    grows: bool = False

    # ---- what a method may say ------------------------------------------------------------------------------

    def is_private(self, name: str) -> bool:
        """Whether an entry of the net stays with the client."""
        return False

    def phases(self) -> Sequence[Phase]:
        """The phases of local training; by default one in which every trainable parameter is trained."""
        return [Phase(self.local.epochs, self.trainable_names)]

    def moves(self, phase: Phase) -> Sequence[Move]:
        """The moves made on every minibatch; by default one SGD step on ``client_loss``."""
        return [self.descend]

    def opening(self, phase: Phase) -> Sequence[Move]:
        """The moves made on a client's first minibatch of a phase instead; by default it is like the others."""
        return ()

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One SGD step on ``client_loss``."""
        grads, loss, buffers = gradient(lambda s: self.client_loss(s, batch), state, phase.trainable)
        return Update(loss, grads, buffers)

    def client_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
        """The local objective on one minibatch, and the buffers that the forward pass changed."""
        return self.batch_loss(state, batch.x, batch.y, batch.noise)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of a batch: the mean cross entropy."""
        if target.dim() != 1 or target.is_floating_point():
            return F.cross_entropy(output, target)
        # The same without a class to ignore, which leaves a dozen operations less in a captured step.
        return -F.log_softmax(output, dim=1).gather(1, target[:, None]).mean()

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Noise for one client's epoch, each tensor of shape (steps, ...); it enters as ``batch.noise``."""
        return {}

    def cohort(self, round: int) -> list[int]:
        """The clients that train in a round."""
        cohort: list[int] = self.datamodule.cohort(round)
        return cohort

    def stages(self, round: int, cohort: list[int]) -> Sequence[Stage]:
        """The stages of a round, one after the other; by default one, in which the cohort trains.

        The server aggregates after each of them; ``self.stage`` is the one under way. Must depend on nothing but its
        arguments, the method's settings and the federation: a resumed run asks again and goes on after the last stage
        that was completed.
        """
        return [Stage(cohort)]

    def client_of(self, number: int) -> int:
        """The client whose data and streams a number of the cohort stands for: itself, where clients train one model.

        A method whose clients train several models in a round numbers them all in ``cohort``; messages, snapshots and
        hooks then go by these numbers.
        """
        return number

    def message_down(self, client: int) -> State:
        """What the server sends to a client: the shared entries."""
        state = self.server_state()
        return {name: state[name] for name in self.shared_names if self._sends(name)}

    def begin(self, client: int, message: State) -> State:
        """The state a client trains from: what it received, and its own entries (at first the common initial ones)."""
        state, own = self.server_state(), self.snapshots[client].private
        if self.buffers_policy == "reset":
            state |= {name: value.to(state[name]) for name, value in self._initial_buffers.items()}
            own = {name: value for name, value in own.items() if name not in self._initial_buffers}
        return {**state, **message, **own}

    def after_training(self, states: Mapping[int, State], round: int) -> None:
        """Called with the states of a stack of trained clients, to add entries for ``finish`` to them; adds none."""

    def finish(self, client: int, state: State, message: State) -> tuple[State, State]:
        """What a trained client sends up, and the private entries that it keeps."""
        return {name: state[name] for name in self.shared_names}, {name: state[name] for name in self.private_names}

    def aggregate(self, messages: list[Message]) -> State:
        """New values of entries of :attr:`server`; the server's optimizer steps towards them, the others stay."""
        return weighted_mean(messages, message_weights(messages, self.weighting))

    def round_metrics(self) -> dict[str, float]:
        """What else to log of a round that was just aggregated; nothing."""
        return {}

    def personal_state(self, client: int) -> State:
        """The model that a client is evaluated with, also if it never trained."""
        return {**self.server_state(), **self.snapshots[client].private}

    def prepare_evaluation(self, clients: Sequence[int]) -> None:
        """Called before the personal states of several clients are asked for, to make them together; does nothing."""

    def model_key(self, client: int) -> int:
        """Clients with equal keys are evaluated with one and the same model."""
        return client if self.private_names else -1

    @property
    def server(self) -> nn.Module:
        """What the server's optimizer steps: the net, or several nets for a method that has several models."""
        return self.net

    def server_extras(self) -> dict[str, Any]:
        """What the server keeps beside its models, for a checkpoint: plain dicts of tensors and numbers."""
        return {}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Bring back what :meth:`server_extras` gave."""

    def global_models(self) -> Sequence[tuple[float, State]]:
        """Models scored on a test set that belongs to nobody, each with its weight in their mean."""
        return [] if self.private_names else [(1.0, self.server_state())]

    # ---- what an adversary makes of a method's messages; see fl_lightning.privacy ----------------------------

    def revealed(self, message: State) -> State:
        """The entries of the net that a message, up or down, tells whoever reads it."""
        return {name: message[name] for name in self.shared_names if name in message}

    def private_start(self) -> State:
        """Private entries that whoever lacks them may fit to data of their own, as clients have them at first."""
        state = self.server_state()
        return {name: state[name] for name in self.trainable_names if self._stays(name)}

    def assumptions(self) -> dict[str, State]:
        """What whoever lacks the private entries may put in their place without data, by name."""
        return {"initial": self.private_start()} if self.private_start() else {"seen": {}}

    def assume(self, state: State, private: State) -> State:
        """The model of a client with the shared entries of ``state`` and these private ones."""
        return {**state, **{name: value for name, value in private.items() if name in state}}

    def betrayed(self, received: State, message: State) -> State:
        """Private entries that show in how a client changed what it received; none unless a method says so.

        Whoever has the private entries of clients used in the training of shared ones should ask what the difference of
        the two messages tells of them, and say it here, so that attacks know.

        Args:
            received: what the client was sent.
            message: what it sent back.
        """
        return {}

    # ---- what a method may use ------------------------------------------------------------------------------

    def call(self, state: State, x: Tensor, noise: State | None = None, training: bool = True) -> tuple[Tensor, State]:
        """The net's output under ``state``, and in training the new values of its buffers."""
        return self.functional(state, x, noise or {}, training)

    def batch_loss(
        self, state: State, x: Tensor, y: Tensor, noise: State | None = None, training: bool = True
    ) -> tuple[Tensor, State]:
        """Loss of a batch under ``state``, the net's own where it has one, and in training the changed buffers."""
        if isinstance(self.net, LossNet):
            return self.functional(state, (x, y), noise or {}, training)
        output, buffers = self.call(state, x, noise, training)
        return self.loss(output, y), buffers

    @property
    def functional(self) -> FunctionalNet:
        """The net as a pure function."""
        if self.__dict__["_functional"] is None:
            self.__dict__["_functional"] = FunctionalNet(self.net)
        functional: FunctionalNet = self.__dict__["_functional"]
        return functional

    def server_state(self) -> State:
        """All entries of the server's net by name; private ones hold the common initial values."""
        return {name: value.detach() for name, value in entries(self.net).items()}

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """Names of the net's trainable parameters."""
        return tuple(name for name, p in self.net.named_parameters() if p.requires_grad)

    @property
    def private_names(self) -> tuple[str, ...]:
        """Entries of the net that stay with the client."""
        return tuple(name for name in self._entry_names if self._stays(name))

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Entries of the net that cross the wire."""
        return tuple(name for name in self._entry_names if not self._stays(name))

    @property
    def _entry_names(self) -> tuple[str, ...]:
        """Names of the net's entries, asked for often and looked up once for a net in a fit."""
        known: tuple[nn.Module, tuple[str, ...]] | None = self.__dict__.get("_names")
        if known is None or known[0] is not self.net:
            known = self.__dict__["_names"] = (self.net, tuple(entries(self.net)))
        return known[1]

    @property
    def federation(self) -> Federation:
        """The clients' data, on the module's device."""
        federation: Federation = self.datamodule.federation.to(self.device)
        self.datamodule.federation = federation
        return federation

    @property
    def datamodule(self) -> Any:
        """The Trainer's federated DataModule."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def _stays(self, name: str) -> bool:
        return self.is_private(name) or (self.buffers_policy == "keep" and name in self._initial_buffers)

    def _sends(self, name: str) -> bool:
        return not (self.buffers_policy == "reset" and name in self._initial_buffers)

    # ---- what engines ask -----------------------------------------------------------------------------------

    @property
    def batch_statistics(self) -> bool:
        """Whether the net normalises over the batch."""
        return self.functional.batch_statistics

    @property
    def compute_dtype(self) -> torch.dtype:
        """The net's floating precision."""
        return next((p.dtype for p in self.net.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def dropout_shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        """Noise entries of the net's dropout layers."""
        return self.functional.dropout_shapes(x)

    def for_worker(self) -> Self:
        """A copy that another process can train clients with: no Trainer, no clients, no server's optimizer."""
        twin = copy.copy(self)
        twin._modules = {**self._modules, "net": copy.deepcopy(self.net)}
        twin._trainer = None
        twin.server_optimizer = None
        twin.snapshots, twin.evaluator, twin.engine = SnapshotStore(), Evaluator(), make_engine("sequential")
        twin.__dict__["_functional"] = twin.__dict__["_names"] = None
        return twin

    # ---- Lightning ------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """Refuse what cannot be honoured, and show clients in the Trainer's own progress bar."""
        check_trainer(self.trainer)
        persistence.watch(self.trainer)
        bar = self.trainer.progress_bar_callback
        ours = federated_progress_bar(bar) if bar is not None else None
        return [] if ours is None else [ours]

    def setup(self, stage: str) -> None:
        """Hang the federated loop into the stock fit loop."""
        federation = check_data(self.trainer)
        check_net(self, federation)
        if stage == "fit":
            check_batches(self)
        self.evaluator.prepare(federation.num_clients)
        self.__dict__["_functional"] = self.__dict__["_names"] = None  # made anew where the module then lies
        if stage == "fit":
            self.engine.reset()
            # Of this fit; a checkpoint that is resumed says otherwise.
            self.completed_rounds = self.completed_stages = 0
            self.tally = Tally()
            self.trainer.fit_loop.federated = FederatedLoop(self.trainer, self)  # type: ignore[attr-defined]

    def teardown(self, stage: str) -> None:
        """Let the engine forget what it prepared, and stop its processes."""
        self.engine.reset()

    def on_fit_start(self) -> None:
        """Clients follow the module to its device and precision, which a checkpoint is read before."""
        self.snapshots.to(self.device, self.compute_dtype)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def configure_optimizers(self) -> Optimizer:
        """The server's optimizer."""
        parameters = [p for p in self.server.parameters() if p.requires_grad]
        if not parameters:
            raise FederationError(f"{type(self.net).__name__} has no trainable parameters.")
        return (
            torch.optim.SGD(parameters, lr=1.0) if self.server_optimizer is None else self.server_optimizer(parameters)
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One federated round."""
        self._log(self.trainer.fit_loop.federated.run())  # type: ignore[attr-defined]

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
        """Evaluate a chunk of clients after a round."""
        self.evaluator.update(self, batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate a chunk of clients on their test sets."""
        self.evaluator.update(self, batch, "test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> dict[int, Tensor]:
        """Predicted classes of each client's test samples."""
        return {client: logits.argmax(1) for client, logits, _ in self.evaluator.outputs(self, batch.tolist(), "test")}

    def on_validation_epoch_end(self) -> None:
        """Log what the clients scored."""
        if not self.trainer.sanity_checking:
            self._log(self.evaluator.compute(self, "val"))
        self.evaluator.clear()

    def on_test_epoch_end(self) -> None:
        """Log what the clients scored."""
        self._log(self.evaluator.compute(self, "test"))
        self.evaluator.clear()

    def _log(self, values: Mapping[str, float | Tensor]) -> None:
        for name, value in values.items():
            self.log(name, value, on_step=False, on_epoch=True, batch_size=1, prog_bar=name in SHOWN)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """The method as a checkpoint left it, with every client's snapshot; takes Lightning's arguments.

        A net that is not a ``FedNet`` has to be passed again: ``load_from_checkpoint(path, net=net)``.
        """
        with persistence.readable(checkpoint_path, cls.__name__):
            return super().load_from_checkpoint(checkpoint_path, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep every client's snapshot with the server's model."""
        persistence.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Bring back every client's snapshot."""
        persistence.load(self, checkpoint)


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> Any:
    if value not in allowed:
        raise FederationError(f"{name} must be {' or '.join(allowed)}, not {value!r}.")
    return value
