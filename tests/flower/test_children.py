import ast
import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fl_lightning.flower
from fl_lightning.errors import FederationError
from fl_lightning.flower import children, supernode
from fl_lightning.flower.children import Child, environment
from fl_lightning.flower.keys import fingerprint, node_keys, server_keys
from fl_lightning.flower.launch import COMMANDS, REFUSED, LocalOnly
from fl_lightning.flower.superlink import Superlink
from fl_lightning.flower.supernode import Supernode
from tests.support.federations import alive, free_port, needs_flower, wait_for

FOLDER = Path(fl_lightning.flower.__file__).parent


def child(tmp_path, code, **named):
    return Child("child", lambda: [sys.executable, "-c", code], os.environ, tmp_path / "log", **named)


def test_a_child_is_heard_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "PAUSE", 0.05)
    heard, judged = [], []
    made = child(tmp_path, "print('hello')", hear=heard.append, judge=judged.append)
    made.start()
    wait_for(lambda: len(heard) >= 2, 20)
    made.stop()
    assert heard[:2] == ["hello\n", "hello\n"]
    assert judged[0] == "hello"
    assert (tmp_path / "log").read_text().startswith("hello\nhello\n")


def test_a_child_waits_as_long_as_its_judge_says(tmp_path):
    made = child(tmp_path, "pass", judge=lambda last: 1000.0)
    made.start()
    wait_for(lambda: made.pid is None, 20)
    assert made.starts == 1
    made.stop()
    assert made.starts == 1


def test_a_child_that_does_not_listen_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "FAREWELL", 0.3)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(1000)"
    heard = []
    made = child(tmp_path, code, hear=heard.append)
    made.env["PYTHONUNBUFFERED"] = "1"
    made.start()
    wait_for(lambda: heard, 20)
    pid = made.pid
    made.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_without_the_process_that_starts_its_apps_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "LOOK", 0.2)
    monkeypatch.setattr(children, "PAUSE", 0.05)
    monkeypatch.setattr(children, "STARTER", "sleep")
    code = (
        "import subprocess, time; subprocess.run(['sleep', '0.01']); time.sleep(1.5);"  # others come and go
        "print(subprocess.Popen(['sleep', '1000']).pid); time.sleep(1000)"
    )
    heard = []
    made = child(tmp_path, code, hear=heard.append)
    made.env["PYTHONUNBUFFERED"] = "1"
    made.start()
    wait_for(lambda: heard, 20)
    children.time.sleep(0.5)
    assert made.starts == 1
    os.kill(int(heard[0]), signal.SIGKILL)
    wait_for(lambda: len(heard) > 1, 20)
    made.stop()
    for line in heard:
        subprocess.run(["kill", line.strip()], stderr=subprocess.DEVNULL, check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system ends children with their parents on Linux")
def test_children_end_with_a_process_that_is_killed(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from fl_lightning.flower.children import Child, environment\n"
        "env = environment(Path(sys.argv[1]))\n"
        "run = [sys.executable, '-c', 'from fl_lightning.process import end_with_parent; end_with_parent();'\n"
        "    'import subprocess, time; print(1); time.sleep(1000)']\n"
        "child = Child('child', lambda: run, env, Path(sys.argv[1]) / 'log', hear=lambda line: print(child.pid))\n"
        "child.start(); time.sleep(1000)"
    )
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(FOLDER.parent.parent)}
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env)
    number = int(parent.stdout.readline())
    assert alive([number])
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not alive([number]), 5)


def test_flower_finds_our_scripts_first_and_no_command_that_runs_other_apps(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "intranet")
    env = environment(tmp_path)
    scripts = Path(env["PATH"].split(os.pathsep)[0])
    assert {path.name for path in scripts.iterdir()} == {*COMMANDS, *REFUSED}
    for name in REFUSED:
        assert subprocess.run([scripts / name, "--token", "x"], check=False).returncode == 1
    assert env["FLWR_HOME"] == str(tmp_path / "flwr")
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert env["NO_PROXY"] == "intranet,127.0.0.1,localhost"


def test_nothing_here_imports_a_library_of_numbers():
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not {name.split(".")[0] for name in names} & {"torch", "numpy", "lightning"}, path
    code = (
        "import sys, fl_lightning.flower.bridge, fl_lightning.flower.launch; print({'torch', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=FOLDER.parents[1]
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("path", "client", "status"),
    [
        ("/v1/fleet/pull-messages", "10.0.0.9", 200),
        ("/v1/control/start-run", "10.0.0.9", 403),
        ("/v1/control/register-node", "10.0.0.9", 403),
        ("/v1/runtime/acquire-task", "10.0.0.9", 403),
        ("/v1/fleet/../control/start-run", "10.0.0.9", 403),
        ("/docs", "10.0.0.9", 403),
        ("/v1/control/start-run", "127.0.0.1", 200),
        ("/v1/control/start-run", "::1", 200),
        ("/v1/control/start-run", "10.0.0.1", 200),  # the address of this machine that it listens on
        ("/v1/control/start-run", "", 403),
    ],
)
def test_other_machines_reach_the_messages_of_sites_alone(path, client, status):
    said = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(event):
        said.append(event)

    scope = {"type": "http", "path": path, "client": (client, 1) if client else None, "server": ("10.0.0.1", 8000)}
    asyncio.run(LocalOnly(app)(scope, None, send))
    assert said[0]["status"] == status


@needs_flower
def test_what_ended_a_supernode_is_said_once(tmp_path, caplog):
    keys, key = server_keys(tmp_path / "k"), node_keys(tmp_path / "n")
    made = Supernode(tmp_path, f"127.0.0.1:{free_port()}", tmp_path / "w", key.private, keys.authority)
    with caplog.at_level(logging.WARNING, supernode.__name__):
        for _ in range(2):
            assert made._judge("[code: 2004] Failed to activate SuperNode.") == supernode.REJOIN
        assert caplog.text.count("refuses this site") == 1
        done = subprocess.run(["ssh-keygen", "-l", "-f", key.public], capture_output=True, text=True, check=False)
        assert done.returncode or done.stdout.split()[1] in caplog.text
        assert fingerprint(key.private) in caplog.text
        made._refused -= supernode.FORGOTTEN
        assert made._judge("[code: 2004] Failed to activate SuperNode.") == supernode.REFUSED
        assert made._judge("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed") == supernode.REFUSED
        assert str(keys.authority) in caplog.text
        assert made._judge("Traceback") is None
        assert "restarted" in caplog.text
        made._hear("WARNING :   Connection attempt failed, retrying in 0.88 seconds\n")
        assert f"No server answers at {made.superlink}" in caplog.text
        caplog.clear()
        with socket.create_server(("127.0.0.1", int(made.superlink.split(":")[1]))):
            made._said = ""
            made._hear("WARNING :   Connection attempt failed, retrying in 0.88 seconds\n")
        assert not caplog.text


@needs_flower
def test_what_a_site_and_a_server_need_is_said(tmp_path):
    keys, key = server_keys(tmp_path / "k"), node_keys(tmp_path / "n")
    with pytest.raises(FederationError, match="host:port"):
        Supernode(tmp_path, "server", tmp_path / "w")
    with pytest.raises(FederationError, match="both its private key"):
        Supernode(tmp_path, "server:1", tmp_path / "w", key.private)
    with pytest.raises(FederationError, match="no certificate at"):
        Supernode(tmp_path, "server:1", tmp_path / "w", key.private, tmp_path / "none")
    port = free_port()
    words = f"Port {port} of 127.0.0.1 cannot be used"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(FederationError, match=words):
        Superlink(tmp_path / "s", port=port, keys=keys).start()


def test_a_missing_flower_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.flower.needed.find_spec", lambda name: None)
    for make in (lambda: Superlink(tmp_path), lambda: server_keys(tmp_path), lambda: node_keys(tmp_path)):
        with pytest.raises(FederationError, match=r"pip install 'fl-lightning\[deploy\]'"):
            make()
