"""Alias of ``fl_lightning.schedules`` for earlier checkpoints and configurations."""

from fl_lightning.schedules import AnySchedule, Constant, Linear, Schedule, Sigmoid, describe, made

__all__ = ["AnySchedule", "Constant", "Linear", "Schedule", "Sigmoid", "describe", "made"]
