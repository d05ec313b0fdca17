"""The supernode: a site's end of Flower, as a child of the site's process."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from pathlib import Path

from fl_lightning.errors import FederationError
from fl_lightning.flower.children import Child, environment
from fl_lightning.flower.keys import fingerprint, load_node_key, private_folder
from fl_lightning.flower.launch import AT_SITE, command
from fl_lightning.flower.leave import EARLIER
from fl_lightning.flower.needed import needed

log = logging.getLogger(__name__)

#: Seconds before the next attempt: while the server may still count an earlier connection, and if an operator must act.
REJOIN, REFUSED = 4.0, 20.0
#: Seconds after which a server drops an earlier connection.
FORGOTTEN = 90.0


class Supernode:
    """A site's end of Flower as a child process, restarted whenever it ends.

    Args:
        home: Folder for its files.
        superlink: Address of the server, ``host:port``.
        socket: Socket on which the site's worker listens.
        key: Private key of the site; None for an insecure server.
        authority: Certificate of the authority that signed the server's; None for an insecure server.
    """

    def __init__(
        self, home: Path, superlink: str, socket: Path, key: Path | None = None, authority: Path | None = None
    ) -> None:
        needed()
        if not re.fullmatch(r".+:\d+", superlink):
            raise FederationError(f"The server's address must be host:port, not {superlink!r}.")
        if (key is None) != (authority is None):
            raise FederationError("A site needs both its private key and the authority's certificate, or neither.")
        if authority is not None and not authority.exists():
            raise FederationError(f"There is no certificate at {authority}: the server's operator has it.")
        if key is not None:
            load_node_key(key)
        self.home, self.superlink, self.socket, self.key, self.authority = home, superlink, socket, key, authority
        private_folder(home)
        self.connected = threading.Event()
        self._said, self._refused = "", 0.0
        output = home / "supernode.log"
        env = {**environment(home), AT_SITE: "1"}
        self.child = Child("supernode", self._command, env, output, self._hear, self._judge)
        self._left = home / "node"  # ID of the node that the server counts; removed after leaving

    def start(self) -> None:
        """Start it; it connects as soon as the server is reachable."""
        self.child.start()

    def stop(self) -> None:
        """Stop it and its children; the server sees it leave."""
        self.child.stop()
        self._left.unlink(missing_ok=True)
        self.connected.clear()

    def _command(self) -> list[str]:
        """Return its command line, with a free port for its own processes."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.child.env[EARLIER] = self._left.read_text() if self._left.exists() else ""
        safe = ["--insecure"] if self.key is None or self.authority is None else [
            "--root-certificates", str(self.authority.resolve()),
            "--auth-supernode-private-key", str(self.key.resolve()),
        ]  # fmt: skip
        return command(
            "flower-supernode", *safe, "--superlink", self.superlink, "--host", "127.0.0.1", "--port", str(port),
            "--node-config", f"socket={json.dumps(str(self.socket))}",
        )  # fmt: skip

    def _hear(self, line: str) -> None:
        """Notice that it connected, or that the server is unreachable."""
        if node := re.search(r"SuperNode ID: (\d+)", line):
            self._left.write_text(node[1])
        if node or "Connection successful" in line:
            self.connected.set()
            self._refused = 0.0
            self._say("")
        elif "Connection attempt failed" in line and not self._reachable():  # also logged by its own processes
            self.connected.clear()
            self._say(f"No server answers at {self.superlink}: trying again until one does.")

    def _reachable(self) -> bool:
        """Return whether a process listens at the server's address."""
        host, port = self.superlink.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
        except OSError:
            return False
        return True

    def _judge(self, last: str) -> float | None:
        """Log why it ended, once, and return the seconds before the next attempt."""
        self.connected.clear()
        if "Failed to activate SuperNode" in last:  # the key is not registered, or an earlier connection is counted
            now = time.monotonic()
            self._refused = self._refused or now
            public = "" if self.key is None else f" {self.key.with_suffix('.pub')} ({fingerprint(self.key)})"
            self._say(
                f"The server at {self.superlink} refuses this site: it still counts an earlier connection, which it "
                f"forgets after a minute, or its operator has not registered the key{public}; trying again."
            )
            return REJOIN if now - self._refused < FORGOTTEN else REFUSED
        if re.search("certificate|SSL|TLS handshake", last):
            self._say(
                f"The certificate of the server at {self.superlink} is not for that address or not signed by "
                f"{self.authority}: ask its operator for the authority's certificate; trying again."
            )
            return REFUSED
        self._say(f"The supernode ended and is restarted; its output is in {self.child.output}.")
        return None

    def _say(self, sentence: str) -> None:
        """Log a message unless it was the last one logged."""
        if sentence and sentence != self._said:
            log.warning(sentence)
        self._said = sentence
