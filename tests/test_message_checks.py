"""Validation of messages, including hostile ones."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning.message_checks import check_message, layout_of

GOOD = {"w": torch.ones(3, 2), "b": torch.zeros(3), "n": torch.tensor(4)}
WANTED = layout_of(GOOD)


class Sly(Tensor):
    """Says that it is finite."""

    def isfinite(self) -> Any:
        return torch.tensor(True)


class Loud(dict):  # type: ignore[type-arg]
    def keys(self) -> Any:
        raise SystemExit


class Counted(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_valid_messages() -> None:
    assert check_message(WANTED, GOOD, 7, 7) is None
    assert check_message(WANTED, dict(reversed(GOOD.items())), 7, 7) is None
    assert check_message(WANTED, {**GOOD, "w": GOOD["w"].t().contiguous().t()}, 7, 7) is None
    assert check_message(WANTED, {**GOOD, "w": torch.nn.Parameter(GOOD["w"]).detach()}, 7, 7) is None
    assert check_message({}, {}, 1, 1) is None


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (None, "is of type NoneType, not a dict"),
        ([GOOD], "is of type list"),
        (Loud(GOOD), "is of type Loud"),
        ({1: torch.ones(3), **GOOD}, "name of type int"),
        ({}, "it lacks b, n, w"),
        ({"b": GOOD["b"], "n": GOOD["n"]}, "it lacks w"),
        ({**GOOD, "x": torch.ones(1)}, "it has x, which was not requested"),
        ({**GOOD, "\x1b[2J\n" * 100: torch.ones(1)}, r"it has \?\[2J\?.{50,60}\.\.\., which was not"),
        ({**GOOD, **{f"x{i}": 0 for i in range(9)}}, "x0, x1, x2, x3, x4 and 4 more"),
        ({**GOOD, "w": [[1.0, 1.0]] * 3}, "entry w is of type list"),
        ({**GOOD, "w": np.ones((3, 2), np.float32)}, "is of type ndarray"),
        ({**GOOD, "w": torch.full((3, 2), math.nan).as_subclass(Sly)}, "is of type Sly"),
        ({**GOOD, "w": torch.ones(3, 2).to_sparse()}, "not a dense tensor"),
        ({**GOOD, "w": torch.ones(3, 2, device="meta")}, "not a dense tensor"),
        ({**GOOD, "w": torch.ones(3, 2).double()}, "is float64, not float32"),
        ({**GOOD, "w": torch.ones(3, 2).int()}, "is int32, not float32"),
        ({**GOOD, "w": torch.ones(3, 2).cfloat()}, "is complex64, not float32"),
        ({**GOOD, "n": torch.tensor(4.0)}, "is float32, not int64"),
        ({**GOOD, "w": torch.ones(2, 3)}, r"has shape \(2, 3\), not \(3, 2\)"),
        ({**GOOD, "w": torch.ones(())}, r"has shape \(\), not \(3, 2\)"),
        ({**GOOD, "w": torch.ones(1, 1).expand(10**6, 10**6)}, "has shape"),
        ({**GOOD, "w": torch.full((3, 2), math.nan)}, "entry w is not finite"),
        ({**GOOD, "b": torch.tensor([0.0, -math.inf, 0.0])}, "entry b is not finite"),
    ],
)
def test_invalid_messages(message: Any, says: str) -> None:
    found = check_message(WANTED, message, 7, 7)
    assert found is not None
    assert re.search(says, found), found
    assert len(found) < 500
    assert found.isprintable()


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (0, "it reports 0 samples but joined with 7"),
        (-7, "it reports -7 samples"),
        (7.0, r"is 7\.0, not a whole"),
        (math.nan, "is nan, not a whole"),
        (True, "is no number"),
        ("7", "is no number"),
        (None, "is no number"),
        (torch.tensor(7), "is no number"),
        (Counted(9), "is no number"),
        (8, "it reports 8 samples but joined with 7"),
        (10**9, "it reports 1000000000 samples but joined with 7"),
        (10**9000, "it reports far too many samples"),
        (-(10**9000), "it reports far too many samples"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_samples(samples: Any, says: str) -> None:
    found = check_message(WANTED, GOOD, samples, 7)
    assert found is not None
    assert re.search(says, found), found
