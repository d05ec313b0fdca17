"""Runs every method and variant over a real Flower federation on this machine and compares it with its simulation.

python benchmarks/deployed.py [--only FedAvg SCAFFOLD] [--all]     the matrix: one net of each variant, or all of them
python benchmarks/deployed.py --kills 20                           kill -9 of processes picked at random, of one run
python benchmarks/deployed.py --cost 6                             seconds and CPU of messages that nothing is done for
python benchmarks/deployed.py --sites 20                           two rounds with so many sites
python benchmarks/deployed.py --wire 2000                          bytes on the sites' sockets and by the ledger, of a
                                                                   net with so many hidden units
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fl_lightning.cli import federation
from fl_lightning.papers.environment import environment
from tests.support import cases, mlp
from tests.support.deployed import Deployed
from tests.support.federations import Federation, descendants, wait_for

OUT = Path(__file__).with_suffix(".json")


def matrix(names: list[str], every: bool) -> list[dict[str, object]]:
    """One row for each case."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="fl-") as folder, Deployed(Path(folder)) as deployed:
        for case in cases.CASES:
            if case.name == "FedBPS-auto" or (names and case.name not in names):
                continue
            for net, policy in list(case.runs())[: None if every else 1]:
                began = time.perf_counter()
                server = deployed.run(case, net, policy)
                seconds = time.perf_counter() - began
                same = deployed.same(server, case, net, policy)
                rows.append({"case": case.name, "net": net, "policy": policy, **same, "seconds": round(seconds, 1)})
                print(*rows[-1].values(), flush=True)
    return rows


def chaos(kills: int, seed: int, clients: int = 3) -> dict[str, object]:
    """A run of FedPer whose processes are killed with -9, one after the other; server and sites are started again."""
    rng, said = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        home = Path(folder)
        options = ["--config", "quickstart", "--model", "FedPer", "--trainer.max_epochs", str(2 * kills)]
        config = federation.written(federation.FederationCLI(["federation", *options, "--clients", str(clients)]), home)
        federation.make_keys(home, clients)
        orders = federation.commands(config, home, clients, federation.free_port())
        orders[0] += ["--ckpt_path", "last"]
        began, recovered = time.perf_counter(), list[float]()
        with ExitStack() as stack:
            running = [stack.enter_context(federation.process(o, home / f"{i}.log")) for i, o in enumerate(orders)]
            last = home / "server" / "checkpoints" / "last.ckpt"
            wait_for_round(last, 0.0, running, orders, home, stack)
            for _ in range(kills):
                time.sleep(rng.uniform(0, 6))
                if running[0].poll() == 0:
                    break
                victim, name = rng.choice(processes(running))
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                killed = time.time()
                said[name] += 1
                wait_for_round(last, killed, running, orders, home, stack)
                recovered.append(time.time() - killed)
                print(f"killed {name}: next round after {recovered[-1]:.1f} s", flush=True)
            while running[0].poll() is None:
                restart(running, orders, home, stack)
                time.sleep(0.2)
        seconds = time.perf_counter() - began
        shown = federation.compared(config, home, clients, 2 * kills)
    return {"killed": dict(said), "seconds_to_next_round": recovered, "seconds": seconds, "result": str(shown.title)}


def cost(messages: int) -> dict[str, object]:
    """Seconds and CPU-seconds of echoed messages through superlink, supernode and ClientApp, idle time taken off."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        echo = Federation(Path(folder), lambda request: request)
        try:
            echo.ask()
            rest = spent(lambda: time.sleep(10))
            found: dict[str, object] = {}
            for size, number in ((3, messages), (10**7, 2), (10**8, 1)):
                payload = os.urandom(size)
                wall, cpu = spent(lambda: [echo.ask(payload, 300.0) for _ in range(number)])  # noqa: B023
                idle = rest[1] / rest[0] * wall
                found[f"{size} bytes"] = {"wall": round(wall / number, 2), "cpu": round((cpu - idle) / number, 2)}
        finally:
            echo.stop()
    return found


def spent(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that something took, and CPU-seconds of this process and of all that it started."""
    before, began = used(), time.perf_counter()
    work()
    wall = time.perf_counter() - began
    return wall, sum(value - before.get(pid, 0.0) for pid, value in used().items())


def used() -> dict[int, float]:
    """CPU-seconds of this process, its descendants, and those of theirs that have ended."""
    found = {}
    for pid in (os.getpid(), *descendants(os.getpid())):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            found[pid] = sum(map(int, fields[11:15] if pid != os.getpid() else fields[11:13])) / os.sysconf(
                "SC_CLK_TCK"
            )
    return found


def many(sites: int) -> dict[str, object]:
    """Two rounds of FedAvg with many sites on this machine, whose workers are threads of this process."""
    case = next(case for case in cases.CASES if case.name == "FedAvg")
    sizes, cases.SIZES = cases.SIZES, tuple(10 + place for place in range(sites))  # type: ignore[misc]
    try:
        with tempfile.TemporaryDirectory(prefix="fl-") as folder, Deployed(Path(folder)) as deployed:
            began = time.perf_counter()
            server = deployed.run(case, "mlp", "average")
            return {"seconds": time.perf_counter() - began, **deployed.same(server, case, "mlp", "average")}
    finally:
        cases.SIZES = sizes  # type: ignore[misc]


class Relay:
    """A port of this machine behind which lies another one; counts the bytes that pass.

    Args:
        address: where they go.
    """

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target, self._door = (host, int(port)), socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        #: Bytes from those who connect, and to them.
        self.up = self.down = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._door.accept()
            far = socket.create_connection(self._target)
            for ends in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def wire(hidden: int) -> dict[str, object]:
    """Bytes of three rounds of FedAvg: by the ledger, in our messages, and on the sockets of the sites (TLS)."""
    relays: list[Relay] = []

    def through(address: str) -> str:
        relays.append(Relay(address))
        return relays[0].address

    case = replace(next(case for case in cases.CASES if case.name == "FedAvg"), nets=("wide",), fraction=1.0)
    cases.NETS["wide"] = partial(mlp, hidden=(hidden,))
    with tempfile.TemporaryDirectory(prefix="fl-") as folder, Deployed(Path(folder), through) as deployed:
        (relay,) = relays
        clients = len(cases.SIZES)
        wait_for(lambda: len(deployed.transport.present()) == clients, 120, "all sites")
        time.sleep(5)
        before = relay.up, relay.down
        time.sleep(30)
        idle = [(now - then) / 30 for now, then in zip((relay.up, relay.down), before, strict=True)]
        before, began = (relay.up, relay.down), time.perf_counter()
        server = deployed.run(case, "wide", "average")
        seconds = time.perf_counter() - began
        passed = [now - then for now, then in zip((relay.up, relay.down), before, strict=True)]
        rows = {
            way: {
                "ledger": ledger,
                "messages": messages,
                "socket": total,
                "socket_without_idle": round(total - rate * seconds),
                "idle_per_site_and_second": round(rate / clients, 1),
            }
            for way, ledger, messages, total, rate in zip(
                ("up", "down"),
                (server.bytes_up, server.bytes_down),
                (deployed.told, deployed.asked),
                passed,
                idle,
                strict=True,
            )
        }
    return {"clients": clients, "rounds": cases.ROUNDS, "seconds": round(seconds, 1), **rows}


def processes(running: list[Any]) -> list[tuple[int, str]]:
    """Number and kind of every process of the federation."""
    kinds = {one.pid: "server" if place == 0 else "site" for place, one in enumerate(running)}
    return [*kinds.items(), *(item for pid in kinds for item in descendants(pid).items())]


def restart(running: list[Any], orders: list[list[str]], home: Path, stack: ExitStack) -> None:
    """Start what has ended again, as systemd would; a server that is through has ended for good."""
    for place, one in enumerate(running):
        if one.poll() not in (None, 0):
            running[place] = stack.enter_context(federation.process(orders[place], home / f"{place}.log"))


def wait_for_round(
    path: Path, since: float, running: list[Any], orders: list[list[str]], home: Path, stack: Any
) -> None:
    """Wait until a checkpoint is newer than a moment, starting again what has ended."""
    until = time.time() + 600
    while not path.exists() or path.stat().st_mtime <= since:
        if running[0].poll() == 0:
            return
        if time.time() > until:
            raise SystemExit(f"No round within 600 s: {federation.last_line(home / '0.log')}")
        restart(running, orders, home, stack)
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of golden cases")
    parser.add_argument("--all", action="store_true", help="all nets and buffer policies")
    parser.add_argument("--kills", type=int, default=0, help="processes that are killed")
    parser.add_argument("--cost", type=int, default=0, help="small messages to measure")
    parser.add_argument("--sites", type=int, default=0, help="sites of one federation")
    parser.add_argument("--wire", type=int, default=0, help="hidden units of the net whose bytes are counted")
    parser.add_argument("--seed", type=int, default=0, help="decides which and when")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, work in (
        ("kills", lambda: chaos(given.kills, given.seed)),
        ("cost", lambda: cost(given.cost)),
        ("sites", lambda: many(given.sites)),
        ("wire", lambda: wire(given.wire)),
    ):
        if getattr(given, name):
            found = {"environment": environment(), **work()}
            print(json.dumps(found, indent=1))
            OUT.with_name(f"deployed_{name}.json").write_text(json.dumps(found, indent=1) + "\n")
            return
    rows = matrix(given.only, given.all)
    equal = sum(all(row[part] for part in ("weights", "private", "scores")) for row in rows)
    print(f"{equal} of {len(rows)} equal bit for bit")
    if not given.only:
        OUT.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
