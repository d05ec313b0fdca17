"""Processes of a federation that are killed, and large messages."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support.federations import Federation, alive, descendants, listening, needs_flower, one, wait_for

pytestmark = [needs_flower, pytest.mark.slow]


def kill_while_asked(federation, name, seconds=180.0):
    """The reply to a message during whose answer one of the processes is killed, and the seconds that took."""
    killed = []

    def kill():
        federation.site.asked.wait(60)
        killed.append(one(os.getpid(), name))
        os.kill(killed[0], signal.SIGKILL)

    federation.site.asked.clear()
    thread = threading.Thread(target=kill)
    thread.start()
    began = time.monotonic()
    reply = federation.ask(b"slow", seconds)
    thread.join()
    print(f"{name} killed: {reply!r} after {time.monotonic() - began:.1f} s")
    return reply


@pytest.fixture
def slow_federation(tmp_path):
    asked = threading.Event()

    def answer(request):
        asked.set()
        if request == b"slow":
            time.sleep(6)
        return request[::-1]

    made = Federation(tmp_path, answer)
    made.site.asked = asked
    yield made
    started = descendants(os.getpid())
    made.stop()
    wait_for(lambda: not alive(started), 10, "the end of all processes")
    assert made.link.port not in listening()


def test_a_large_message_passes(federation):
    payload = os.urandom(100_000_000)
    assert federation.ask(payload, 300) == payload[::-1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flower-supernode", "hospital did not answer"),
        ("flwr-clientapp", "hospital did not answer"),
        ("flower-superlink", "the connection to the superlink was lost"),
        ("flwr-serverapp", "the connection to the superlink was lost"),
    ],
)
def test_a_killed_process_fails_its_message_and_comes_back(slow_federation, name, words):
    federation = slow_federation
    assert federation.ask(b"ab") == b"ba"
    reply = kill_while_asked(federation, name)
    assert isinstance(reply, str)
    assert words in reply
    began = time.monotonic()
    assert federation.ask(b"cd") == b"dc"
    print(f"{name}: answers again after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("parent", ["supernode", "superlink"])
def test_a_killed_superexec_comes_back(federation, parent):
    assert federation.ask(b"ab") == b"ba"
    child = (federation.site.node if parent == "supernode" else federation.link).child
    pid = child.pid
    os.kill(one(pid, "flower-superexec"), signal.SIGKILL)
    wait_for(lambda: child.pid not in (None, pid), 30, "another start")
    wait_for(lambda: federation.ask(b"cd") == b"dc", 180)


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from tests.support.federations import Federation\n"
        "made = Federation(Path(sys.argv[1])); print(made.ask(b'ab'), made.link.port, flush=True); time.sleep(1000)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    reply, port = killed.stdout.readline().split()
    assert reply == "b'ba'"
    started = descendants(killed.pid)
    assert len(alive(started)) >= 5, started
    assert int(port) in listening()
    killed.kill()
    killed.wait()
    killed.stdout.close()
    wait_for(lambda: not alive(started), 15, f"the end of {started}")
    assert int(port) not in listening()
    again = Federation(tmp_path)  # the same folder: keys, registration and sockets
    assert again.ask(b"cd") == b"dc"
    again.stop()
