"""Evaluation of any torchmetrics metric for every client separately."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from fl_lightning.errors import FederationError


class ClientMetric(ABC):
    """One number per client, accumulated over an evaluation.

    Args:
        num_clients: number of clients.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Drop what was accumulated."""

    @abstractmethod
    def update(self, clients: Tensor, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Add samples: for each client its outputs, shape (n, ...), and its targets, shape (n, ...)."""

    @abstractmethod
    def compute(self) -> Tensor:
        """Return every client's value, float64, shape (clients,); NaN for clients without samples."""


class Sums(ClientMetric):
    """A metric that is a function of sums over samples, computed for all clients at once.

    Args:
        num_clients: number of clients.
        terms: computes the summands from outputs and targets of n samples, shape (n, terms), float64.
        ratio: computes the metric from the sums, shape (clients, terms).
    """

    def __init__(
        self, num_clients: int, terms: Callable[[Tensor, Tensor], Tensor], ratio: Callable[[Tensor], Tensor]
    ) -> None:
        self.terms, self.ratio = terms, ratio
        super().__init__(num_clients)

    def reset(self) -> None:
        """Drop what was accumulated."""
        self.sums: Tensor | None = None
        self.seen = torch.zeros(self.num_clients, dtype=torch.bool)

    def update(self, clients: Tensor, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Add samples; see :meth:`ClientMetric.update`."""
        found = self.terms(torch.cat(list(outputs)), torch.cat(list(targets)))
        sizes = torch.tensor([len(target) for target in targets], device=found.device)
        if self.sums is None:
            self.sums = found.new_zeros(self.num_clients, found.shape[1])
        self.sums.index_add_(0, clients.to(found.device).repeat_interleave(sizes), found)
        self.seen[clients.cpu()] = True

    def compute(self) -> Tensor:
        """Return every client's metric."""
        if self.sums is None:
            return torch.full((self.num_clients,), torch.nan, dtype=torch.float64)
        found = self.ratio(self.sums)
        return found.where(self.seen.to(found.device), torch.nan)


class Each(ClientMetric):
    """Any metric, with one object per client.

    Args:
        num_clients: number of clients.
        metric: the metric; copied.
        name: its name in messages.
    """

    def __init__(self, num_clients: int, metric: Metric, name: str = "") -> None:
        self.metric, self.name = metric, name or type(metric).__name__
        super().__init__(num_clients)

    def reset(self) -> None:
        """Drop what was accumulated."""
        self.own: dict[int, Metric] = {}

    def update(self, clients: Tensor, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Add samples; see :meth:`ClientMetric.update`."""
        for client, output, target in zip(clients.tolist(), outputs, targets, strict=True):
            if client not in self.own:
                self.own[client] = copy.deepcopy(self.metric).to(output.device)
                self.own[client].reset()
            self.own[client].update(output, target)

    def compute(self) -> Tensor:
        """Return every client's metric; NaN if it has too few samples."""
        found = torch.full((self.num_clients,), torch.nan, dtype=torch.float64)
        for client, metric in self.own.items():
            found[client] = self._value(metric)
        return found

    def _value(self, metric: Metric) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example that a client has no sample of some class
            try:
                value: Any = metric.compute()
            except ValueError:  # for example a correlation of one sample
                return torch.nan
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise FederationError(
                f"The metric {self.name} gives {_kind(value)} for a client, not one number: average it, or pick one."
            )
        return float(value)


class PerClient:
    """Several metrics of every client.

    Args:
        metrics: torchmetrics metrics by name.
        num_clients: number of clients.

    Example:
        >>> scores = PerClient({"mae": MeanAbsoluteError()}, num_clients=3)
        >>> scores.update([0, 2], [torch.zeros(2), torch.zeros(1)], [torch.tensor([1.0, 3.0]), torch.tensor([5.0])])
        >>> scores.compute()["mae"]
        tensor([2., nan, 5.], dtype=torch.float64)
    """

    def __init__(self, metrics: Mapping[str, Metric], num_clients: int) -> None:
        self.metrics = {name: of_metric(metric, num_clients, name) for name, metric in metrics.items()}

    def reset(self) -> None:
        """Drop what was accumulated."""
        for metric in self.metrics.values():
            metric.reset()

    def update(self, clients: Sequence[int] | Tensor, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Add samples of some clients.

        Args:
            clients: their numbers.
            outputs: the metrics' inputs for each client's samples, shape (n, ...).
            targets: each client's targets, shape (n, ...).
        """
        rows = torch.as_tensor(clients)
        for metric in self.metrics.values():
            metric.update(rows, outputs, targets)

    def compute(self) -> dict[str, Tensor]:
        """Return every metric of every client, float64, shape (clients,); NaN for clients without samples."""
        return {name: metric.compute() for name, metric in self.metrics.items()}


def of_metric(metric: Metric, num_clients: int, name: str = "") -> ClientMetric:
    """Wrap a torchmetrics metric, as sums over samples if that is known to be equivalent, else as one object each."""
    kind, flat = type(metric), getattr(metric, "num_outputs", 1) == 1
    ignored: Any = getattr(metric, "ignore_index", None)
    if kind is MulticlassAccuracy and _adds_up(metric):
        return Sums(num_clients, partial(_hits, ignored=ignored), _mean)
    if kind is Perplexity:
        return Sums(num_clients, partial(_surprise, ignored=ignored), lambda sums: _mean(sums).exp())
    if kind is MeanSquaredError and flat:
        return Sums(num_clients, partial(_errors, power=2), _mean if metric.squared else lambda s: _mean(s).sqrt())
    if kind is MeanAbsoluteError and flat:
        return Sums(num_clients, partial(_errors, power=1), _mean)
    return Each(num_clients, metric, name)


def _adds_up(metric: Metric) -> bool:
    """Return whether an accuracy is the share of correct predictions among all."""
    plain = {"average": "micro", "top_k": 1, "multidim_average": "global"}
    return all(getattr(metric, name) == value for name, value in plain.items())


def _mean(sums: Tensor) -> Tensor:
    return sums[:, 0] / sums[:, 1]


def _counted(values: Tensor, counts: Tensor) -> Tensor:
    """Return sum and number of the values of every sample, shape (n, 2), float64."""
    parts = [(values * counts).double(), counts.double()]
    return torch.stack([part.reshape(len(part), -1).sum(1) for part in parts], dim=1)


def _hits(output: Tensor, target: Tensor, ignored: int | None) -> Tensor:
    """Count correct predictions; outputs are scores with classes in the second dimension, or classes."""
    predicted = output if output.dim() == target.dim() else output.argmax(1)
    return _counted(predicted == target, _counts(target, ignored))


def _errors(output: Tensor, target: Tensor, power: int) -> Tensor:
    """Sum absolute errors raised to a power."""
    return _counted((output - target).abs() ** power, torch.ones_like(target))


def _surprise(output: Tensor, target: Tensor, ignored: int | None) -> Tensor:
    """Sum negative log probabilities of tokens; outputs are scores with tokens in the last dimension."""
    logs = F.log_softmax(output.double(), dim=-1).movedim(-1, 1)
    known = _counts(target, ignored)
    return _counted(-logs.gather(1, target.where(known, 0).unsqueeze(1)).squeeze(1), known)


def _counts(target: Tensor, ignored: int | None) -> Tensor:
    return torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored


def _kind(value: Any) -> str:
    return f"{value.numel()} numbers" if isinstance(value, Tensor) else f"a {type(value).__name__}"
