"""The superlink: Flower's server, as a child of the training process."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from fl_lightning.errors import FederationError
from fl_lightning.flower.children import Child, environment
from fl_lightning.flower.keys import ServerKeys, check_public, private_folder, short
from fl_lightning.flower.launch import command
from fl_lightning.flower.needed import needed

log = logging.getLogger(__name__)

#: Time limits in seconds for the start of the superlink, and for Flower's commands.
START, COMMAND = 120.0, 120.0
#: Name of the connection in Flower's configuration.
NAME = "fl-lightning"
APP = Path(__file__).parent / "app"


class Superlink:
    """Flower's server as a child process: sites connect to it, and the app is submitted to it.

    Its state is one file of the home folder, so registered sites stay registered.

    Args:
        home: Folder for its files.
        host: Address to listen on; 0.0.0.0 for all addresses of this machine.
        port: Port to listen on.
        keys: Certificate and keys; None disables encryption and the check of the sites' keys.
    """

    def __init__(self, home: Path, host: str = "127.0.0.1", port: int = 8000, keys: ServerKeys | None = None) -> None:
        needed()
        self.home, self.host, self.port, self.keys = home.resolve(), host, port, keys
        private_folder(self.home)
        self.env = environment(self.home)
        self.address = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        self.child = Child("superlink", self._command, self.env, self.home / "superlink.log", self._hear, self._judge)
        self._lock = threading.Lock()
        self._strangers: set[str] = set()

    def start(self) -> None:
        """Start it and wait until it accepts connections.

        Raises:
            FederationError: The port is in use, or the superlink ended.
        """
        self._check_port()
        self.child.start()
        until = time.monotonic() + START
        while not self.answers():
            if self.child.starts > 1 or (self.child.pid is None and self.child.last()):
                self.child.stop()
                raise FederationError(f"The superlink ended while it started: read {self.child.output}.")
            if time.monotonic() > until:
                self.child.stop()
                raise FederationError(f"The superlink does not answer after {START:.0f} s: read {self.child.output}.")
            time.sleep(0.1)
        self._configure()

    def stop(self) -> None:
        """Stop it and its children."""
        self.child.stop()

    def answers(self) -> bool:
        """Return whether it runs and accepts connections."""
        if self.child.pid is None:
            return False
        host, port = self.address.rsplit(":", 1)
        try:
            socket.create_connection((host, int(port)), 2.0).close()
        except OSError:
            return False
        return True

    def register(self, public: Path, name: str = "") -> None:
        """Admit the site with a public key; registering it twice is harmless.

        Args:
            public: File with its public key, in OpenSSH's format.
            name: Name of the site in messages.
        """
        refused = self.register_all({name: public})
        if refused:
            raise FederationError(refused[name])

    def register_all(self, sites: Mapping[str, Path]) -> dict[str, str]:
        """Admit several sites at once, which is hardly slower than one.

        Args:
            sites: Files with public keys by name of site.

        Returns:
            Error messages by name of rejected site.
        """
        refused, asked = {}, {}
        for name, public in sites.items():
            try:
                check_public(public)
                asked[name] = str(public.resolve())
            except FederationError as error:
                refused[name] = str(error)
        if not asked:
            return refused
        done = self._flwr("register", NAME, json.dumps(asked))
        try:
            words: dict[str, str] = json.loads((done.stdout or "").strip().splitlines()[-1])
        except (ValueError, IndexError):
            words = dict.fromkeys(asked, _plain(done.stdout))
        for name, said in words.items():
            if said and "already in use" not in said:
                refused[name] = f"The superlink rejected the key {sites[name]}: {said}"
        return refused

    def submit(self, run_socket: Path) -> None:
        """Make the superlink start the ServerApp, which connects to a socket of this process.

        Raises:
            FederationError: The superlink rejected it.
        """
        app = self.home / "app"
        app.mkdir(exist_ok=True)
        shutil.copyfile(APP / "pyproject.toml", app / "pyproject.toml")
        done = self._flwr("flwr", "run", str(app), NAME, "--run-config", f"socket={json.dumps(str(run_socket))}")
        if done.returncode:
            raise FederationError(f"The superlink did not start the app: {_plain(done.stdout)}")

    def _command(self) -> list[str]:
        """Return its command line."""
        safe = ["--insecure"] if self.keys is None else [
            "--ssl-ca-certfile", str(self.keys.authority.resolve()),
            "--ssl-certfile", str(self.keys.certificate.resolve()),
            "--ssl-keyfile", str(self.keys.key.resolve()),
            "--enable-supernode-auth",
        ]  # fmt: skip
        return command(
            "flower-superlink", *safe, "--host", self.host, "--port", str(self.port),
            "--database", str(self.home / "superlink.db"), "--disable-runtime-dependency-installation",
        )  # fmt: skip

    def _hear(self, line: str) -> None:
        """Warn once of each unregistered key with which a site tries to join."""
        known = re.search(r"(-----BEGIN PUBLIC KEY-----.*-----END PUBLIC KEY-----).*No SuperNode found", line)
        if known is None:
            return
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        mark = short(load_pem_public_key(known[1].replace("\\n", "\n").encode()))
        if mark not in self._strangers:
            self._strangers.add(mark)
            log.warning("A site whose key is not registered wants to join and is refused: %s.", mark)

    def _judge(self, last: str) -> float | None:
        """Warn that it ended and is restarted."""
        log.warning("The superlink ended and is restarted; its output is in %s.", self.child.output)
        return None

    def _check_port(self) -> None:
        """Raise an error if the port is in use."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise FederationError(
                    f"Port {self.port} of {self.host} cannot be used ({error.strerror}): end what uses it, or choose "
                    "another one."
                ) from error

    def _configure(self) -> None:
        """Write the configuration for Flower's commands."""
        lines = ["[superlink]", f'default = "{NAME}"', "", f"[superlink.{NAME}]", f'address = "{self.address}"']
        if self.keys is None:
            lines.append("insecure = true")
        else:
            lines.append(f"root-certificates = {json.dumps(str(self.keys.authority.resolve()))}")
        (self.home / "flwr" / "config.toml").write_text("\n".join([*lines, ""]))

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of Flower's commands, one at a time, since they write the same files."""
        with self._lock:
            try:
                return subprocess.run(
                    command(*arguments), env={**self.env, "NO_COLOR": "1", "COLUMNS": "400"},
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    timeout=COMMAND,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return subprocess.CompletedProcess(arguments, 1, f"no answer after {COMMAND:.0f} s")


def _plain(said: str | None) -> str:
    """Return a command's output as one line without colours and frames."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[─│╭╮╰╯]", " ", said or "").split())[-400:]
