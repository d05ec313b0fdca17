"""Starts a command of Flower: ended with the process that started it, and never running code that came by network.

Flower looks its commands up by name and starts them itself. A folder with short scripts of these names, first in PATH,
leads here. A site then runs this package's ClientApp whatever app a server sends, and a server answers other machines
for the messages of registered sites alone: whoever may reach its port may otherwise submit apps and register keys.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import ipaddress
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fl_lightning.flower.leave import EARLIER, leave
from fl_lightning.flower.nursery import raise_client_apps
from fl_lightning.process import end_with_parent

#: Commands of Flower that are started, and the function behind each of them.
COMMANDS = {
    "flower-superlink": "flwr.superlink.cli.flower_superlink:flower_superlink",
    "flower-supernode": "flwr.supernode.cli.flower_supernode:flower_supernode",
    "flower-superexec": "flwr.supercore.cli.flower_superexec:flower_superexec",
    "flwr-clientapp": "flwr.supernode.cli.flwr_clientapp:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli.flwr_serverapp:flwr_serverapp",
    "flwr": "flwr.cli.app:app",
}
#: Commands that a federation has no use for, and that would run an app.
REFUSED = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-simulation")
#: Paths of the superlink that other machines may ask for: those of the sites' messages.
OPEN = ("/v1/fleet/",)
#: Seconds that a supernode waits between questions.
PAUSE = 1.0
#: Environment variable of a site's processes.
AT_SITE = "FL_LIGHTNING_AT_SITE"
#: Linux: the number of prctl's option that names a process.
PR_SET_NAME = 15

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[_Scope], Awaitable[None]]


def command(name: str, *arguments: str) -> list[str]:
    """How one of the commands is started."""
    return [sys.executable, "-P", "-m", "fl_lightning.flower.launch", name, *arguments]


def write_scripts(folder: Path) -> None:
    """Write the scripts that lead here."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in (*COMMANDS, *REFUSED):
        run = f'exec {shlex.join(command(name))} "$@"' if name in COMMANDS else "exit 1"
        part = folder / f".{name}.{os.getpid()}"
        part.write_text(f"#!/bin/sh\n{run}\n")
        part.chmod(0o700)
        part.replace(folder / name)


class LocalOnly:
    """Refuses what other machines ask for, except for the messages of sites.

    Args:
        app: The application behind.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass a request on, or answer 403."""
        path = str(scope.get("path", ""))
        if scope["type"] == "lifespan" or (path.startswith(OPEN) and ".." not in path) or _is_local(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


def _is_local(scope: _Scope) -> bool:
    """Whether a request comes from this machine."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        loopback = ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        loopback = False
    return loopback or bool(server and client[0] == server[0])


def _guard_superlink() -> None:
    """Have the superlink refuse what other machines have no business with."""
    module = importlib.import_module("flwr.superlink.main")
    create = module.create_app

    def guarded(*args: Any, **kwargs: Any) -> Any:
        app = create(*args, **kwargs)
        app.add_middleware(LocalOnly)
        return app

    module.create_app = guarded  # type: ignore[attr-defined]


def _own_client_app() -> None:
    """Have this package's ClientApp answer every message; an app that a server sends is neither kept nor loaded."""
    from fl_lightning.flower.client_app import app

    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    for name in ("install_from_fab", "get_load_client_app_fn"):
        if not hasattr(module, name):
            raise SystemExit(
                f"This version of flwr has no {name}: install the version that fl-lightning[deploy] names."
            )
    module.install_from_fab = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    module.get_load_client_app_fn = lambda *args, **kwargs: lambda *names: app  # type: ignore[attr-defined]
    importlib.import_module("flwr.supernode.cli.flwr_clientapp")


def _fork_client_apps() -> None:
    """At a site, have ClientApps forked."""
    if os.environ.get(AT_SITE):
        importlib.import_module(COMMANDS["flower-superexec"].split(":")[0])  # once for both: it is most of the work
        _own_client_app()
        raise_client_apps(run)


def _ask_sooner() -> None:
    """Have a supernode ask for messages every second and not every third, and end what an earlier one left."""
    module = importlib.import_module("flwr.supernode.start_client_internal")
    module.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, PAUSE)))  # type: ignore[attr-defined]
    node = os.environ.get(EARLIER)
    given = dict(itertools.pairwise(sys.argv))
    if node and "--root-certificates" in given:
        files = Path(given["--root-certificates"]), Path(given["--auth-supernode-private-key"])
        with contextlib.suppress(Exception):  # it joins a minute later, then
            leave(given["--superlink"], *files, int(node))


#: Preparations by command.
BEFORE: dict[str, Callable[[], None]] = {
    "flower-superlink": _guard_superlink,
    "flower-supernode": _ask_sooner,
    "flower-superexec": _fork_client_apps,
    "flwr-clientapp": _own_client_app,
}


def main() -> None:
    """Run the command that the first argument names with the others."""
    end_with_parent()
    del sys.argv[0]
    BEFORE.get(sys.argv[0], lambda: None)()
    run(sys.argv)


def register(connection: str, sites: str) -> None:
    """Register sites one after the other in this process; print, as JSON, what Flower said of each it refused."""
    main_command = importlib.import_module("typer.main").get_command(importlib.import_module("flwr.cli.app").app)
    said = {}
    for name, public in json.loads(sites).items():
        named = ["--name", name] if name else []
        try:
            main_command.main(["supernode", "register", public, connection, *named], standalone_mode=False)
            said[name] = ""
        except Exception as error:
            said[name] = str(getattr(error, "message", error))
    print(json.dumps(said))


def run(arguments: list[str]) -> None:
    """Run a command with its arguments in this process, which takes its name."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_NAME, arguments[0].encode())
    sys.argv = arguments
    if arguments[0] == "register":
        register(*arguments[1:])
    else:
        module, function = COMMANDS[arguments[0]].split(":")
        getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main()
