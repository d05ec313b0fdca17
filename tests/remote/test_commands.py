"""``fl-lightning serve``, ``join`` and ``federation`` as people use them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.federations import free_port, needs_flower

#: Flower would install an app's dependencies.
DISABLED = "--disable-runtime-dependency-installation"
RUN = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 2, "accelerator": "cpu", "logger": False},
    "model": {
        "class_path": "FedPer",
        "init_args": {"net": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [8]}}, "lr": 0.1},
    },
    "data": {
        "class_path": "Digits",
        "init_args": {"partition": {"class_path": "IID", "init_args": {"clients": 2}}},
    },
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def run(folder: Path, *arguments: str, seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "fl_lightning.cli", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=seconds,
        check=False,
    )


@needs_flower
@pytest.mark.slow
def test_a_federation_on_one_machine_equals_its_simulation(config: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "federation", "--config", str(config), "--clients", "2", "--home", "here")
    assert done.returncode == 0, done.stderr
    assert "server weights equal bit for bit: yes; private state: yes" in " ".join(done.stdout.split())
    assert (tmp_path / "here" / "federation" / "keys" / "authority.pem").exists()
    assert list((tmp_path / "here" / "site-1" / "private").glob("*/1.2-*.safetensors"))
    still = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert not still.split()


@needs_flower
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["join", "--client", "0", "--superlink", "here:1"], "give --authority"),
        (
            ["join", "--client", "0", "--superlink", "here:1", "--insecure", "--key", "k"],
            "--insecure excludes --key and --authority",
        ),
        (["join", "--client", "0", "--superlink", "here:1", "--insecure"], "add --yes"),
        (
            ["join", "--client", "0", "--superlink", "here:1", "--insecure", "--secure_aggregation", "require"],
            "takes part in secure aggregation alone, and the run has none",
        ),
        (["join", "--client", "5", "--superlink", "here:1", "--insecure", "--yes"], "0 to 1, not 5"),
        (["join", "--client", "0", "--superlink", "here", "--insecure", "--yes"], "must be host:port"),
        (["serve", "--clients", "2", "--min_clients", "3", "--insecure"], "between 1 and the 2"),
        (["serve", "--clients", "2", "--ckpt_path", "best"], "--ckpt_path best is not known here"),
        (["serve", "--clients", "2", "--patience", "0", "--insecure"], "patience must be"),
        (["federation", "--clients", "3"], "between 1 and 2, the number of clients"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments: list[str], said: str, config: Path, tmp_path: Path) -> None:
    port = ["--port", str(free_port())] if arguments[0] == "serve" else []
    done = run(tmp_path, arguments[0], "--config", str(config), *arguments[1:], *port)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@needs_flower
def test_a_site_shows_what_the_run_is_and_what_it_will_tell(config: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "join", "--config", str(config), "--client", "1", "--superlink", "here:1", "--insecure")
    assert done.returncode == 2
    assert re.search(r"method +FedPer", done.stdout)
    assert re.search(r"fingerprint +[0-9a-f]{16}", done.stdout)
    assert re.search(r"samples +\{'train': \d+, 'val': \d+, 'test': \d+\}", done.stdout)
    assert "none: the server sees the messages of this client as they are" in done.stdout


@needs_flower
@pytest.mark.slow
def test_serve_and_join_beside_flower_processes_of_ones_own(config: Path, tmp_path: Path) -> None:
    port, nodes = free_port(), [free_port() for _ in range(2)]
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "own"\n\n[superlink.own]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    quiet = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environment = {**os.environ, **quiet, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    bin_, ours = Path(sys.executable).parent, [sys.executable, "-m", "fl_lightning.cli"]
    environment["PATH"] = f"{bin_}{os.pathsep}{environment['PATH']}"
    started = []

    def begin(name: str, *command: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log))
        return started[-1]

    def waited(name: str, pattern: str, seconds: float = 120.0) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = re.search(pattern, (tmp_path / f"{name}.log").read_text())
            if found:
                return found[1]
            time.sleep(0.2)
        raise AssertionError((tmp_path / f"{name}.log").read_text()[-2000:])

    try:
        where = ["--host", "127.0.0.1", "--port"]
        begin("link", str(bin_ / "flower-superlink"), "--insecure", *where, str(port), DISABLED)
        run_it = [*ours, "serve", "--config", str(config), "--clients", "2", "--attach", "--home", "server"]
        server = begin("server", *run_it)
        for client in range(2):
            site = ["join", "--config", str(config), "--client", str(client), "--attach", "--yes"]
            begin(f"site-{client}", *ours, *site, "--home", f"s{client}")
            path = waited(f"site-{client}", r"--node-config 'socket=\"(.*)\"'")
            node = ["--insecure", "--superlink", f"127.0.0.1:{port}", *where, str(nodes[client])]
            begin(f"node-{client}", str(bin_ / "flower-supernode"), *node, "--node-config", f'socket="{path}"')
        app, path = (waited("server", p) for p in (r"flwr run (\S+) ", r"socket=\"(.*)\"'"))
        subprocess.run(
            [str(bin_ / "flwr"), "run", app, "own", "--run-config", f'socket="{path}"'],
            env=environment,
            check=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert server.wait(240) == 0, (tmp_path / "server.log").read_text()[-2000:]
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)
    scores = yaml.safe_load((tmp_path / "server" / "scores.json").read_text())
    assert all(0.1 < score <= 1 for score in scores)
    assert len(scores) == 2
