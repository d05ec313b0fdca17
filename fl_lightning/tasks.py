"""Tasks: loss, metrics, headline metric, predictions, and a check of the targets."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, R2Score
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassJaccardIndex,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelF1Score,
)
from torchmetrics.text import Perplexity

from fl_lightning.arguments import NamedArguments, parameters
from fl_lightning.errors import FederationError
from fl_lightning.measure import Measure


class Task(NamedArguments, ABC):
    """Objective and metrics of a net. A subclass keeps its constructor arguments under their names.

    Everything is a pure function of tensors, so that clients can be stacked.

    Example:
        >>> class Counts(Task):
        ...     headline, higher_is_better = "deviance", False
        ...     def loss(self, output, target):
        ...         return F.poisson_nll_loss(output.squeeze(1), target)
        ...     def metrics(self, outputs):
        ...         from torchmetrics.regression import TweedieDevianceScore
        ...         return {"deviance": TweedieDevianceScore(power=1)}
        ...     def scores(self, output):
        ...         return output.squeeze(1).exp()
        >>> Counts().higher_is_better
        False
    """

    #: Name of the main metric.
    headline: str
    #: Whether targets are classes, one integer per sample, as attacks and partitions by class need.
    of_classes = False

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch, 0-dim."""

    @abstractmethod
    def metrics(self, outputs: int) -> dict[str, Metric]:
        """Return torchmetrics metrics by name.

        Args:
            outputs: number of outputs of the net: classes, labels or tokens.
        """

    def scores(self, output: Tensor) -> Tensor:
        """Convert the net's output into the input of metrics. Default: unchanged."""
        return output

    def predict(self, output: Tensor) -> Tensor:
        """Convert the net's output into predictions. Default: the input of metrics."""
        return self.scores(output)

    def probabilities(self, output: Tensor) -> Tensor | None:
        """Return class or label probabilities, shape (n, classes), for tables of predictions; None if undefined."""
        return None

    def channels(self, output: Tensor) -> int:
        """Return the size of the class dimension of a batch's output."""
        return output.shape[1] if output.dim() > 1 else 1

    def outputs(self, targets: Tensor) -> int:
        """Return the number of outputs that a net needs for such targets. Default: one per number of a sample."""
        return targets.shape[1] if targets.dim() > 1 else 1

    def check(self, output: Tensor, target: Tensor) -> None:
        """Reject targets that the task cannot have, and outputs that do not fit them.

        Args:
            output: the net's output for a few samples, shape (n, ...).
            target: targets, at least of these samples, shape (n, ...).
        """

    def known_metrics(self, outputs: int) -> Mapping[str, Metric]:
        """Return the metrics, built once; they are never updated, only copied."""
        known: dict[int, Mapping[str, Metric]] = self.__dict__.setdefault("_known", {})
        if outputs not in known:
            known[outputs] = self.metrics(outputs)
        return known[outputs]

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the headline metric is better."""
        metric = self.known_metrics(2)[self.headline]
        if metric.higher_is_better is None:
            raise FederationError(
                f"The metric {self.headline} does not say whether higher is better: set higher_is_better in "
                f"{type(self).__name__}."
            )
        return bool(metric.higher_is_better)

    @property
    def measure(self) -> Measure:
        """The headline metric, for printing and for fairness metrics."""
        metric = self.known_metrics(2)[self.headline]
        share = (metric.plot_lower_bound, metric.plot_upper_bound) == (0.0, 1.0)
        return Measure(self.headline, self.higher_is_better, share)

    @property
    def spec(self) -> dict[str, Any]:
        """Class path and arguments as plain values, from which :func:`made` rebuilds the task."""
        kind = type(self)
        arguments = {name: getattr(self, name) for name in parameters(kind)}
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}

    def _refuse(self, needs: str, target: Tensor) -> None:
        raise FederationError(
            f"{type(self).__name__} needs {needs}, not {target.dtype} of shape (n{_tail(target)}): change the targets "
            "or choose another task."
        )

    def _refuse_output(self, wanted: str, output: Tensor) -> None:
        raise FederationError(
            f"{type(self).__name__} needs a net with outputs of shape {wanted}, not (n{_tail(output)})."
        )


#: Metrics of classification by the names of the option ``headline``.
CLASS_METRICS: dict[str, Any] = {
    "acc": lambda n: MulticlassAccuracy(n, average="micro"),
    "balanced_acc": lambda n: MulticlassAccuracy(n),
    "f1": lambda n: MulticlassF1Score(n),
    "auroc": lambda n: MulticlassAUROC(n),
}


class Classification(Task):
    """One of several classes per sample: cross entropy.

    Args:
        headline: the main metric: ``acc``, ``balanced_acc``, ``f1`` or ``auroc``; accuracy is always logged.
    """

    of_classes = True

    def __init__(self, headline: Literal["acc", "balanced_acc", "f1", "auroc"] = "acc") -> None:
        self.headline: str = headline

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        if target.dim() != 1 or target.is_floating_point():
            return F.cross_entropy(output, target)
        # Equivalent without ignore_index, and saves a dozen operations per captured step.
        return -F.log_softmax(output, dim=1).gather(1, target[:, None]).mean()

    def metrics(self, outputs: int) -> dict[str, Metric]:
        """Return accuracy and the headline metric."""
        return {name: CLASS_METRICS[name](outputs) for name in dict.fromkeys(("acc", self.headline))}

    def scores(self, output: Tensor) -> Tensor:
        """Return the scores, as probabilities for a metric that compares samples."""
        return output.softmax(1) if self.headline == "auroc" else output

    def predict(self, output: Tensor) -> Tensor:
        """Return the class with the highest score."""
        return output.argmax(1)

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the softmax in double precision."""
        return output.double().softmax(1)

    def outputs(self, targets: Tensor) -> int:
        """Return the number of classes."""
        return int(targets.max()) + 1

    def check(self, output: Tensor, target: Tensor) -> None:
        """Reject targets that are not classes."""
        if target.dim() != 1 or target.is_floating_point():
            self._refuse("one integer per sample, its class", target)
        if output.dim() != 2:
            self._refuse_output("(n, classes)", output)


class MultiLabel(Task):
    """Any number of labels per sample, each 0 or 1, shape (n, labels): binary cross entropy.

    Args:
        headline: the main metric: ``f1``, ``acc`` or ``auroc``, each the mean over labels.
    """

    _METRICS: Mapping[str, Any] = {"f1": MultilabelF1Score, "acc": MultilabelAccuracy, "auroc": MultilabelAUROC}

    def __init__(self, headline: Literal["f1", "acc", "auroc"] = "f1") -> None:
        self.headline: str = headline

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over samples and labels."""
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def metrics(self, outputs: int) -> dict[str, Metric]:
        """Return F1, accuracy and the headline metric."""
        return {name: self._METRICS[name](outputs) for name in dict.fromkeys(("f1", "acc", self.headline))}

    def scores(self, output: Tensor) -> Tensor:
        """Return the probabilities of the labels."""
        return output.sigmoid()

    def predict(self, output: Tensor) -> Tensor:
        """Return the labels with a probability above one half."""
        return (output > 0).long()

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probability of every label in double precision."""
        return output.double().sigmoid()

    def check(self, output: Tensor, target: Tensor) -> None:
        """Reject targets that are not 0 or 1."""
        if target.dim() != 2 or not bool(((target == 0) | (target == 1)).all()):
            self._refuse("targets of 0 and 1 of shape (n, labels)", target)
        if output.shape[1:] != target.shape[1:]:
            self._refuse_output(f"(n, {target.shape[1]})", output)


class Regression(Task):
    """One or several real numbers per sample.

    Args:
        criterion: the loss: ``mse``, ``mae`` or ``huber``.
        headline: the main metric: ``rmse``, ``mae`` or ``r2``.
    """

    _LOSSES: Mapping[str, Any] = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}

    def __init__(
        self, criterion: Literal["mse", "mae", "huber"] = "mse", headline: Literal["rmse", "mae", "r2"] = "rmse"
    ) -> None:
        self.criterion: str = criterion
        self.headline: str = headline

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over samples and numbers."""
        loss: Tensor = self._LOSSES[self.criterion](self._alike(output, target), target.to(output.dtype))
        return loss

    def metrics(self, outputs: int) -> dict[str, Metric]:
        """Return root mean square error, mean absolute error and R2."""
        return {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError(), "r2": R2Score()}

    def scores(self, output: Tensor) -> Tensor:
        """Return the output, without a trailing dimension of size 1."""
        return output.squeeze(1) if output.dim() == 2 and output.shape[1] == 1 else output

    def check(self, output: Tensor, target: Tensor) -> None:
        """Reject targets that are not finite."""
        if not bool(torch.isfinite(target).all()):
            raise FederationError("Regression needs targets that are finite: leave samples without a target out.")
        if target.shape[1:] == (1,):
            raise FederationError(
                "Regression of one number needs targets of shape (n), not (n, 1): pass y[:, 0] for y."
            )
        if self.scores(output).shape[1:] != target.shape[1:]:
            self._refuse_output(f"(n{_tail(target) or ', 1'})", output)

    def _alike(self, output: Tensor, target: Tensor) -> Tensor:
        return output.reshape(target.shape)


class Segmentation(Task):
    """One of several classes per pixel, targets of shape (n, height, width): cross entropy.

    Args:
        ignore: a class to ignore, such as 255; None ignores none.
        headline: the main metric: ``iou``, the mean over classes of intersection over union, or ``acc``.
    """

    def __init__(self, ignore: int | None = None, headline: Literal["iou", "acc"] = "iou") -> None:
        self.ignore = ignore
        self.headline: str = headline

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over pixels that are not ignored."""
        return F.cross_entropy(output, target, ignore_index=-100 if self.ignore is None else self.ignore)

    def metrics(self, outputs: int) -> dict[str, Metric]:
        """Return intersection over union and pixel accuracy."""
        return {
            "iou": MulticlassJaccardIndex(outputs, ignore_index=self.ignore),
            "acc": MulticlassAccuracy(outputs, average="micro", ignore_index=self.ignore),
        }

    def predict(self, output: Tensor) -> Tensor:
        """Return the class of every pixel."""
        return output.argmax(1)

    def outputs(self, targets: Tensor) -> int:
        """Return the number of classes that are not ignored."""
        return _count_classes(targets, self.ignore)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Reject targets that are not masks."""
        if target.dim() < 2 or target.is_floating_point():
            self._refuse("integers of shape (n, height, width), the class of every pixel", target)
        counted = target if self.ignore is None else target[target != self.ignore]
        if output.dim() != target.dim() + 1 or output.shape[2:] != target.shape[1:]:
            self._refuse_output(f"(n, classes{_tail(target)})", output)
        _check_range(counted, output.shape[1], "class")


class NextToken(Task):
    """The next token at every position, targets of shape (n, length): cross entropy.

    Args:
        ignore: a token to ignore, such as padding; None ignores none.
        headline: the main metric: ``perplexity`` or ``acc``.
    """

    def __init__(self, ignore: int | None = None, headline: Literal["perplexity", "acc"] = "perplexity") -> None:
        self.ignore = ignore
        self.headline: str = headline

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over tokens that are not ignored."""
        ignored = -100 if self.ignore is None else self.ignore
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=ignored)

    def metrics(self, outputs: int) -> dict[str, Metric]:
        """Return perplexity and accuracy; both take scores with the tokens in the last dimension."""
        return {"perplexity": Perplexity(ignore_index=self.ignore), "acc": _TokenAccuracy(outputs, self.ignore)}

    def predict(self, output: Tensor) -> Tensor:
        """Return the most probable tokens."""
        return output.argmax(-1)

    def outputs(self, targets: Tensor) -> int:
        """Return the number of tokens that are not ignored."""
        return _count_classes(targets, self.ignore)

    def channels(self, output: Tensor) -> int:
        """Return the number of tokens."""
        return output.shape[-1]

    def check(self, output: Tensor, target: Tensor) -> None:
        """Reject targets that are not tokens."""
        if target.dim() != 2 or target.is_floating_point():
            self._refuse("integers of shape (n, length), the token at every position", target)
        if output.dim() != 3 or output.shape[1] != target.shape[1]:
            self._refuse_output(f"(n, {target.shape[1]}, tokens)", output)
        _check_range(target if self.ignore is None else target[target != self.ignore], output.shape[2], "token")


class _TokenAccuracy(MulticlassAccuracy):
    """Accuracy of scores with the classes in the last dimension."""

    def __init__(self, tokens: int, ignore: int | None) -> None:
        super().__init__(tokens, average="micro", ignore_index=ignore)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        super().update(preds.movedim(-1, 1), target)


TASKS: dict[str, type[Task]] = {
    kind.__name__: kind for kind in (Classification, MultiLabel, Regression, Segmentation, NextToken)
}


def made(task: Task | Mapping[str, Any] | str | None) -> Task:
    """Build the task that an option describes: a task, its class path and arguments, or the name of its class.

    Example:
        >>> made("Regression").headline, made(None).headline
        ('rmse', 'acc')
    """
    if task is None:
        return Classification()
    if isinstance(task, str):
        task = {"class_path": task}
    if isinstance(task, Mapping):
        kind = _kind(task.get("class_path"))
        try:
            return kind(**(task.get("init_args") or {}))
        except TypeError as error:
            raise FederationError(f"The task {kind.__name__} cannot be built: {error}.") from error
    if not isinstance(task, Task):
        raise FederationError(
            f"task must be one of {', '.join(TASKS)}, or an object of a class that derives from "
            f"fl_lightning.tasks.Task, not {task!r}."
        )
    return task


def _kind(path: Any) -> type[Task]:
    kind: Any = TASKS.get(path)
    if kind is None:
        try:
            kind = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError, TypeError):
            kind = None
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise FederationError(f"There is no task {path!r}: choose {', '.join(TASKS)}, or give its class path.")
    return kind


def _count_classes(targets: Tensor, ignore: int | None) -> int:
    """Return one more than the highest class that is not ignored."""
    counted = targets if ignore is None else targets[targets != ignore]
    return int(counted.max()) + 1 if len(counted) else 1


def _tail(tensor: Tensor) -> str:
    return "".join(f", {size}" for size in tensor.shape[1:])


def _check_range(target: Tensor, outputs: int, what: str) -> None:
    if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < outputs:
        raise FederationError(
            f"Targets name {what} {int(target.min())} to {int(target.max())}, but the net has outputs for 0 to "
            f"{outputs - 1}."
        )
