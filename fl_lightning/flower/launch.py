"""Start of Flower's commands: they end with the process that started them, and never run code from the network.

Flower looks up its commands by name and starts them itself. A folder with scripts of these names, first in PATH, leads
here. A site thus runs this package's ClientApp whatever app a server sends. A server accepts from other machines only
the messages of registered sites; otherwise anyone who reaches its port could submit apps and register keys.
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

#: Supported commands of Flower, and the function behind each of them.
COMMANDS = {
    "flower-superlink": "flwr.superlink.cli.flower_superlink:flower_superlink",
    "flower-supernode": "flwr.supernode.cli.flower_supernode:flower_supernode",
    "flower-superexec": "flwr.supercore.cli.flower_superexec:flower_superexec",
    "flwr-clientapp": "flwr.supernode.cli.flwr_clientapp:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli.flwr_serverapp:flwr_serverapp",
    "flwr": "flwr.cli.app:app",
}
#: Commands that a federation does not need and that would run an app.
REFUSED = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-simulation")
#: Paths of the superlink that are open to other machines: those of the sites' messages.
OPEN = ("/v1/fleet/",)
#: Maximum number of seconds between two polls of a supernode.
PAUSE = 1.0
#: Environment variable that marks a site's processes.
AT_SITE = "FL_LIGHTNING_AT_SITE"
#: Option of Linux's prctl that names a process.
PR_SET_NAME = 15

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[_Scope], Awaitable[None]]


def command(name: str, *arguments: str) -> list[str]:
    """Return the command line of one of the commands."""
    return [sys.executable, "-P", "-m", "fl_lightning.flower.launch", name, *arguments]


def write_scripts(folder: Path) -> None:
    """Write the scripts that replace Flower's commands."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in (*COMMANDS, *REFUSED):
        run = f'exec {shlex.join(command(name))} "$@"' if name in COMMANDS else "exit 1"
        part = folder / f".{name}.{os.getpid()}"
        part.write_text(f"#!/bin/sh\n{run}\n")
        part.chmod(0o700)
        part.replace(folder / name)


class LocalOnly:
    """ASGI middleware that rejects requests of other machines, except for the messages of sites.

    Args:
        app: The wrapped application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Forward a request, or answer 403."""
        path = str(scope.get("path", ""))
        if scope["type"] == "lifespan" or (path.startswith(OPEN) and ".." not in path) or _is_local(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


def _is_local(scope: _Scope) -> bool:
    """Return whether a request comes from this machine."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        loopback = ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        loopback = False
    return loopback or bool(server and client[0] == server[0])


def _guard_superlink() -> None:
    """Add :class:`LocalOnly` to the superlink."""
    module = importlib.import_module("flwr.superlink.main")
    create = module.create_app

    def guarded(*args: Any, **kwargs: Any) -> Any:
        app = create(*args, **kwargs)
        app.add_middleware(LocalOnly)
        return app

    module.create_app = guarded  # type: ignore[attr-defined]


def _own_client_app() -> None:
    """Make this package's ClientApp answer every message; an app sent by a server is neither stored nor loaded."""
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
    """Fork ClientApps instead of starting them, at a site."""
    if os.environ.get(AT_SITE):
        importlib.import_module(COMMANDS["flower-superexec"].split(":")[0])  # slow, so import once before forking
        _own_client_app()
        raise_client_apps(run)


def _poll_faster() -> None:
    """Make a supernode poll every second instead of every third, and deregister its earlier connection."""
    module = importlib.import_module("flwr.supernode.start_client_internal")
    module.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, PAUSE)))  # type: ignore[attr-defined]
    node = os.environ.get(EARLIER)
    given = dict(itertools.pairwise(sys.argv))
    if node and "--root-certificates" in given:
        files = Path(given["--root-certificates"]), Path(given["--auth-supernode-private-key"])
        with contextlib.suppress(Exception):  # the site then joins a minute later
            leave(given["--superlink"], *files, int(node))


#: Preparations by command, run before it.
BEFORE: dict[str, Callable[[], None]] = {
    "flower-superlink": _guard_superlink,
    "flower-supernode": _poll_faster,
    "flower-superexec": _fork_client_apps,
    "flwr-clientapp": _own_client_app,
}


def main() -> None:
    """Run the command named by the first argument with the others."""
    end_with_parent()
    del sys.argv[0]
    BEFORE.get(sys.argv[0], lambda: None)()
    run(sys.argv)


def register(connection: str, sites: str) -> None:
    """Register sites one by one in this process; print, as JSON, Flower's error message for each rejected one."""
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
    """Run a command with its arguments in this process, renamed after it."""
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
