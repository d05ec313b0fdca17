"""A federation on this machine: real superlink and supernodes with keys, and a worker that reverses bytes."""

import socket
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_lightning.flower.bridge import GridTransport, Worker
from fl_lightning.flower.sockets import socket_path

needs_flower = pytest.mark.skipif(find_spec("flwr") is None, reason="needs pip install 'fl-lightning[deploy]'")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(true, seconds, words="what was awaited"):
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            raise AssertionError(f"{words} did not come within {seconds} s")
        time.sleep(0.1)


def descendants(pid):
    """Return the names of a process's descendants by process ID."""
    parents, lines = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            lines[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue
        if state != "Z":
            parents[int(entry.name)] = int(parent)
    found, grown = {pid}, True
    while grown:
        grown = {child for child, parent in parents.items() if parent in found} - found
        found |= grown
    return {number: lines[number] for number in found - {pid}}


def one(pid, name):
    """Return the process ID of the descendant that runs one of Flower's commands."""
    (found,) = [number for number, line in descendants(pid).items() if line == name[:15]]
    return found


def alive(numbers):
    """Return which of some processes of Flower still run; worker processes of other tests are ignored."""
    running = set()
    for number in numbers:
        try:
            state = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
            line = Path(f"/proc/{number}/cmdline").read_bytes()
        except OSError:
            continue
        if state != "Z" and b"fl_lightning" in line and b"multiprocessing" not in line:
            running.add(number)
    return running


def listening():
    """Return the ports of this machine that a process listens on."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {int(line.split()[1].split(":")[1], 16) for line in lines if line.split()[3] == "0A"}


class Site:
    """A site: a worker in a thread, a supernode."""

    def __init__(self, home, address, key, authority, answer=lambda request: request[::-1]):
        from fl_lightning.flower.supernode import Supernode

        self.home = home
        path = socket_path(home, "worker")
        self.worker = Worker(path, answer)
        self.thread = threading.Thread(target=self.worker.serve, daemon=True)
        self.thread.start()
        self.node = Supernode(home, address, path, key, authority)
        self.node.start()

    def stop(self):
        self.node.stop()
        self.worker.stop()
        self.thread.join(5)


class Federation:
    """A superlink, one registered site, and the transport to it."""

    def __init__(self, folder, answer=lambda request: request[::-1], insecure=False):
        from fl_lightning.flower.keys import node_keys, server_keys
        from fl_lightning.flower.superlink import Superlink

        self.folder = folder
        self.keys = server_keys(folder / "server" / "keys")
        self.key = node_keys(folder / "a")
        self.link = Superlink(folder / "server", port=free_port(), keys=None if insecure else self.keys)
        self.link.start()
        if insecure:
            self.site = Site(folder / "a", self.link.address, None, None, answer)
        else:
            self.link.register(self.key.public, "hospital")
            self.site = Site(folder / "a", self.link.address, self.key.private, self.keys.authority, answer)
        path = socket_path(folder / "server", "server")
        self.transport = GridTransport(path, lambda: self.link.submit(path))

    def ask(self, payload=b"abc", seconds=120.0):
        wait_for(lambda: self.transport.present() == ["hospital"], 120, "the hospital")
        return dict(self.transport.post({"hospital": payload}, seconds))["hospital"]

    def stop(self):
        self.transport.close()
        self.site.stop()
        self.link.stop()
