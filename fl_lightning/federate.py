"""Federated training of a user's own LightningModule: its ``training_step`` is the clients' objective."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric

from fl_lightning.errors import FederationError
from fl_lightning.lightning_checks import check_optimizer
from fl_lightning.local_optim import OPTIMIZERS, Group, Groups, LocalOptimizer
from fl_lightning.methods import FedAvg
from fl_lightning.module import FederatedModule
from fl_lightning.nets import Asked, LossNet
from fl_lightning.schedules import Table

#: Hooks that change a training step; local training calls none of them.
IN_STEPS = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
#: Hooks of the run, its epochs and its checkpoints, which belong to the server; use a callback instead.
OF_THE_RUN = (
    "configure_callbacks",
    "configure_model",
    "on_fit_end",
    "on_fit_start",
    "on_load_checkpoint",
    "on_save_checkpoint",
    "on_test_batch_end",
    "on_test_batch_start",
    "on_test_end",
    "on_test_epoch_end",
    "on_test_epoch_start",
    "on_test_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "on_validation_start",
    "predict_step",
    "setup",
    "teardown",
)
#: Options of torch's optimizers that change the step and that local optimizers lack.
UNKNOWN = ("amsgrad", "dampening", "maximize")
#: Maximum number of epochs for which a scheduler's learning rates are tabulated; the last one is repeated.
NOTED_EPOCHS = 10_000


def federate(module: LightningModule, method: type[FederatedModule] = FedAvg, **options: Any) -> FederatedModule:
    """Turn a LightningModule into a federated method.

    Clients minimise the loss that ``training_step((inputs, targets), batch_idx)`` returns, with the optimizer, the
    parameter groups and the epoch-wise scheduler of ``configure_optimizers``. They are evaluated on the scores of
    ``forward(inputs)`` and on the metrics logged by ``validation_step`` and ``test_step``, called once with all samples
    of a client. Metrics logged in a training step are discarded: many clients share the module, which has no Trainer,
    and ``self.current_epoch`` and ``self.global_step`` are always 0. A scheduler's epoch is one pass of a client over
    its data, counted over all rounds.

    Args:
        module: the module; it is copied and left unchanged.
        method: any method of ``fl_lightning.methods``, or one of your own.
        options: the method's options (``epochs``, ``batch_size``, ``mu``, ...). If ``lr`` is among them, the module's
            ``configure_optimizers`` is not called.

    Returns:
        The method, for ``Trainer(max_epochs=rounds).fit(method, datamodule)``. Its net is the copied module:
        ``method.net.module``.

    Raises:
        FederationError: if the module's training uses something that clients cannot do.
    """
    _check(module)
    if not isinstance(method, type):
        kind = type(method).__name__
        raise FederationError(f"federate takes a method's class and its options: federate(module, {kind}, epochs=5).")
    settings = {} if "lr" in options else local_settings(module)
    made = method(LightningNet(module), **{**settings, **options})  # type: ignore[arg-type]
    check_optimizer(made)
    return made


class LightningNet(LossNet):
    """A LightningModule as a net with its own loss.

    Args:
        module: the module; copied.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        # Without a Trainer, and shared by many clients, the module has nowhere to log to.
        self.module.log = self.module.log_dict = _nothing  # type: ignore[method-assign]
        self._steps = {
            split: name
            for split, name in (("val", "validation_step"), ("test", "test_step"))
            if getattr(type(module), name) is not getattr(LightningModule, name)
        }
        if "val" in self._steps:  # without held-out samples, test samples are used for validation
            self._steps.setdefault("test", "validation_step")

    def forward(self, batch: Tensor | tuple[Tensor, Tensor] | Asked) -> Any:
        """Return the loss of (inputs, targets), the scores of inputs, or the metrics logged for samples."""
        if isinstance(batch, Asked):
            return self._logged(batch)
        if not isinstance(batch, tuple):
            return self.module(batch)
        result = self._called("training_step", batch)
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise FederationError(
                f"{type(self.module).__name__}.training_step must return the loss, a tensor of one number, or a dict "
                f"that has it under 'loss', not {type(loss).__name__}."
            )
        return loss

    def logs(self, split: str) -> bool:
        """Return whether the module has a step for a split, in which it may log."""
        return split in self._steps

    def _called(self, step: str, batch: tuple[Tensor, Tensor]) -> Any:
        """Call a step of the module, with or without the batch index."""
        function = getattr(self.module, step)
        return function(batch, 0) if len(inspect.signature(function).parameters) > 1 else function(batch)

    def _logged(self, asked: Asked) -> dict[str, Tensor]:
        """Return the metrics that the module logs for samples in one batch, by name."""
        found: dict[str, Any] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            found[name] = value

        def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            found.update(values)

        self.module.log, self.module.log_dict = log, log_dict  # type: ignore[method-assign,assignment]
        try:
            self._called(self._steps[asked.split], (asked.inputs, asked.targets))
        finally:
            self.module.log = self.module.log_dict = _nothing  # type: ignore[method-assign]
        return {name: _number(name, value) for name, value in found.items()}


def _number(name: str, value: Any) -> Tensor:
    """Convert a logged value to a 0-dim tensor."""
    number = torch.as_tensor(value.compute() if isinstance(value, Metric) else value).detach()
    if number.numel() != 1:
        raise FederationError(f"{name} is logged with {number.numel()} values per client: log one.")
    return number.reshape(()).double()


def local_settings(module: LightningModule) -> dict[str, Any]:
    """Translate the optimizer and scheduler of a module into options of a method."""
    name = f"{type(module).__name__}.configure_optimizers"
    try:
        found: Any = module.configure_optimizers()
    except RuntimeError as error:
        raise FederationError(
            f"{name} cannot be called without a Trainer ({error}): pass lr=... to federate instead."
        ) from error
    optimizer, scheduler, every = _only(found, name)
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) not in stepped for parameter in module.parameters() if parameter.requires_grad):
        raise FederationError(
            f"{name} leaves parameters out: freeze them with requires_grad_(False), or clients would train them too."
        )
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    rules = [_rule(optimizer, group, name) for group in optimizer.param_groups]
    settings: dict[str, Any] = {"lr": max(rates), "optimizer": rules[0]}
    if len({*rates}) > 1 or any(rule != rules[0] for rule in rules):
        names = {id(parameter): f"module.{name}" for name, parameter in module.named_parameters()}
        groups = zip(optimizer.param_groups, rules, rates, strict=True)
        settings["optimizer"] = Groups(
            tuple(
                Group(tuple(names[id(p)] for p in group["params"] if id(p) in names), rule, rate / (max(rates) or 1.0))
                for group, rule, rate in groups
            )
        )
    if scheduler is not None:
        settings |= {"lr_schedule": _schedule(scheduler, optimizer, every, name), "lr_schedule_by": "epoch"}
    return settings


def _rule(optimizer: Optimizer, group: Mapping[str, Any], name: str) -> LocalOptimizer:
    """Translate a parameter group into a local optimizer."""
    kind = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, kind, None) or kind not in OPTIMIZERS:
        raise FederationError(
            f"{name} returns {kind}, but clients train with {', '.join(OPTIMIZERS)} of torch.optim: use one of these."
        )
    for option in UNKNOWN:
        if group.get(option):
            raise FederationError(
                f"{name} sets {option}={group[option]}, which local optimizers do not have: leave it out."
            )
    if kind == "Adam" and group.get("decoupled_weight_decay"):
        kind = "AdamW"
    known = {option.name for option in fields(OPTIMIZERS[kind])}
    return OPTIMIZERS[kind](**{option: value for option, value in group.items() if option in known})


def _schedule(scheduler: Any, optimizer: Optimizer, every: int, name: str) -> Table:
    """Tabulate the factors of a scheduler, epoch by epoch."""
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise FederationError(
            f"{name} returns {type(scheduler).__name__}, which depends on metrics of a Trainer: return a scheduler "
            "that depends on epochs alone."
        )
    factors: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer step was taken before the scheduler's
        while len(factors) < NOTED_EPOCHS:
            now = [float(g["lr"]) / (float(g["initial_lr"]) or 1.0) for g in optimizer.param_groups]
            if max(now) - min(now) > 1e-12 * max(1.0, *now):
                raise FederationError(f"{name} schedules its parameter groups differently, but clients have one rate.")
            factors += [now[0]] * every
            try:
                scheduler.step()
            except ValueError:  # some schedulers raise after their last step
                break
    last = len(factors)
    while last > 1 and factors[last - 1] == factors[last - 2]:
        last -= 1
    return Table(factors[:last])


def _only(found: Any, name: str) -> tuple[Optimizer, Any, int]:
    """Unpack Lightning's formats of ``configure_optimizers``: one optimizer, its scheduler, and its frequency."""
    schedulers: Any = None
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        found, schedulers = found
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, dict):
        schedulers, found = found.get("lr_scheduler"), found.get("optimizer")
    if not isinstance(found, Optimizer):
        raise FederationError(f"{name} must return one optimizer, not {type(found).__name__}.")
    if isinstance(schedulers, list | tuple):
        if len(schedulers) > 1:
            raise FederationError(f"{name} returns {len(schedulers)} schedulers: chain them in one.")
        schedulers = schedulers[0] if schedulers else None
    every = 1
    if isinstance(schedulers, dict):
        if schedulers.get("interval", "epoch") != "epoch":
            raise FederationError(
                f"{name} steps its scheduler by {schedulers['interval']}, but clients differ in their steps: let it "
                "step by epoch."
            )
        every, schedulers = schedulers.get("frequency", 1), schedulers.get("scheduler")
    return found, schedulers, every


def _check(module: LightningModule) -> None:
    """Reject modules whose training cannot be federated."""
    name = type(module).__name__
    if isinstance(module, FederatedModule):
        raise FederationError(f"{name} is a federated method already: fit it as it is.")
    if not isinstance(module, LightningModule):
        raise FederationError(f"federate takes a LightningModule; pass a plain net to a method: FedAvg({name}(...)).")
    if not module.automatic_optimization:
        raise FederationError(f"{name} optimizes manually, which cannot be split into clients' steps: return a loss.")
    if type(module).training_step is LightningModule.training_step:
        raise FederationError(f"{name} has no training_step.")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise FederationError(f"{name}.training_step takes dataloader_iter, but clients get batches: take a batch.")
    own = [hook for hook in (*IN_STEPS, *OF_THE_RUN) if getattr(type(module), hook) is not _original(hook)]
    if own:
        caller, place = ("local training", "training_step") if own[0] in IN_STEPS else ("a federated run", "a callback")
        raise FederationError(f"{name} overrides {own[0]}, which {caller} does not call: move its code into {place}.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise FederationError(f"{name} has no trainable parameters.")


def _original(hook: str) -> Any:
    return getattr(LightningModule, hook)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Discard metrics that a client logs in a step."""
