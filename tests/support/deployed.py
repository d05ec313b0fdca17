"""Golden cases over Flower: a real superlink with TLS, supernodes with keys, a ClientApp process for every message.

The sites' workers are threads of this process, each with a method, data and a folder of its own, so that one federation
serves all cases; in ``test_commands.py`` they are processes: ``fl-lightning serve`` and ``join``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from fl_lightning.flower.bridge import GridTransport
from fl_lightning.flower.keys import node_keys, server_keys
from fl_lightning.flower.sockets import socket_path
from fl_lightning.flower.superlink import Superlink
from fl_lightning.remote import RemoteClients, Site, SiteData
from tests.support import cases, federations, fit
from tests.support.sites import network


class Deployed:
    """A superlink and as many sites as the golden cases have clients; used in a ``with``.

    Args:
        folder: where all of it lies.
        through: gives the address at which sites reach a superlink, such as that of a relay.
    """

    def __init__(self, folder: Path, through: Callable[[str], str] = lambda address: address) -> None:
        self.folder, self.sites, self.through = folder, dict[str, Site](), through
        #: Bytes of requests to sites, and of their replies.
        self.asked = self.told = 0

    def __enter__(self) -> Self:
        keys = server_keys(self.folder / "server" / "keys")
        self.link = Superlink(self.folder / "server", port=federations.free_port(), keys=keys)
        self.link.start()
        self.nodes, named = (
            [],
            {f"node-{k}": node_keys(self.folder / f"site-{k}").public for k in range(len(cases.SIZES))},
        )
        assert not self.link.register_all(named)
        address = self.through(self.link.address)
        for client in range(len(cases.SIZES)):
            home = self.folder / f"site-{client}"
            key = node_keys(home)

            def answer(request: bytes, name: str = f"node-{client}") -> bytes:
                reply = self.sites[name].answer(request)
                self.asked, self.told = self.asked + len(request), self.told + len(reply)
                return reply

            self.nodes.append(federations.Site(home, address, key.private, keys.authority, answer))
        path = socket_path(self.folder / "server", "server")
        self.transport = GridTransport(path, lambda: self.link.submit(path))
        return self

    def __exit__(self, *error: object) -> None:
        self.transport.close()
        for node in self.nodes:
            node.stop()
        self.link.stop()

    def run(
        self,
        case: cases.Case,
        net: str,
        policy: str,
        callbacks: Sequence[Any] = (),
        rounds: int = cases.ROUNDS,
        **how: Any,
    ) -> Any:
        """Run the case over Flower; private state is stored in a folder with its name.

        Args:
            case: the case.
            net: name of its net.
            policy: its buffer policy.
            callbacks: callbacks of the run, on both sides.
            rounds: number of rounds.
            how: options of :class:`RemoteClients`.
        """
        torch.manual_seed(0)

        def make() -> Any:
            return case.make(net, policy, "sequential")

        own = self.folder / f"{case.name}-{net}-{policy}-{time.time_ns()}"
        self.sites = network(make, cases.data(case).federation, own, guards=callbacks)
        server = make().double()
        how = {"patience": 300.0, "callbacks": callbacks, **how}
        remote = RemoteClients(server, self.transport, len(cases.SIZES), **how)
        server.exchange = remote
        fit(server, SiteData(remote, case.fraction, seed=0), rounds, callbacks=list(callbacks))
        return server

    def same(
        self, server: Any, case: cases.Case, net: str, policy: str, callbacks: Sequence[Any] = ()
    ) -> dict[str, bool]:
        """Whether weights, what clients keep and scores are the simulation's, bit for bit."""
        expected = cases.parts(method := cases.run(case, net, policy, "sequential", callbacks))
        private = {}
        for number, version in server.exchange.versions.items():
            shot = self.sites[f"node-{server.client_of(number)}"].store.load(number, version)
            private |= {f"{number}.{name}": value for name, value in shot.private.items()}
            private[f"{number}.counters"] = torch.tensor([shot.rounds, shot.steps, shot.last_round])
        return {
            "weights": _equal(dict(server.state_dict()), expected["server"]),
            "private": _equal(private, expected["private"]),
            "scores": _equal(server.evaluator.scores, method.evaluator.scores),
        }


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value.nan_to_num(9e9), right[name].nan_to_num(9e9)) for name, value in left.items()
    )
