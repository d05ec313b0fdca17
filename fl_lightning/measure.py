"""The number by which clients are judged."""

from __future__ import annotations

from dataclasses import dataclass

#: Metrics in words.
SPELT = {"acc": "accuracy", "rmse": "RMSE", "mse": "MSE", "mae": "MAE", "r2": "R²", "f1": "F1", "auroc": "AUROC"}


@dataclass(frozen=True)
class Measure:
    """A score that every client has: its name, which way is better, and how it is printed.

    Args:
        name: under which it is logged.
        higher_is_better: whether more of it is better.
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
        """The name in words."""
        return SPELT.get(self.name, self.name)

    @property
    def scale(self) -> float:
        """Factor by which it is printed."""
        return 100.0 if self.share else 1.0

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is."""
        return 1 if self.higher_is_better else -1

    @property
    def unit(self) -> str:
        """Its unit in a heading, with a blank before it."""
        return " %" if self.share else ""

    @property
    def label(self) -> str:
        """The name with the unit, for the axis of a picture."""
        return f"{self.title} (%)" if self.share else self.title


ACCURACY = Measure()
