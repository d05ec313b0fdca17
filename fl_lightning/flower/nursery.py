"""Start of ClientApps by forking a process that has Flower loaded, since loading takes most of a message's time.

Flower starts a process for every message; without Kubernetes there is no alternative. To fork safely, a process without
threads does it, which the process that polls for messages starts before it has any threads.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from fl_lightning.process import end_with_parent

#: Seconds between two checks of ClientApps.
LOOK = 1.0


def raise_client_apps(run: Callable[[list[str]], None]) -> None:
    """Make the process that polls for messages fork ClientApps; call it after Flower is loaded and before any threads.

    Args:
        run: Runs a ClientApp with the arguments of its command.
    """
    if threading.active_count() > 1:
        raise SystemExit(
            "Flower starts threads while it is loaded: install the version that fl-lightning[deploy] names."
        )
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        try:
            _fork_requests(there, run)
        finally:
            os._exit(1)
    there.close()
    module = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    results = importlib.import_module("flwr.supercore.superexec.executor.types").LaunchResult
    launch = module.SubprocessExecutor.launch

    def fork(self: Any, spec: Any) -> Any:
        if str(spec.task_type) != "flwr-clientapp":
            return launch(self, spec)
        arguments = ["flwr-clientapp", "--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
        if spec.insecure:
            arguments.append("--insecure")
        elif spec.root_certificates_path is not None:
            arguments += ["--root-certificates", spec.root_certificates_path]
        arguments += ["--parent-pid", str(os.getpid())]
        try:
            here.sendall(json.dumps(arguments).encode() + b"\n")
        except OSError:
            os._exit(1)  # the supernode is restarted, and this process with it
        return results.accepted()

    module.SubprocessExecutor.launch = fork


def _fork_requests(requests: socket.socket, run: Callable[[list[str]], None]) -> None:
    """Fork a ClientApp for every line received, until the socket is closed."""
    end_with_parent()
    rest = b""
    while True:
        if select.select([requests], [], [], LOOK)[0]:
            more = requests.recv(65536)
            if not more:
                return
            *lines, rest = (rest + more).split(b"\n")
            for line in lines:
                if os.fork() == 0:
                    _run_forked(json.loads(line), run)
        _reap()


def _reap() -> None:
    """Reap ended ClientApps; if one was killed, kill the parent, so that the server notices the restart."""
    with contextlib.suppress(ChildProcessError):
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if number == 0:
                return
            if os.WIFSIGNALED(status):
                os.kill(os.getppid(), signal.SIGKILL)  # the supernode and the server notice within a minute


def _run_forked(arguments: list[str], run: Callable[[list[str]], None]) -> None:
    """Run a ClientApp in this forked process, and exit."""
    code = 1
    try:
        end_with_parent()
        random.seed()
        run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
