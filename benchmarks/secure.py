"""Measures what secure aggregation costs a site and the server: bytes and CPU-seconds of a round, without the training.

python benchmarks/secure.py [--parameters 100000 1000000] [--clients 4 10]

Sites are objects of this process, each with keys, shares and masks of its own; their clients take no step. Figures are
those of the second round, beside the same round with plain messages.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.callbacks import SecureAggregationCallback
from fl_lightning.papers.environment import environment
from fl_lightning.remote import PrivateStore, RemoteClients, Site, SiteData
from fl_lightning.remote.envelope import unseal
from tests.support import Idle, blobs, fit, mlp
from tests.support.sites import InProcess

OUT = Path(__file__).with_suffix(".json")
STAGES = ("setup", "share", "masked", "unmask")
#: Inputs and outputs of the net, besides its hidden units.
WIDTH = 20 + 1 + 4


class Counting(InProcess):
    """A transport that counts CPU-seconds and bytes of a site, and loses one client's values if it is told to."""

    lose = ""

    def __init__(self, sites: Any) -> None:
        super().__init__(sites)
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self.up: dict[str, list[int]] = defaultdict(list)
        self.down: dict[str, list[int]] = defaultdict(list)
        self.total = 0.0

    def post(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes | str]]:
        for node, request in requests.items():
            header = unseal(request).header
            jobs = header.get("jobs") or [{}]
            stage = header.get("stage") or jobs[-1].get("kind", "join")
            began = time.process_time()
            reply: bytes = self.sites[node].answer(request)
            spent = time.process_time() - began
            self.total += spent
            if node == "node-0":
                self.cpu[stage].append(spent)
                self.up[stage].append(len(reply))
                self.down[stage].append(len(request))
            yield node, "lost" if stage == "masked" and node == self.lose else reply


class Timed(RemoteClients):
    """Counts the server's CPU-seconds in secure aggregation."""

    seconds = 0.0

    def _train_securely(self, *args: Any, **named: Any) -> Any:
        transport: Any = self.transport
        began, sites = time.process_time(), transport.total
        found = list(super()._train_securely(*args, **named))
        self.seconds = time.process_time() - began - (transport.total - sites)
        yield from found


def run(hidden: int, clients: int, callbacks: Sequence[Any], lose: str = "") -> tuple[Counting, Timed, Any]:
    def make() -> Any:
        return Idle(mlp(hidden=(hidden,)), lr=0.1, engine="sequential")

    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        data = blobs([8] * clients).federation
        stores = [PrivateStore(Path(folder) / str(client)) for client in range(clients)]
        sites = {
            f"node-{client}": Site(client, make(), data.part([client]), store, guards=callbacks)
            for client, store in enumerate(stores)
        }
        transport = Counting(sites)
        transport.lose = lose
        method = make()
        remote = Timed(method, transport, clients, clients - 1, patience=10.0, callbacks=callbacks)
        method.exchange = remote
        fit(method, SiteData(remote, seed=0), 2, callbacks=list(callbacks), precision="32-true")
    return transport, remote, method


def measured(parameters: int, clients: int) -> dict[str, object]:
    """One row: a site's bytes and CPU-seconds of a round, and the server's CPU-seconds."""
    hidden = parameters // WIDTH
    secure = [SecureAggregationCallback()]
    transport, remote, method = run(hidden, clients, secure)
    _, lost, _ = run(hidden, clients, secure, f"node-{clients - 1}")
    plain, _, _ = run(hidden, clients, [])
    stages = {
        stage: {
            "cpu": round(transport.cpu[stage][-1], 4),
            "up": transport.up[stage][-1],
            "down": transport.down[stage][-1],
        }
        for stage in STAGES
    }
    total = {name: round(sum(one[name] for one in stages.values()), 3) for name in ("cpu", "up", "down")}
    return {
        "parameters": sum(p.numel() for p in method.net.parameters()),
        "clients": clients,
        "site": {**total, "stages": stages},
        "plain": {"cpu": round(plain.cpu["train"][0], 4), "up": plain.up["train"][0], "down": plain.down["train"][0]},
        "server_cpu": round(remote.seconds, 3),
        "server_cpu_one_lost": round(lost.seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--clients", type=int, nargs="*", default=[4, 10])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for parameters in given.parameters:
        for clients in given.clients:
            rows.append(measured(parameters, clients))
            print(json.dumps(rows[-1]), flush=True)
            OUT.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
