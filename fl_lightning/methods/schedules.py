"""The schedules of ``fl_lightning.schedules`` under the name that earlier checkpoints and configurations have."""

from fl_lightning.schedules import AnySchedule, Constant, Linear, Schedule, Sigmoid, describe, made

__all__ = ["AnySchedule", "Constant", "Linear", "Schedule", "Sigmoid", "describe", "made"]
