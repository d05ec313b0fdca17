"""Scores over clients, weighted equally whatever their number of samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def worst_tenth(scores: Tensor, higher_is_better: bool = True) -> Tensor:
    """Return the mean of the worst tenth of the scores, at least one.

    Args:
        scores: one score per client, shape (clients,).
        higher_is_better: whether the lowest scores are the worst.

    Example:
        >>> worst_tenth(torch.arange(1.0, 21.0))
        tensor(1.5000)
    """
    return scores.sort(descending=not higher_is_better).values[: math.ceil(len(scores) / 10)].mean()


def client_summary(scores: Tensor, higher_is_better: bool = True) -> dict[str, Tensor]:
    """Return mean, (population) standard deviation and worst tenth of per-client scores.

    Args:
        scores: one score per client, shape (clients,); NaN for clients without one, which are ignored.
        higher_is_better: whether the lowest scores are the worst.

    Example:
        >>> {k: round(float(v), 2) for k, v in client_summary(torch.tensor([0.5, 1.0, float("nan")])).items()}
        {'mean': 0.75, 'std': 0.25, 'worst10': 0.5}
    """
    scored = scores[~scores.isnan()]
    if not len(scored):
        nan = torch.tensor(float("nan"))
        return {"mean": nan, "std": nan, "worst10": nan}
    return {"mean": scored.mean(), "std": scored.std(correction=0), "worst10": worst_tenth(scored, higher_is_better)}


class ClientAccuracy(Metric):
    """Accuracy and mean loss of every client on its own samples.

    Args:
        num_clients: number of clients.

    Example:
        >>> metric = ClientAccuracy(3)
        >>> metric.update(torch.tensor([0, 2]), correct=torch.tensor([3, 1]), loss=torch.tensor([2.0, 4.0]),
        ...               total=torch.tensor([4, 2]))
        >>> metric.compute()["acc"]
        tensor([0.7500,    nan, 0.5000], dtype=torch.float64)
    """

    full_state_update = False
    correct: Tensor
    loss: Tensor
    total: Tensor

    def __init__(self, num_clients: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("correct", "loss", "total"):
            self.add_state(name, torch.zeros(num_clients, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, clients: Tensor, correct: Tensor, loss: Tensor, total: Tensor) -> None:
        """Add the scores of some clients.

        Args:
            clients: their numbers, shape (K,).
            correct: correctly classified samples, shape (K,).
            loss: summed loss, shape (K,).
            total: number of samples, shape (K,).
        """
        self.correct.index_add_(0, clients, correct.to(self.correct))
        self.loss.index_add_(0, clients, loss.to(self.loss))
        self.total.index_add_(0, clients, total.to(self.total))

    def compute(self) -> dict[str, Tensor]:
        """Return accuracy (``acc``) and mean loss (``loss``) per client, shape (clients,); NaN if never updated."""
        return {"acc": self.correct / self.total, "loss": self.loss / self.total}
