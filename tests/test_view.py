"""Progress: a line that moves on a terminal, plain lines elsewhere, nothing if asked."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from fl_lightning.callbacks import RoundProgress
from fl_lightning.methods import FedAvg
from fl_lightning.view import View
from tests.support import blobs, fit, mlp


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_plain_lines_come_every_ten_seconds_and_at_the_end() -> None:
    clock, to = Clock(), console()
    view = View("round", 10, console=to, clock=clock)
    for done in range(1, 11):
        clock.now += 4
        view.update(done, f"accuracy {done}")
    view.close()
    assert written(to).splitlines() == [
        "round 3/10  accuracy 3  0:28 left",
        "round 6/10  accuracy 6  0:16 left",
        "round 9/10  accuracy 9  0:04 left",
        "round 10/10  accuracy 10  in 0:40",
    ]


def test_the_estimate_of_a_resumed_task_ignores_earlier_work() -> None:
    clock, to = Clock(), console()
    view = View("round", 100, begin=90, console=to, clock=clock)
    clock.now = 20
    view.update(95)
    assert "0:20 left" in written(to)


def test_a_terminal_gets_one_line_that_moves() -> None:
    to = console(terminal=True)
    with View("run", 2, console=to) as view:
        view.update(1, "steps/s")
        view.print("said above")
        view.update(2, "steps/s")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written(to))
    assert "run 2/2" in text
    assert "said above" in text
    assert "━" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(terminal: bool) -> None:
    to = console(terminal)
    with View("run", 2, quiet=True, console=to) as view:
        view.update(1)
        view.print("anything")
    assert written(to) == ""


def test_without_a_total_there_is_no_estimate() -> None:
    to = console()
    view = View("round", None, console=to, every=0)
    view.update(3)
    assert written(to).strip() == "round 3"


def test_a_fit_says_round_clients_speed_accuracy_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    fit(FedAvg(mlp(), engine="stacked"), blobs(), 2, callbacks=[RoundProgress()], enable_progress_bar=True)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.fullmatch(r"round 2/2  clients 4/4  [\d,]+ steps/s  test accuracy \d+\.\d %  in \d:\d\d", last)


def test_a_quiet_fit_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    fit(FedAvg(mlp(), engine="stacked"), blobs(), 2, callbacks=[RoundProgress(quiet=True)], enable_progress_bar=True)
    assert capsys.readouterr().out == ""
