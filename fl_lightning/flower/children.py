"""Flower's processes as children: their output is read, and they are restarted when they end."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import fl_lightning
from fl_lightning.flower.launch import write_scripts

log = logging.getLogger(__name__)

#: Time limit in seconds for a child to terminate; Flower's own limit is 5.
FAREWELL = 8.0
#: Seconds between polls of Flower's processes for work.
POLL = 0.25
#: Seconds before a child is restarted: initially, and at most.
PAUSE, LONGEST_PAUSE = 1.0, 30.0
#: Seconds between two checks of a child's own children.
LOOK = 2.0
#: The command with which Flower starts apps.
STARTER = "flower-superexec"
#: Output of its parent process when it has started.
STARTS = "Starting Flower SuperExec"
#: Parts of log lines that only report a successful request.
_ROUTINE = ('" 200', "HTTP Request: ")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: files under a home folder, no telemetry, our scripts first."""
    scripts, flower = home.resolve() / "bin", home.resolve() / "flwr"
    write_scripts(scripts)
    flower.mkdir(parents=True, exist_ok=True, mode=0o700)
    root = str(Path(fl_lightning.__file__).resolve().parent.parent)
    paths = [root, *(os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    hosts = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")), "127.0.0.1,localhost"]))
    return {
        **os.environ,
        "FLWR_HOME": str(flower),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(POLL),
        "PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": hosts,
        "no_proxy": hosts,
    }


class Child:
    """A process that is restarted whenever it ends.

    Args:
        name: Its name in the log.
        command: Returns the command line; called before every start.
        env: Its environment.
        output: File that its output is appended to.
        hear: Called with every line of its output.
        judge: Called with its last lines when it has ended: returns the seconds to wait before the next start, or None
            for a growing pause.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        env: Mapping[str, str],
        output: Path,
        hear: Callable[[str], None] = lambda line: None,
        judge: Callable[[str], float | None] = lambda last: None,
    ) -> None:
        self.name, self.command, self.env, self.output = name, command, dict(env), output
        self.hear, self.judge = hear, judge
        self.starts = 0
        self.process: subprocess.Popen[str] | None = None
        self._ended = threading.Event()
        self._had = False
        self._first = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: list[str] = []

    @property
    def pid(self) -> int | None:
        """Process ID, or None if it does not run."""
        process = self.process
        return process.pid if process is not None and process.poll() is None else None

    def last(self) -> str:
        """Return its last lines of output."""
        return "\n".join(self._last)

    def start(self) -> None:
        """Start it, and restart it whenever it ends, until ``stop``."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._keep, name=f"keeper of {self.name}", daemon=True)
        self._thread.start()
        self._first.wait(FAREWELL)

    def stop(self) -> None:
        """Terminate it and wait until it has ended."""
        self._ended.set()
        process = self.process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(FAREWELL)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._thread is not None:
            self._thread.join(FAREWELL)

    def _keep(self) -> None:
        """Start and wait, in one long-lived thread, because the system kills a child when its thread ends."""
        pause = PAUSE
        while not self._ended.is_set():
            began = time.monotonic()
            self._run()
            if self._ended.is_set():
                return
            if time.monotonic() - began > 2 * LONGEST_PAUSE:
                pause = PAUSE
            seconds = self.judge(self.last())
            if seconds is None:
                seconds, pause = pause, min(2 * pause, LONGEST_PAUSE)
            self._ended.wait(seconds)

    def _run(self) -> None:
        """Run it once."""
        self._last, self._had = [], False
        with self.output.open("a") as output:
            self.process = process = subprocess.Popen(
                self.command(), env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            self.starts += 1
            self._first.set()
            if self._ended.is_set():
                process.terminate()
            reader = threading.Thread(target=self._listen, args=(process, output), daemon=True)
            reader.start()
            self._watch(process)
            reader.join(2.0)  # its own children may hold the pipe slightly longer

    def _watch(self, process: subprocess.Popen[str]) -> None:
        """Wait until it ends; kill it if its process that starts apps has died, which it does not notice."""
        missed = 0
        while True:
            try:
                process.wait(LOOK)
                return
            except subprocess.TimeoutExpired:
                names = _children(process.pid)
            self._had = self._had or STARTER[:15] in names
            missed = 0 if names or not self._had else missed + 1
            if missed > 1 and not self._ended.is_set():
                log.warning("The process that starts apps for the %s has ended: it is restarted.", self.name)
                process.kill()

    def _listen(self, process: subprocess.Popen[str], output: object) -> None:
        """Copy its output to the file and to ``hear``."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if any(words in line for words in _ROUTINE):
                    continue
                try:
                    output.write(line)  # type: ignore[attr-defined]
                    output.flush()  # type: ignore[attr-defined]
                except ValueError:  # closed: later output comes from its children
                    return
                self._last = [*self._last[-60:], line.rstrip()]
                self._had = self._had or STARTS in line  # it may be killed before it is ever seen
                if not self._ended.is_set():
                    self.hear(line)


def _children(pid: int) -> list[str]:
    """Return the names (at most 15 letters) of a process's running children; none if the system does not list them."""
    names = []
    try:
        lists = [task.joinpath("children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
        for child in (child for few in lists for child in few):
            name, rest = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)
            if rest.split()[0] != "Z":
                names.append(name.split("(", 1)[1])
    except OSError:  # one of them ended meanwhile
        return [""]
    return names
