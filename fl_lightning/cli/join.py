"""``fl-lightning join``: a client of a federation at the site of its data; data and private state never leave it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Literal

from lightning.pytorch.cli import LightningArgumentParser

from fl_lightning.cli.sides import SideCLI, folder, talk
from fl_lightning.errors import FederationError
from fl_lightning.flower.needed import needed
from fl_lightning.remote import PrivateStore, Site


class JoinCLI(SideCLI):
    """Options of a site besides method and data: the Trainer's precision and defence callbacks."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv, save_config_callback=None)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of a site."""
        super().add_arguments_to_parser(parser)
        parser.add_argument("--client", type=int, required=True, help="the client's number in the federation, from 0")
        parser.add_argument("--superlink", type=str | None, help="the server's address, host:port")
        parser.add_argument(
            "--attach", action="store_true", help="do not start a supernode: answer your own, which has --superlink"
        )
        parser.add_argument("--home", type=str, default="site", help="folder for the client's private state and keys")
        parser.add_argument(
            "--key", type=str | None, help="the site's private key; created in the home folder by default"
        )
        parser.add_argument(
            "--authority", type=str | None, help="certificate of the authority that signed the server's certificate"
        )
        parser.add_argument("--keep", type=int, default=8, help="number of rounds that the server can be rolled back")
        parser.add_argument(
            "--secure_aggregation",
            type=Literal["require"] | None,
            help="require: only join runs with secure aggregation",
        )
        parser.add_argument("--yes", action="store_true", help="approve the run without asking")


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    needed()
    from fl_lightning.flower.bridge import Worker
    from fl_lightning.flower.keys import node_keys
    from fl_lightning.flower.sockets import socket_path
    from fl_lightning.flower.supernode import Supernode

    cli = JoinCLI(argv)
    config = cli.config
    talk(bool(config["quiet"]))
    if bool(config["superlink"]) == config["attach"]:
        raise FederationError(
            "Say where the server is, --superlink host:port, or --attach for a supernode of your own."
        )
    if config["insecure"] and (config["key"] or config["authority"]):
        raise FederationError("--insecure excludes --key and --authority: remove one or the other.")
    if not config["insecure"] and not config["authority"] and not config["attach"]:
        raise FederationError(
            "A site checks whom it talks to: give --authority, the certificate authority.pem of the server's operator, "
            "or --insecure for a trial on one machine."
        )
    home = folder(config["home"])
    site = _site(cli, home)
    if config["secure_aggregation"] == "require" and site.member is None:
        raise FederationError(
            "This site takes part in secure aggregation alone, and the run has none: have SecureAggregationCallback "
            "put among the Trainer's callbacks on both sides."
        )
    _approve(site, config["yes"])
    key = None
    if not config["insecure"] and not config["attach"]:
        key = Path(config["key"]) if config["key"] else node_keys(home, "site").private
        print(f"The server's operator needs {key.with_suffix('.pub')}, this site's public key.")
    path, plugin = socket_path(home, "site"), cli.trainer.strategy.precision_plugin

    def answer(request: bytes) -> bytes:
        with plugin.forward_context():
            return site.answer(request)

    authority = Path(config["authority"]) if key is not None else None
    worker, node = Worker(path, answer), None
    if config["attach"]:
        print(f"""answering: flower-supernode --node-config 'socket="{path}"'""")
    else:
        node = Supernode(home / "flower", config["superlink"], path, key, authority)

    def end(number: int, frame: FrameType | None) -> None:
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    if node is not None:
        node.start()
    try:
        worker.serve()
    finally:
        if node is not None:
            node.stop()
    print("This site has left; its private state is in " + str(home))


def _site(cli: JoinCLI, home: Path) -> Site:
    """The client: its method, its data and the store of its private state."""
    client, data = int(cli.config["client"]), cli.datamodule.federation
    rows = data.num_clients
    if client < 0 or (rows > 1 and client >= rows):
        raise FederationError(
            f"The data has {rows} clients, 0 to {rows - 1}, not {client}: set --client to one of them, or use "
            "data of one client."
        )
    own = data.part([0 if rows == 1 else client], [client])
    method = cli.prepared()
    site = Site(client, method, own, PrivateStore(home / "private"), guards=cli.trainer.callbacks)  # type: ignore[attr-defined]
    site.store = PrivateStore(home / "private" / site.run.fingerprint, int(cli.config["keep"]))
    return site


def _approve(site: Site, yes: bool) -> None:
    """Show the operator the run and what the site reports on joining, and ask for approval."""
    print("Request to join this run:")
    print("\n".join(f"  {line}" for line in site.run.lines()))
    header, parts = site.introduction()
    print("On joining, this site reports to the server:")
    for name, value in (*header.items(), *parts["told"].items()):
        print(f"  {name:<12} {value}")
    message = "its message and training loss" if site.member is None else "its message and training loss under masks"
    print(f"In each round it sends {message}, numbers of rounds and steps trained, and scores.")
    if yes:
        return
    if not sys.stdin.isatty():
        raise FederationError("The run cannot be approved without a terminal: add --yes to approve it.")
    if input("Approve? [y/N] ").strip().lower() not in ("y", "yes"):
        raise FederationError("The run was not approved: nothing was sent.")
