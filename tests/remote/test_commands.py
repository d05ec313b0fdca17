"""``fl-lightning serve``, ``join`` and ``federation`` as people use them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.flower.federations import free_port, needs_flower

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
    assert "weights of the server equal to the bit: yes; what clients keep: yes" in " ".join(done.stdout.split())
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
        (["join", "--client", "0", "--superlink", "here:1", "--insecure", "--key", "k"], "uses neither"),
        (["join", "--client", "0", "--superlink", "here:1", "--insecure"], "say --yes"),
        (["join", "--client", "5", "--superlink", "here:1", "--insecure", "--yes"], "none is client 5"),
        (["join", "--client", "0", "--superlink", "here", "--insecure", "--yes"], "must be host:port"),
        (["serve", "--clients", "2", "--min_clients", "3", "--insecure"], "between 1 and the 2"),
        (["serve", "--clients", "2", "--ckpt_path", "best"], "Which checkpoint is the best"),
        (["serve", "--clients", "2", "--patience", "0", "--insecure"], "patience must be"),
        (["federation", "--clients", "3"], "between 1 and the 2 clients"),
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
