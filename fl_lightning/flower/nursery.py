"""Starts ClientApps by forking a process that has Flower loaded, because loading it takes most of a message's time.

Flower starts a process for every message and knows no other way on a machine without Kubernetes. Forking happens in a
process without threads, which the one that looks for messages starts before it has any.
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

#: Seconds between looks at ClientApps.
LOOK = 1.0


def raise_client_apps(run: Callable[[list[str]], None]) -> None:
    """Have the process that looks for messages fork ClientApps; called when it has loaded Flower and has no threads.

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
            _nurse(there, run)
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
            os._exit(1)  # the supernode is started again, and with it all of this
        return results.accepted()

    module.SubprocessExecutor.launch = fork


def _nurse(requests: socket.socket, run: Callable[[list[str]], None]) -> None:
    """Fork for every line that comes, until there are no more."""
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
                    _grow_up(json.loads(line), run)
        _take_leave()


def _take_leave() -> None:
    """See which ClientApps have ended; after one that was killed, have all started again, so that the server hears."""
    with contextlib.suppress(ChildProcessError):
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if number == 0:
                return
            if os.WIFSIGNALED(status):
                os.kill(os.getppid(), signal.SIGKILL)  # the supernode notices, and the server before its minute is over


def _grow_up(arguments: list[str], run: Callable[[list[str]], None]) -> None:
    """Be a ClientApp, and end."""
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
