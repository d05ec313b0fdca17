"""Messages between two processes of one machine over private unix domain sockets, without pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fl_lightning.errors import FederationError

#: Maximum length in bytes of the path of a unix domain socket.
LONGEST = 100


def socket_path(home: Path, name: str) -> Path:
    """Return the path of a socket under the home folder or, if that is too long, in the folder of temporary files.

    It depends on the home folder only, so processes find each other again after a restart.
    """
    home = home.resolve()
    folder = home / "sockets"
    if len(os.fsencode(folder / name)) > LONGEST:
        mark = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"fl-lightning-{os.getuid()}-{mark}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = folder.lstat()
    if held.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise FederationError(f"{folder} does not belong to this user: remove it.")
    if held.st_mode & 0o077:
        folder.chmod(0o700)
    return folder / name


class Door:
    """A listening socket.

    Args:
        path: Path of the socket.
    """

    def __init__(self, path: Path) -> None:
        if _answers(path):
            raise FederationError(f"Another process of this federation uses {path}: end it, or give another folder.")
        path.unlink(missing_ok=True)
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(path))
        path.chmod(0o600)
        self._socket.listen(16)

    def accept(self, seconds: float) -> Connection[Any, Any] | None:
        """Return the next connection, or None if there is none in time."""
        self._socket.settimeout(seconds)
        try:
            accepted, _ = self._socket.accept()
        except OSError:
            return None
        accepted.setblocking(True)
        return Connection(accepted.detach())

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self.path.unlink(missing_ok=True)


def connect(path: Path, seconds: float) -> Connection[Any, Any]:
    """Connect to a socket, waiting for it if necessary.

    Raises:
        ConnectionError: No process listens in time.
    """
    until = time.monotonic() + seconds
    while True:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            plain.connect(os.fspath(path))
            return Connection(plain.detach())
        except OSError as error:
            plain.close()
            if time.monotonic() > until:
                raise ConnectionError(f"No process listens on {path}.") from error
            time.sleep(0.1)


def send(connection: Connection[Any, Any], kind: str, payload: bytes | None = None, **header: Any) -> None:
    """Send a kind of message with a header and, if there is one, a payload."""
    connection.send_bytes(json.dumps({**header, "kind": kind, "payload": payload is not None}).encode())
    if payload is not None:
        connection.send_bytes(payload)


def receive(connection: Connection[Any, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the header and the payload of the next message.

    Raises:
        EOFError: The other side has closed the connection.
    """
    header = json.loads(connection.recv_bytes())
    return header, connection.recv_bytes() if header["payload"] else b""


def hang_up(connection: Connection[Any, Any]) -> None:
    """Shut a connection down, so that a thread reading it sees its end; closing would free its descriptor for reuse."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as plain:
        plain.shutdown(socket.SHUT_RDWR)


def _answers(path: Path) -> bool:
    """Return whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain:
        plain.settimeout(1.0)
        try:
            plain.connect(os.fspath(path))
        except OSError:
            return False
        return True
