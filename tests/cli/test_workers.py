"""Calls in processes of their own: what fails, what dies, what is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.cli.workers import Workers

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to see processes in")


def goes_on(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()  # what has ended stays, if nobody asks about it
    except OSError:
        return False


def ends(process: int) -> bool:
    end = time.monotonic() + 60
    while goes_on(process) and time.monotonic() < end:
        time.sleep(0.1)
    return not goes_on(process)


def test_calls_that_fail_or_die_take_no_other_with_them() -> None:
    calls: deque[Any] = deque([(int, "1"), (int, "x"), (os._exit, 1), (int, "2"), (int, "3")])
    found, most = {}, 0
    with Workers(2) as workers:
        while calls or workers.running:
            while calls and workers.free:
                workers.begin(*calls.popleft())
            most = max(most, len(workers.running))
            found |= {arguments[0]: future for arguments, future in workers.ended()}
    assert most == 2
    assert [found[text].result() for text in ("1", "2", "3")] == [1, 2, 3]
    assert isinstance(found["x"].exception(), ValueError)
    assert isinstance(found[1].exception(), BrokenProcessPool)


def test_ctrl_c_ends_what_is_running() -> None:
    with pytest.raises(KeyboardInterrupt), Workers(2) as workers:  # noqa: PT012
        workers.begin(os.getpid)
        while not (over := workers.ended()):
            pass
        ((_, future),) = over
        for _ in range(2):
            workers.begin(time.sleep, 600)
        began = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - began < 60
    assert ends(future.result())


def test_ctrl_c_of_a_terminal_does_not_reach_the_processes() -> None:
    with Workers(1) as workers:
        workers.begin(subprocess.run, [sys.executable, "-c", "import os; os.kill(os.getppid(), 2)"])
        while not (over := workers.ended()):
            pass
    assert over[0][1].exception() is None


def test_runs_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """A run that went on would write into the folder of the one that resumes it."""
    code = (
        "import multiprocessing, os, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from fl_lightning.cli.workers import end_with_parent\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    pool = ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 600)\n"
        "    time.sleep(600)\n"
    )
    script = tmp_path / "command.py"
    script.write_text(code)
    command = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    run = int(command.stdout.readline())
    assert goes_on(run)
    command.kill()
    command.wait()
    assert ends(run)
