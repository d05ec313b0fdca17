"""A user's own LightningModule, made federated: its ``training_step`` is the clients' objective."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD, Optimizer

from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg
from fl_lightning.module import FederatedModule
from fl_lightning.nets import LossNet

#: Hooks that change what a training step does; local training calls none of them.
HOOKS = (
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


def federate(module: LightningModule, method: type[FederatedModule] = FedAvg, **options: Any) -> FederatedModule:
    """Make a federated method of a LightningModule.

    Clients minimise what its ``training_step((inputs, labels), batch_idx)`` returns, with the settings of the SGD that
    its ``configure_optimizers`` returns. They are evaluated on the scores that its ``forward(inputs)`` returns. What it
    logs in a step is not logged: a step is one of many clients', which know no Trainer, and for which
    ``self.current_epoch`` and ``self.global_step`` are always 0.

    Args:
        module: the module; it is copied and stays as it is.
        method: any method of ``fl_lightning.methods``, or one of your own.
        options: the method's options (``epochs``, ``batch_size``, ``mu``, ...). ``lr``, ``momentum`` and
            ``weight_decay`` are taken from the module's optimizer unless ``lr`` is given.

    Returns:
        The method, for ``Trainer(max_epochs=rounds).fit(method, datamodule)``. Its net is the copied module:
        ``method.net.module``.

    Raises:
        FederationError: if the module does something in training that clients cannot do.
    """
    _check(module)
    local = {} if "lr" in options else sgd_settings(module)
    return method(LightningNet(module), **{**local, **options})  # type: ignore[arg-type]


class LightningNet(LossNet):
    """A LightningModule as a net with its own loss.

    Args:
        module: the module; copied.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        # Not attached to a Trainer, and called for many clients at once: there is nowhere to log to.
        self.module.log = self.module.log_dict = _nothing  # type: ignore[method-assign]
        self._numbered = len(inspect.signature(module.training_step).parameters) > 1

    def forward(self, batch: Tensor | tuple[Tensor, Tensor]) -> Any:
        """The loss of a pair of inputs and labels, or the scores of inputs alone."""
        if not isinstance(batch, tuple):
            return self.module(batch)
        result = self.module.training_step(batch, 0) if self._numbered else self.module.training_step(batch)
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise FederationError(
                f"{type(self.module).__name__}.training_step must return the loss, a tensor of one number, or a dict "
                f"that has it under 'loss', not {type(loss).__name__}."
            )
        return loss


def sgd_settings(module: LightningModule) -> dict[str, float]:
    """Learning rate, momentum and weight decay of the SGD that a module configures."""
    name = f"{type(module).__name__}.configure_optimizers"
    try:
        found: Any = module.configure_optimizers()
    except RuntimeError as error:
        raise FederationError(
            f"{name} cannot be called without a Trainer ({error}): pass lr=... to federate instead."
        ) from error
    optimizer = _only(found, name)
    if type(optimizer) is not SGD:
        raise FederationError(
            f"{name} returns {type(optimizer).__name__}, but clients train with SGD: return torch.optim.SGD, or pass "
            "lr=... to federate."
        )
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    settings = groups[0]
    if any(group != settings for group in groups):
        raise FederationError(f"{name} gives its parameters different settings, but clients have one learning rate.")
    for option in ("nesterov", "dampening", "maximize"):
        if settings.get(option):
            raise FederationError(
                f"{name} sets {option}={settings[option]}, which local SGD does not have: leave it out."
            )
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) not in stepped for parameter in module.parameters() if parameter.requires_grad):
        raise FederationError(
            f"{name} leaves parameters out: freeze them with requires_grad_(False), or clients would train them too."
        )
    return {option: float(settings[option]) for option in ("lr", "momentum", "weight_decay")}


def _only(found: Any, name: str) -> Optimizer:
    """The one optimizer among all that Lightning lets a module return."""
    schedulers: Any = None
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        found, schedulers = found
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, dict):
        schedulers, found = found.get("lr_scheduler"), found.get("optimizer")
    if schedulers:
        raise FederationError(
            f"{name} returns a learning rate scheduler, but a client's optimizer is new in every round: leave it out."
        )
    if not isinstance(found, Optimizer):
        raise FederationError(f"{name} must return one optimizer, not {type(found).__name__}.")
    return found


def _check(module: LightningModule) -> None:
    """Refuse modules that train in a way that clients cannot."""
    name = type(module).__name__
    if isinstance(module, FederatedModule):
        raise FederationError(f"{name} is a federated method already: fit it as it is.")
    if not isinstance(module, LightningModule):
        raise FederationError(f"federate takes a LightningModule; a plain net goes to a method: FedAvg({name}(...)).")
    if not module.automatic_optimization:
        raise FederationError(f"{name} optimizes manually, which cannot be split into clients' steps: return a loss.")
    if type(module).training_step is LightningModule.training_step:
        raise FederationError(f"{name} has no training_step.")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise FederationError(f"{name}.training_step takes dataloader_iter, but clients get batches: take a batch.")
    own = [hook for hook in HOOKS if getattr(type(module), hook) is not getattr(LightningModule, hook)]
    if own:
        raise FederationError(
            f"{name} overrides {own[0]}, which local training does not call: put what it does into training_step."
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise FederationError(f"{name} has no trainable parameters.")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a client logs in a step goes nowhere."""
