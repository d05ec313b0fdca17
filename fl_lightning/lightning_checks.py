"""Checks of Trainer, data and net at the start of a federated run; each raises an error that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation
from fl_lightning.robust import Aggregation

#: Callbacks that tune the batches or steps of an ordinary run, which a federated run does not have.
TUNERS = (BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder)

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule


def check_trainer(trainer: Trainer) -> None:
    """Reject Trainer options that a federated run cannot support."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise FederationError(
            f"A federated run distributes clients, not the model: {type(trainer.strategy).__name__} cannot be used, "
            "set Trainer(strategy='ddp') or devices=1."
        )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise FederationError(
            "Trainer(sync_batchnorm=True) would normalise clients of different processes with each other's batches: "
            "leave it out."
        )
    check_precision(trainer.precision)
    if trainer.gradient_clip_val:
        raise FederationError(
            "Trainer(gradient_clip_val=...) would clip the server's step, not the clients' gradients: "
            "use the method's clip_norm."
        )
    if trainer.accumulate_grad_batches != 1:
        raise FederationError(
            "Trainer(accumulate_grad_batches=...) has no meaning for rounds: use a larger batch_size in the method."
        )
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        raise FederationError(
            "Trainer(overfit_batches=...) has no meaning for rounds: give the DataModule fewer clients or samples."
        )
    if trainer.limit_train_batches != 1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise FederationError(
            "Trainer(limit_train_batches=...) has no meaning for rounds: use the method's epochs or batch_size, or the "
            "DataModule's fraction or limit."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TUNERS):
            raise FederationError(
                f"{type(callback).__name__} would tune the server's single step per round, not the clients' training: "
                "leave it out and compare runs with other values of lr, batch_size or epochs."
            )
    for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        if 0 < (value := getattr(trainer, name)) < 1:
            raise FederationError(
                f"Trainer({name}={value}) would be a fraction of the groups in which clients are evaluated: select "
                "clients with the DataModule's eval_only, or set it to 0 for no evaluation."
            )


def check_run(module: FederatedModule, stage: str) -> Federation:
    """Check that data, net, task and optimizer fit together, and return the data."""
    federation = check_data(module.trainer)
    check_net(module, federation)
    check_task(module, federation)
    check_optimizer(module)
    if stage == "fit":
        check_batches(module)
        check_augment(federation)
    return federation


def check_precision(precision: Any) -> None:
    """Reject half precision, which needs gradient scaling."""
    if str(precision).startswith(("16", "transformer")):
        raise FederationError(
            f"precision={precision!r} needs a gradient scaler, which local training does not have: "
            "use 32-true, 64-true, bf16-mixed or bf16-true."
        )


def check_data(trainer: Trainer) -> Federation:
    """Return the federation of the Trainer's DataModule, or raise an error that says what is missing."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    federation = getattr(data, "federation", None)
    if isinstance(federation, Federation):
        check_monitors(trainer, federation)
    if not isinstance(federation, Federation) or not callable(getattr(data, "cohort", None)):
        given = "no DataModule" if data is None else type(data).__name__
        raise FederationError(
            f"A federated method needs a federated DataModule but was given {given}: pass one of "
            "fl_lightning.datamodules as Trainer.fit(method, datamodule)."
        )
    return federation


def check_monitors(trainer: Trainer, federation: Federation) -> None:
    """Reject a callback that monitors validation if no validation samples are held out."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if federation.val is None and isinstance(monitor, str) and monitor.startswith("val/"):
            raise FederationError(
                f"{type(callback).__name__} monitors {monitor!r}, but the data holds nothing out for validation: leave "
                "val_fraction at its default, or set it greater than 0."
            )


def check_net_argument(method: str, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Reject a method's first argument if it is not a network.

    Args:
        method: the name of the method's class.
        given: the constructor's positional arguments.
        named: the constructor's keyword arguments.
    """
    net = given[0] if given else named.get("net")
    if net is None:
        raise FederationError(
            f"{method} needs a network: {method}(MLP(in_features=..., num_classes=...)), for example."
        )
    if isinstance(net, type):
        raise FederationError(f"{method} needs a network, not its class: {method}({net.__name__}(...)).")
    if not isinstance(net, nn.Module | Mapping):
        raise FederationError(f"{method} needs a network, a torch.nn.Module, not {net!r}.")


def check_aggregation(module: FederatedModule) -> None:
    """Reject objects that are not robust rules, and rules for a method that does not use means."""
    if not isinstance(module.aggregation, Aggregation | None):
        raise FederationError(
            f"aggregation must be a rule of fl_lightning.robust, such as Median(), not {module.aggregation!r}."
        )
    if module.aggregation is not None and not module.takes_rules:
        raise FederationError(
            f"The server of {type(module).__name__} weights clients in its own way, which a robust rule would "
            "undo: leave aggregation out."
        )


def check_batches(module: FederatedModule) -> None:
    """Reject a batch size of 1 for a net with batch normalisation, which would skip every batch."""
    if module.batch_statistics and module.local.batch_size == 1:
        raise FederationError(
            f"{type(module.net).__name__} has batch normalisation, and a batch of one sample has no variance: set "
            "batch_size to 2 or more."
        )


def check_optimizer(module: FederatedModule) -> None:
    """Reject local optimizers for which a method's derivation does not hold."""
    reason = module.plain_sgd
    if reason is not None and module.local.not_plain:
        raise FederationError(
            f"{type(module).__name__} {reason}, which holds for plain SGD alone: leave {module.local.not_plain} out."
        )


def check_server_optimizer(module: FederatedModule) -> None:
    """Require exactly one server optimizer; without one the server would never learn."""
    found = module.trainer.optimizers
    if len(found) != 1 or isinstance(found[0], _MockOptimizer):  # Lightning's placeholder for none
        number = len(found) if len(found) > 1 else "none"
        raise FederationError(
            f"{type(module).__name__} needs one optimizer, which steps the server's model, but configure_optimizers "
            f"returns {number}: return one, of self.server.parameters()."
        )


def check_task(module: FederatedModule, federation: Federation) -> None:
    """Reject tasks without classes for methods that need them."""
    reason = module.needs_classes
    if reason is not None and not module.task.of_classes:
        raise FederationError(
            f"{type(module).__name__} {reason}, and {type(module.task).__name__} has no classes: choose another method "
            "or setting."
        )


def check_augment(federation: Federation) -> None:
    """Try the augmentation on two samples, so that errors show before the first round."""
    if federation.augment is None:
        return
    raw = federation.inputs[federation.train.flat[:2]]
    try:
        changed = federation.augment(raw.clone(), np.random.default_rng(0))
    except TypeError as error:
        raise FederationError(
            f"transform is called with a batch and a NumPy Generator, and failed: {error}."
        ) from error
    if getattr(changed, "shape", None) != raw.shape:
        shape = tuple(getattr(changed, "shape", ()))
        raise FederationError(
            f"transform must return a batch of the shape it was given, {tuple(raw.shape)}, not {shape}."
        )


def check_net(module: FederatedModule, federation: Federation) -> None:
    """Run the net on two samples, so that a net that does not fit the data is rejected before the first round."""
    index = federation.train.flat[:2]
    x = federation.features(federation.inputs[index], module.compute_dtype).to(module.device)
    net, data = type(module.net).__name__, f"inputs of shape {tuple(x.shape[1:])}"
    if not x.is_floating_point():  # tokens: include the largest one, since the embedding needs a row for it
        x.view(-1)[0] = federation.inputs.max()
        data += f" with numbers up to {int(federation.inputs.max())}"
    try:
        with torch.no_grad():
            output, _ = module.call(module.server_state(), x, training=False)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise FederationError(f"{net} cannot take {data}: {reason}; choose a net made for this data.") from error
    if not isinstance(output, torch.Tensor) or not output.dim() or output.shape[0] != len(index):
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise FederationError(f"{net} must return scores of shape ({len(index)}, ...) for {data}, not {shape}.")
    if not module.task.of_classes or not federation.num_classes or federation.targets.dim() != 1:
        module.task.check(output, federation.targets)
        return
    wanted = (len(index), federation.num_classes)
    if output.dim() != 2:
        raise FederationError(f"{net} must return scores of shape {wanted} for {data}, not {tuple(output.shape)}.")
    if output.shape[1] < federation.num_classes:
        if int(federation.targets.min()) == 1:
            raise FederationError(
                f"Labels run from 1 to {federation.num_classes - 1}, but classes are counted from 0: subtract 1, or "
                f"set num_classes={federation.num_classes} if class 0 only happens to be missing."
            )
        raise FederationError(
            f"{net} has {output.shape[1]} outputs but the data has {federation.num_classes} classes: "
            f"set num_classes={federation.num_classes}."
        )
