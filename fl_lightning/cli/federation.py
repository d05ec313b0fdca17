"""``fl-lightning federation``: server and sites on this machine, compared with the simulation of the same run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.table import Table

from fl_lightning.callbacks.secure import SecureAggregationCallback
from fl_lightning.cli.sides import SideCLI, folder
from fl_lightning.errors import FederationError
from fl_lightning.flower.needed import needed
from fl_lightning.module import FederatedModule
from fl_lightning.process import end_with_parent

#: Seconds that a process may take to terminate.
ENDING = 30.0


class FederationCLI(SideCLI):
    """Options of ``fit``, and the number of sites."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv, save_config_callback=None)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of a federation on one machine."""
        super().add_arguments_to_parser(parser)
        parser.add_argument("--clients", type=int, default=3, help="number of sites")
        parser.add_argument("--home", type=str, default="runs/federation", help="folder for all output")


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    needed()
    cli = FederationCLI(argv)
    home = folder(cli.config["home"]).resolve()
    path, rounds = written(cli, home), int(cli.config["trainer"]["max_epochs"] or 0)
    if rounds < 1:
        raise FederationError("The number of rounds is missing: add --trainer.max_epochs 5.")
    began = time.perf_counter()
    deployed(path, home, int(cli.config["clients"]), bool(cli.config["insecure"]))
    seconds = time.perf_counter() - began
    Console().print(compared(path, home, int(cli.config["clients"]), rounds))
    print(f"{rounds} rounds over Flower took {seconds:.0f} s including start and shutdown; all processes have ended.")
    print(f"Logs, keys and the sites' private state: {home}")


def written(cli: FederationCLI, home: Path) -> Path:
    """Write the run's configuration, with an engine whose bits do not depend on the other clients."""
    rows, clients = cli.datamodule.federation.num_clients, int(cli.config["clients"])
    if not 1 <= clients <= rows:
        raise FederationError(
            f"--clients must be between 1 and {rows}, the number of clients in the data, not {clients}."
        )
    text = cli.parser.dump(cli.config, skip_none=True)
    config = yaml.safe_load(text)
    for name in ("clients", "home", "insecure", "quiet", "dry_run", "use", "config"):
        config.pop(name, None)
    config["model"]["init_args"]["engine"] = "sequential"
    config["trainer"] |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    config["trainer"] |= {"callbacks": _secure(config["trainer"]), "default_root_dir": str(home / "server")}
    path = home / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def _secure(trainer: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the callbacks that hide messages, which are also part of the simulation and do not change its result."""
    kept = [one for one in trainer.get("callbacks") or [] if one["class_path"].endswith(".SecureAggregationCallback")]
    return kept or None


def deployed(config: Path, home: Path, clients: int, insecure: bool = False) -> None:
    """Run the configuration with a server and sites in separate processes, and end them all.

    Args:
        config: the run's configuration.
        home: where logs, keys and what sites keep go.
        clients: how many sites.
        insecure: without TLS and keys.
    """
    if not insecure:
        make_keys(home, clients)
    server, *sites = commands(config, home, clients, free_port(), insecure)
    with ExitStack() as stack:
        serving = stack.enter_context(process(server, home / "server.log"))
        joined = [stack.enter_context(process(one, home / f"site-{k}.log")) for k, one in enumerate(sites)]
        _wait(serving, joined, home)


def commands(config: Path, home: Path, clients: int, port: int, insecure: bool = False) -> list[list[str]]:
    """The arguments of the server's command and of every site's.

    Args:
        config: the run's configuration.
        home: the folder that :func:`deployed` writes to.
        clients: how many sites.
        port: where the server listens.
        insecure: without TLS and keys.
    """
    federation, safe = home / "federation", ["--insecure"] if insecure else []
    serve = ["serve", "--config", str(config), "--clients", str(clients), "--home", str(federation), *safe]
    found = [[*serve, "--host", "127.0.0.1", "--port", str(port)]]
    for client in range(clients):
        own = home / f"site-{client}"
        keys = ["--key", str(own / "site.key"), "--authority", str(federation / "keys" / "authority.pem")]
        join = ["join", "--config", str(config), "--client", str(client), "--home", str(own), "--yes"]
        found.append([*join, "--superlink", f"127.0.0.1:{port}", *(safe or keys)])
    return found


def make_keys(home: Path, clients: int) -> None:
    """Create the server's certificate and the sites' keys, and copy the public parts to the other side."""
    from fl_lightning.flower.keys import node_keys, server_keys

    server_keys(folder(str(home / "federation")) / "keys")
    known = folder(str(home / "federation" / "sites"))
    for client in range(clients):
        keys = node_keys(folder(str(home / f"site-{client}")))
        (known / f"site-{client}.pub").write_bytes(keys.public.read_bytes())


@contextmanager
def process(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of this package as a process that ends on exit, and with this process however that ends."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", "fl_lightning.cli", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(ENDING)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _wait(server: subprocess.Popen[bytes], sites: Sequence[subprocess.Popen[bytes]], home: Path) -> None:
    """Wait for the server to end; fail if a site ends before it."""
    while server.poll() is None:
        for client, site in enumerate(sites):
            if site.poll() is not None:
                raise FederationError(f"Site {client} ended: {last_line(home / f'site-{client}.log')}")
        time.sleep(0.2)
    if server.returncode:
        raise FederationError(f"The server ended: {last_line(home / 'server.log')}")


def last_line(log: Path) -> str:
    """The last line of a log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"{log} is empty."


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def compared(config: Path, home: Path, clients: int, rounds: int) -> Table:
    """Compare the deployed run with its simulation: scores, weights and private state."""
    server = torch.load(home / "server" / "checkpoints" / "last.ckpt", weights_only=True)
    simulated = simulate(config, clients, rounds)
    own = simulated.state_dict()
    weights = all(torch.equal(own[name], value) for name, value in server["state_dict"].items())
    private = _private_equal(simulated, server["fl_lightning"]["clients"]["versions"], home)
    shown = Table(
        title=f"{type(simulated).__name__}, {rounds} rounds: server weights equal bit for bit: {_yes(weights)}; "
        f"private state: {_yes(private)}"
    )
    for heading in ("client", "training samples", f"{simulated.task.headline} over Flower", "simulated"):
        shown.add_column(heading, justify="right")
    told = json.loads((home / "federation" / "scores.json").read_text())
    for client, score in enumerate(simulated.evaluator.scores["test"].tolist()):
        samples = simulated.roster[client].samples
        shown.add_row(str(client), str(samples), f"{told[client]:.4f}", f"{score:.4f}")
    return shown


def simulate(config: Path, clients: int, rounds: int) -> FederatedModule:
    """The same run with the first clients of the data, simulated."""
    from fl_lightning.cli.lightning import FederatedCLI

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = FederatedCLI(args=["--config", str(config), "--quiet"], run=False, save_config_callback=None)
        cli.datamodule.federation = cli.datamodule.federation.part(range(clients))
        seed_everything(cli.config["seed_everything"], verbose=False)
        callbacks: list[Any] = cli.trainer.callbacks  # type: ignore[attr-defined]
        plain: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            precision=cli.trainer.precision,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[one for one in callbacks if isinstance(one, SecureAggregationCallback)],
            **plain,
        )
        trainer.fit(cli.model, datamodule=cli.datamodule)
        trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    method: FederatedModule = cli.model
    return method


def _private_equal(simulated: FederatedModule, versions: dict[int, str], home: Path) -> bool:
    """Whether the sites' private state equals the simulated clients', bit for bit."""
    from fl_lightning.remote import PrivateStore

    for number, version in versions.items():
        (path,) = (home / f"site-{simulated.client_of(number)}" / "private").glob(f"*/{number}.{version}.*")
        kept, own = PrivateStore(path.parent).load(number, version).private, simulated.snapshots[number].private
        if kept.keys() != own.keys() or not all(torch.equal(kept[name], own[name]) for name in own):
            return False
    return versions.keys() == set(simulated.snapshots)


def _yes(equal: bool) -> str:
    return "yes" if equal else "NO"
