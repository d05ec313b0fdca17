"""The score by which clients are compared."""

from __future__ import annotations

from dataclasses import dataclass

#: Names of metrics in prose.
SPELT = {"acc": "accuracy", "rmse": "RMSE", "mse": "MSE", "mae": "MAE", "r2": "R²", "f1": "F1", "auroc": "AUROC"}


@dataclass(frozen=True)
class Measure:
    """A score of every client: its name, its direction, and its format.

    Args:
        name: name under which it is logged.
        higher_is_better: whether higher values are better.
        share: whether it lies between 0 and 1 and is printed in percent.

    Example:
        >>> Measure().title, Measure("rmse", False, False).title, Measure("rmse", False, False).scale
        ('accuracy', 'RMSE', 1.0)
    """

    name: str = "acc"
    higher_is_better: bool = True
    share: bool = True

    @property
    def title(self) -> str:
        """The name in prose."""
        return SPELT.get(self.name, self.name)

    @property
    def scale(self) -> float:
        """Factor for printing."""
        return 100.0 if self.share else 1.0

    @property
    def sign(self) -> int:
        """1 if higher is better, else -1."""
        return 1 if self.higher_is_better else -1

    @property
    def unit(self) -> str:
        """The unit in a heading, with a leading blank."""
        return " %" if self.share else ""

    @property
    def label(self) -> str:
        """The name with the unit, for the axis of a plot."""
        return f"{self.title} (%)" if self.share else self.title


ACCURACY = Measure()
