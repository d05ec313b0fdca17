"""Sites in this process: separate objects that share only bytes with the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.federation import Federation
from fl_lightning.module import FederatedModule
from fl_lightning.remote import PrivateStore, RemoteClients, Site, SiteData
from tests.support import cases, fit

#: Changes or drops a reply, given node, request and reply.
Meddle = Callable[[str, bytes, bytes], "bytes | str"]


class InProcess:
    """A transport that calls the sites."""

    def __init__(self, sites: Mapping[str, Site], meddle: Meddle | None = None) -> None:
        self.sites, self.meddle = dict(sites), meddle
        self.absent: set[str] = set()
        self.sent: list[tuple[str, bytes, bytes]] = []

    def present(self) -> list[str]:
        return [node for node in self.sites if node not in self.absent]

    def post(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes | str]]:
        for node, request in requests.items():
            if node in self.absent:
                yield node, "it is gone"
                continue
            reply = self.sites[node].answer(request)
            self.sent.append((node, request, reply))
            yield node, reply if self.meddle is None else self.meddle(node, request, reply)

    def close(self) -> None:
        self.absent = set(self.sites)


def site(make: Callable[[], FederatedModule], client: int, whole: Federation, folder: Path, **options: Any) -> Site:
    """A client without access to the others, in the precision of the tests."""
    method = make().double()
    return Site(client, method, whole.part([client]), PrivateStore(folder / str(client)), **options)


def network(make: Callable[[], FederatedModule], whole: Federation, folder: Path, **options: Any) -> dict[str, Site]:
    """All clients of a federation, by the names of their nodes."""
    return {f"node-{client}": site(make, client, whole, folder, **options) for client in range(whole.num_clients)}


def serve(
    server: FederatedModule,
    transport: InProcess,
    clients: int,
    rounds: int = 3,
    fraction: float = 1.0,
    ckpt_path: str | None = None,
    least: int | None = None,
    patience: float = 5.0,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """Fit a server with clients behind a transport."""
    server.double()  # as the Trainer would
    remote = RemoteClients(server, transport, clients, least, patience, callbacks=callbacks)
    server.exchange = remote
    data = SiteData(remote, fraction, seed=0)
    return fit(server, data, rounds, ckpt_path, callbacks=list(callbacks), **options)


def case_network(case: cases.Case, net: str, policy: str, folder: Path) -> InProcess:
    """The clients of a golden case."""
    return InProcess(network(lambda: case.make(net, policy, "sequential"), cases.data(case).federation, folder))


def kept(transport: InProcess, server: FederatedModule) -> dict[str, Any]:
    """Return the sites' entries of the versions that the server refers to, by number and name."""
    import torch

    found: dict[str, Any] = {}
    assert isinstance(server.exchange, RemoteClients)
    for number, version in server.exchange.versions.items():
        shot = transport.sites[f"node-{server.client_of(number)}"].store.load(number, version)
        found |= {f"{number}.{name}": value for name, value in shot.private.items()}
        found[f"{number}.counters"] = torch.tensor([shot.rounds, shot.steps, shot.last_round])
    return found
