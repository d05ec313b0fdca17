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

#: Seconds before another attempt: while the server may count an earlier connection, and where a person has to act.
REJOIN, REFUSED = 4.0, 20.0
#: Seconds after which a server has forgotten an earlier connection.
FORGOTTEN = 90.0


class Supernode:
    """A site's end of Flower as a child, started again whenever it ends.

    Args:
        home: Folder for its files.
        superlink: Address of the server, ``host:port``.
        socket: Socket on which the site's worker listens.
        key: Private key of the site; None for a server that is insecure.
        authority: Certificate of the authority that signed the server's; None for a server that is insecure.
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
        self._left = home / "node"  # the node that the server counts; removed when it has left

    def start(self) -> None:
        """Start it; it connects when the server is there."""
        self.child.start()

    def stop(self) -> None:
        """End it and all that it started; the server sees it leave."""
        self.child.stop()
        self._left.unlink(missing_ok=True)
        self.connected.clear()

    def _command(self) -> list[str]:
        """Its command line, with a port for its own processes that is free now."""
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
        """Notice that it connected, or that no server is there."""
        if node := re.search(r"SuperNode ID: (\d+)", line):
            self._left.write_text(node[1])
        if node or "Connection successful" in line:
            self.connected.set()
            self._refused = 0.0
            self._say("")
        elif "Connection attempt failed" in line and not self._reachable():  # its own processes say the same
            self.connected.clear()
            self._say(f"No server answers at {self.superlink}: trying again until one does.")

    def _reachable(self) -> bool:
        """Whether something listens at the server's address."""
        host, port = self.superlink.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
        except OSError:
            return False
        return True

    def _judge(self, last: str) -> float | None:
        """Say why it ended, once, and when to try again."""
        self.connected.clear()
        if "Failed to activate SuperNode" in last:  # of a key that is not registered, and of a site that is counted
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
        self._say(f"The supernode ended and is started again; what it said is in {self.child.output}.")
        return None

    def _say(self, sentence: str) -> None:
        """Say a sentence, once until there is another."""
        if sentence and sentence != self._said:
            log.warning(sentence)
        self._said = sentence
