"""``fl-lightning serve``: the server of a federation of real sites, a stock ``Trainer.fit`` over Flower."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.table import Table

from fl_lightning import signals
from fl_lightning.cli.lightning import check_named
from fl_lightning.cli.resume import newest
from fl_lightning.cli.sides import PORT, SideCLI, folder, talk
from fl_lightning.errors import FederationError
from fl_lightning.flower.needed import needed
from fl_lightning.remote import RemoteClients, SiteData

log = logging.getLogger(__name__)
#: Seconds between checks for keys of new sites.
LOOK = 2.0


class ServeCLI(SideCLI):
    """Server options in addition to method, data and Trainer."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of a server."""
        super().add_arguments_to_parser(parser)
        parser.add_argument("--clients", type=int, required=True, help="number of clients in the federation")
        parser.add_argument(
            "--min_clients", type=int | None, help="minimum number of clients to finish a round; default: all"
        )
        parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for a client's answer")
        parser.add_argument("--attempts", type=int, default=3, help="attempts to reach the clients that a round needs")
        parser.add_argument("--host", type=str, default="0.0.0.0", help="address to listen on")
        parser.add_argument("--port", type=int, default=PORT, help="port to listen on")
        parser.add_argument(
            "--names", type=list[str], default=[], help="host names and addresses for the server's certificate"
        )
        parser.add_argument(
            "--home",
            type=str,
            default="federation",
            help="folder for keys and Flower's files; sites' keys are in sites/",
        )
        parser.add_argument(
            "--attach", action="store_true", help="do not start a superlink: wait for 'flwr run' on your own"
        )
        parser.add_argument("--ckpt_path", type=str | None, help="resume from a checkpoint; last finds the newest")


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    needed()
    cli = ServeCLI(argv)
    config = cli.config
    talk(bool(config["quiet"]))
    checkpoint = config["ckpt_path"]
    check_named(checkpoint, goes_on=True)
    if checkpoint == "last":
        found = newest(cli.trainer)
        checkpoint = None if found is None else str(found)
    if not config["patience"] > 0:
        raise FederationError(f"patience must be greater than 0, not {config['patience']}.")
    method, trainer = cli.prepared(), cli.trainer
    with superlink(config) as transport:
        places, least = int(config["clients"]), config["min_clients"]
        remote = RemoteClients(
            method,
            transport,
            places,
            least,
            config["patience"],
            config["attempts"],
            trainer.callbacks,  # type: ignore[attr-defined]
        )
        method.exchange = remote
        _announce(cli, remote)
        data = SiteData(remote, cli.datamodule.fraction, cli.datamodule.seed, cli.datamodule.sampling)
        trainer.fit(method, datamodule=data, ckpt_path=checkpoint)
        trainer.test(method, datamodule=data, verbose=False)
        scores = method.evaluator.scores["test"].tolist()
        (Path(config["home"]) / "scores.json").write_text(json.dumps(scores))
        Console().print(table(remote, scores, method.task.headline))
        if trainer.log_dir is not None:
            print(f"The run is in {trainer.log_dir}")


@contextmanager
def superlink(config: Any) -> Iterator[Any]:
    """Flower's superlink as a child process, and the transport over it; both end on exit."""
    from fl_lightning.flower.bridge import GridTransport
    from fl_lightning.flower.keys import server_keys
    from fl_lightning.flower.sockets import socket_path
    from fl_lightning.flower.superlink import APP, Superlink

    home = folder(config["home"])
    path = socket_path(home, "server")
    if config["attach"]:
        print(f"""waiting for: flwr run {APP} --run-config 'socket="{path}"'""")
        transport = GridTransport(path, lambda: None, check=signals.check)
        try:
            yield transport
        finally:
            transport.close()
        return
    keys = None if config["insecure"] else server_keys(home / "keys", config["names"])
    link = Superlink(home, config["host"], config["port"], keys)
    link.start()
    stop, looking = threading.Event(), None
    try:
        transport = GridTransport(path, lambda: link.submit(path), check=signals.check)
        try:
            if keys is not None:
                known = folder(str(home / "sites"))
                looking = threading.Thread(target=_register, args=(link, known, stop), daemon=True)
                looking.start()
            yield transport
        finally:
            stop.set()
            transport.close()
    finally:
        link.stop()
        if looking is not None:
            looking.join()


def _register(link: Any, sites: Path, stop: threading.Event) -> None:
    """Admit sites whose public keys are in a folder, including keys added later."""
    known: set[Path] = set()
    while not stop.is_set():
        new = {key.stem: key for key in sorted(sites.glob("*.pub")) if key not in known}
        if new:
            known |= set(new.values())
            for sentence in link.register_all(new).values():
                log.warning("%s", sentence)
        stop.wait(LOOK)


def _announce(cli: ServeCLI, remote: RemoteClients) -> None:
    """Print the run, and how sites join."""
    if cli.config["quiet"]:
        return
    home, port = cli.config["home"], cli.config["port"]
    print("\n".join(remote.run.lines()))
    if cli.config["attach"]:
        return
    how = "--insecure" if cli.config["insecure"] else f"--authority {home}/keys/authority.pem"
    print(f"sites join with: fl-lightning join --config ... --client K --superlink HOST:{port} {how}")
    if not cli.config["insecure"]:
        print(f"put each site's public key into {home}/sites")


def table(remote: RemoteClients, scores: list[float], headline: str) -> Table:
    """Scores of each client's model on its own test samples."""
    shown = Table(title=f"{headline} on each client's own test samples, reported by the sites")
    for heading in ("client", "training samples", headline):
        shown.add_column(heading, justify="right")
    for client, score in enumerate(scores):
        samples = remote.method.roster[client].samples
        shown.add_row(str(client), str(samples) if samples else "never joined", f"{score:.4f}")
    return shown
