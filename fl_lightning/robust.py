"""Robust aggregation rules, for servers that cannot trust every client.

Every rule is a function of the clients' values, stacked as rows of a matrix, and independent of methods and messages;
:class:`Aggregation` applies one to messages. Rules ignore sample weights: a client could claim any number of samples
and thus outweigh all others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.arguments import NamedArguments
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, CountOrZero, Positive, Range
from fl_lightning.wire import Message, State

#: Maximum number of steps of the geometric median, and the smallest distance or norm divided by.
STEPS, SMOOTH = 100, 1e-8


def coordinate_median(values: Tensor) -> Tensor:
    """Compute the median of every column (Yin et al., 2018); robust if less than half of the rows are hostile.

    Args:
        values: one row per client, shape (K, D).

    Example:
        >>> coordinate_median(torch.tensor([[1.0], [2.0], [900.0]]))
        tensor([2.])
    """
    ordered, k = values.sort(0).values, len(values)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


def trimmed_mean(values: Tensor, trimmed: int) -> Tensor:
    """Compute the mean of every column without its largest and smallest values (Yin et al., 2018).

    Args:
        values: one row per client, shape (K, D).
        trimmed: number of values removed at each end; robust if at most as many rows are hostile.

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [900.0]]), 1)
        tensor([3.])
    """
    if not 0 <= 2 * trimmed < len(values):
        raise FederationError(
            f"A trimmed mean of {len(values)} clients cannot leave out {trimmed} at each end: trim fewer, or let more "
            "clients train in a round."
        )
    return values.sort(0).values[trimmed : len(values) - trimmed].mean(0)


def krum_scores(values: Tensor, hostile: int) -> Tensor:
    """Compute every row's sum of squared distances to its K - hostile - 2 nearest neighbours, shape (K,)."""
    near = len(values) - hostile - 2
    if hostile < 0 or near < max(1, hostile + 1):
        raise FederationError(
            f"Krum withstands {hostile} hostile clients among {2 * hostile + 3} or more, not among {len(values)}: let "
            "more clients train in a round, or set hostile to fewer."
        )
    squared = torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").pow(2)
    squared.fill_diagonal_(math.inf)
    return squared.sort(1).values[:, :near].sum(1)


def krum(values: Tensor, hostile: int, chosen: int = 1) -> Tensor:
    """Compute the mean of the rows nearest to their neighbours (Blanchard et al., 2017; multi-Krum if several).

    Args:
        values: one row per client, shape (K, D).
        hostile: maximum number of hostile rows.
        chosen: number of rows to keep.

    Example:
        >>> krum(torch.tensor([[1.0], [1.1], [1.3], [0.9], [900.0]]), hostile=1)
        tensor([1.])
    """
    if not 1 <= chosen <= len(values) - hostile:
        raise FederationError(f"multi-Krum keeps between 1 and {len(values) - hostile} clients, not {chosen}.")
    return values[krum_scores(values, hostile).argsort(stable=True)[:chosen]].mean(0)


def geometric_median(values: Tensor, steps: int = STEPS) -> Tensor:
    """Compute the point with the smallest total distance to the rows, by Weiszfeld's steps (Pillutla et al., 2022).

    Robust if less than half of the rows are hostile.

    Args:
        values: one row per client, shape (K, D).
        steps: number of steps, starting from the columns' medians.

    Example:
        >>> geometric_median(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        tensor([0.5000, 0.5000])
    """
    point = coordinate_median(values)
    for _ in range(steps):
        weight = 1 / (values - point).norm(dim=1).clamp(min=SMOOTH)
        point = (weight / weight.sum()) @ values
    return point


def norm_bounded(values: Tensor, centre: Tensor, bound: float | None = None) -> Tensor:
    """Compute the mean of norm-clipped changes (Sun et al., 2019).

    A hostile row moves it by at most bound / K.

    Args:
        values: one row per client, shape (K, D).
        centre: origin of the changes, shape (D,).
        bound: maximum norm; None takes the median of the norms.

    Example:
        >>> norm_bounded(torch.tensor([[1.0], [-1.0], [900.0]]), torch.zeros(1), bound=1.5)
        tensor([0.5000])
    """
    return centre + _bounded(values - centre, bound).mean(0)


def centred_clipping(values: Tensor, centre: Tensor, bound: float | None = None, steps: int = 3) -> Tensor:
    """Iterate the mean of norm-clipped differences from the previous mean (Karimireddy et al., 2021).

    Args:
        values: one row per client, shape (K, D).
        centre: initial centre, shape (D,).
        bound: maximum norm; None takes the median of the norms in every step.
        steps: number of iterations.

    Example:
        >>> centred_clipping(torch.tensor([[1.0], [1.0], [900.0]]), torch.zeros(1), bound=1.0, steps=1)
        tensor([1.])
    """
    for _ in range(steps):
        centre = norm_bounded(values, centre, bound)
    return centre


def fltrust(values: Tensor, centre: Tensor, trusted: Tensor) -> Tensor:
    """Average changes, rescaled to the trusted change's norm, weighted by their cosine to it (Cao et al., 2021).

    Args:
        values: one row per client, shape (K, D).
        centre: origin of the changes, shape (D,).
        trusted: the server's own result, shape (D,); returned if no change has a positive cosine to it.

    Example:
        >>> fltrust(torch.tensor([[2.0], [-900.0]]), torch.zeros(1), torch.tensor([1.0]))
        tensor([1.])
    """
    changes, own = values - centre, trusted - centre
    lengths = changes.norm(dim=1).clamp(min=SMOOTH)
    trust = (changes @ own / (lengths * own.norm().clamp(min=SMOOTH))).clamp(min=0)
    if not bool(trust.sum() > 0):
        return trusted
    mean: Tensor = (trust / trust.sum() * own.norm() / lengths) @ changes
    return centre + mean


def _bounded(changes: Tensor, bound: float | None) -> Tensor:
    norms = changes.norm(dim=1, keepdim=True)
    most = norms.median() if bound is None else bound
    share: Tensor = (most / norms.clamp(min=SMOOTH)).clamp(max=1.0)
    return changes * share


class Aggregation(NamedArguments, ABC):
    """Base class of rules applied to messages."""

    @abstractmethod
    def rule(self, values: Tensor, centre: Tensor, clients: Sequence[int]) -> Tensor:
        """Combine the clients' rows.

        Args:
            values: one row per client, float64, shape (K, D).
            centre: the server's values, 0 where it has none, shape (D,).
            clients: the client of each row.
        """

    def __call__(
        self, messages: Sequence[Message], centre: State | None = None, names: Iterable[str] | None = None
    ) -> State:
        """Aggregate entries jointly, in float64, each returned at its own precision; integer entries take the median.

        Args:
            messages: at least one; all have the same names.
            centre: the server's entries.
            names: the entries; None means all.
        """
        ordered = sorted(messages, key=lambda message: message.client)
        first = ordered[0].tensors
        names = list(first if names is None else names)
        floating = [name for name in names if first[name].is_floating_point()]
        found: State = {}
        for name in set(names) - set(floating):
            found[name] = torch.stack([m.tensors[name] for m in ordered]).median(0).values
        if not floating:
            return found
        values = torch.stack([_flat(message.tensors, floating) for message in ordered])
        own = {n: (centre or {}).get(n, torch.zeros_like(first[n])) for n in floating}
        result = self.rule(values, _flat(own, floating), [message.client for message in ordered])
        for name, part in zip(floating, torch.split(result, [first[name].numel() for name in floating]), strict=True):
            value = part.clamp(min=0) if name.endswith("running_var") else part
            found[name] = value.view(first[name].shape).to(first[name].dtype)
        return {name: found[name] for name in names}


class Median(Aggregation):
    """The median of every entry."""

    def rule(self, values: Tensor, centre: Tensor, clients: Sequence[int]) -> Tensor:
        """See :func:`coordinate_median`."""
        return coordinate_median(values)


class TrimmedMean(Aggregation):
    """The mean without the largest and smallest values.

    Args:
        share: share of the clients removed at each end, rounded up.
    """

    def __init__(self, share: Annotated[float, Range(0, 0.5, below=True)] = 0.1) -> None:
        self.share = share

    def rule(self, values: Tensor, centre: Tensor, clients: Sequence[int]) -> Tensor:
        """See :func:`trimmed_mean`."""
        return trimmed_mean(values, math.ceil(self.share * len(values) - 1e-9))


class Krum(Aggregation):
    """Krum and multi-Krum.

    Args:
        hostile: maximum number of hostile clients in a round.
        chosen: number of clients to keep; None keeps all but ``hostile``.
    """

    def __init__(self, hostile: CountOrZero = 1, chosen: Count | None = 1) -> None:
        self.hostile, self.chosen = hostile, chosen

    def rule(self, values: Tensor, centre: Tensor, clients: Sequence[int]) -> Tensor:
        """See :func:`krum`."""
        return krum(values, self.hostile, len(values) - self.hostile if self.chosen is None else self.chosen)


class GeometricMedian(Aggregation):
    """The geometric median.

    Args:
        steps: number of Weiszfeld steps.
    """

    def __init__(self, steps: Count = STEPS) -> None:
        self.steps = steps

    def rule(self, values: Tensor, centre: Tensor, clients: Sequence[int]) -> Tensor:
        """See :func:`geometric_median`."""
        return geometric_median(values, self.steps)


class NormBound(Aggregation):
    """The mean of norm-clipped changes.

    Args:
        bound: maximum norm; None takes the median of the norms.
    """

    def __init__(self, bound: Positive | None = None) -> None:
        self.bound = bound

    def rule(self, values: Tensor, centre: Tensor, clients: Sequence[int]) -> Tensor:
        """See :func:`norm_bounded`."""
        return norm_bounded(values, centre, self.bound)


class CentredClipping(NormBound):
    """Centred clipping.

    Args:
        bound: maximum norm; None takes the median of the norms.
        steps: number of iterations.
    """

    def __init__(self, bound: Positive | None = None, steps: Count = 3) -> None:
        super().__init__(bound)
        self.steps = steps

    def rule(self, values: Tensor, centre: Tensor, clients: Sequence[int]) -> Tensor:
        """See :func:`centred_clipping`."""
        return centred_clipping(values, centre, self.bound, self.steps)


class FLTrust(Aggregation):
    """FLTrust: trust by similarity to one client that the server runs itself, on clean data of its own.

    Args:
        trusted: that client's number; it must train in every round.
    """

    def __init__(self, trusted: CountOrZero) -> None:
        self.trusted = trusted

    def rule(self, values: Tensor, centre: Tensor, clients: Sequence[int]) -> Tensor:
        """See :func:`fltrust`."""
        if self.trusted not in clients or len(clients) < 2:
            raise FederationError(
                f"FLTrust needs client {self.trusted} and another one in every round: set fraction to 1."
            )
        row = list(clients).index(self.trusted)
        rest = [other for other in range(len(clients)) if other != row]
        return fltrust(values[rest], centre, values[row])


def _flat(tensors: State, names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten().double() for name in names])
