"""Both ends of the bridges without Flower: a ServerApp and a ClientApp that the tests play."""

import logging
import os
import stat
import threading
import time

import pytest

from fl_lightning.errors import FederationError
from fl_lightning.flower import bridge
from fl_lightning.flower.bridge import GridTransport, Worker
from fl_lightning.flower.sockets import Door, connect, receive, send, socket_path
from tests.support.federations import wait_for


class Played:
    """A ServerApp: connects whenever it is submitted, says who is online, answers as it is told to."""

    def __init__(self, path, nodes):
        self.path, self.nodes, self.connections = path, nodes, []

    def submit(self):
        connection = connect(self.path, 5)
        self.connections.append(connection)
        send(connection, "nodes", nodes=self.nodes)

    def asked(self):
        return receive(self.connections[-1])


@pytest.fixture
def played(tmp_path):
    serverapp = Played(tmp_path / "s", {"7": "clinic", "8": "hospital", "9": ""})
    serverapp.transport = GridTransport(serverapp.path, serverapp.submit, patience=5)
    yield serverapp
    serverapp.transport.close()


def test_nodes_are_called_by_their_names_or_numbers(played):
    assert played.transport.present() == ["9", "clinic", "hospital"]


def test_two_nodes_of_one_name_are_called_by_numbers(tmp_path):
    assert bridge._names({7: "a", 8: "a", 9: "b"}) == {7: "7", 8: "8", 9: "b"}


def test_replies_come_in_the_order_in_which_nodes_answer(played):
    played.transport.present()
    replies = played.transport.post({"clinic": b"one", "hospital": b"two"}, 10)
    got = []
    thread = threading.Thread(target=lambda: got.extend(replies))
    thread.start()
    asked = [played.asked(), played.asked()]
    assert [(header["node"], payload) for header, payload in asked] == [("7", b"one"), ("8", b"two")]
    for header, payload in reversed(asked):
        send(played.connections[0], "reply", payload * 2, number=header["number"])
    thread.join(5)
    assert got == [("hospital", b"twotwo"), ("clinic", b"oneone")]


def test_every_node_is_yielded_once_with_a_sentence_where_it_failed(played):
    played.transport.present()
    got = []
    requests = {"clinic": b"", "hospital": b"", "nobody": b""}
    thread = threading.Thread(target=lambda: got.extend(played.transport.post(requests, 0.5)))
    thread.start()
    header, _ = played.asked()
    send(played.connections[0], "failed", number=header["number"], reason="it was ill")
    thread.join(5)
    assert dict(got) == {
        "nobody": "nobody is not online.",
        "clinic": "clinic did not answer: it was ill.",
        "hospital": "hospital did not answer within 0.5 s.",
    }
    assert len(got) == 3


def test_a_late_reply_is_left_out_and_named(played, caplog):
    played.transport.present()
    assert dict(played.transport.post({"clinic": b"x"}, 0.1)) == {"clinic": "clinic did not answer within 0.1 s."}
    header, _ = played.asked()
    with caplog.at_level(logging.WARNING, bridge.__name__):
        send(played.connections[0], "reply", b"late", number=header["number"])
        wait_for(lambda: caplog.records, 5)
    assert "clinic answered" in caplog.text
    assert "dropped" in caplog.text
    again = played.transport.post({"clinic": b"y"}, 5)
    threading.Timer(
        0.1, lambda: send(played.connections[0], "reply", b"new", number=played.asked()[0]["number"])
    ).start()
    assert dict(again) == {"clinic": b"new"}


def test_a_lost_serverapp_fails_what_is_outstanding_and_is_submitted_again(played):
    played.transport.present()
    replies = played.transport.post({"clinic": b"x"}, 30)
    threading.Timer(0.1, lambda: played.connections[0].close()).start()
    assert dict(replies) == {"clinic": "clinic did not answer: the connection to the superlink was lost."}
    wait_for(lambda: len(played.connections) == 2, 5)
    assert "clinic" in played.transport.present()


def test_a_second_serverapp_takes_the_place_of_the_first(played):
    played.transport.present()
    played.nodes = {"5": "other"}
    played.submit()
    wait_for(lambda: played.transport.present() == ["other"], 5)
    with pytest.raises((EOFError, OSError)):
        receive(played.connections[0])


def test_a_serverapp_that_cannot_be_started_is_said_once(tmp_path, caplog):
    def refuse():
        raise FederationError("The superlink did not start the app.")

    transport = GridTransport(tmp_path / "s", refuse, patience=0.2)
    assert transport.present() == []
    assert dict(transport.post({"a": b""}, 1)) == {"a": "a was not asked: the superlink does not answer."}
    transport.close()
    assert caplog.text.count("did not start the app") == 1


@pytest.fixture
def worker(tmp_path):
    def answer(request):
        if request == b"refused":
            raise FederationError("This site did not approve it.")
        if request == b"bug":
            raise KeyError("patient 12")
        return request[::-1]

    made = Worker(tmp_path / "w", answer)
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert not (tmp_path / "w").exists()


def asked(path, request):
    with connect(path, 5) as connection:
        send(connection, "ask", request)
        header, payload = receive(connection)
    return header, payload


@pytest.mark.usefixtures("worker")
def test_a_worker_answers_one_after_the_other(tmp_path):
    for request in (b"ab", b"", os.urandom(3_000_000)):
        assert asked(tmp_path / "w", request)[1] == request[::-1]


@pytest.mark.usefixtures("worker")
def test_a_worker_tells_sentences_but_no_exceptions(tmp_path):
    assert asked(tmp_path / "w", b"refused")[0]["reason"] == "This site did not approve it"
    header, payload = asked(tmp_path / "w", b"bug")
    assert header["reason"] == "its worker failed; the site's own log says why"
    assert "patient" not in str(header)
    assert payload == b""
    assert asked(tmp_path / "w", b"ab")[1] == b"ba"


@pytest.mark.usefixtures("worker")
def test_a_worker_goes_on_after_clientapps_that_end_or_talk_nonsense(tmp_path):
    connect(tmp_path / "w", 5).close()
    with connect(tmp_path / "w", 5) as connection:
        connection.send_bytes(b"no json")
    with connect(tmp_path / "w", 5) as connection:
        send(connection, "ask", b"xy")
    assert asked(tmp_path / "w", b"ab")[1] == b"ba"


def test_sockets_are_for_their_owner_alone(tmp_path):
    path = socket_path(tmp_path / "home", "worker")
    door = Door(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FederationError, match="Another process"):
        Door(path)
    door.close()
    path.touch()  # left behind by a process that was killed
    Door(path).close()


def test_a_long_home_has_a_short_socket(tmp_path):
    home = tmp_path / ("h" * 120)
    path = socket_path(home, "worker")
    assert path == socket_path(home, "worker") != socket_path(tmp_path / ("g" * 120), "worker")
    Door(path).close()
    path.parent.rmdir()


def test_nobody_at_a_socket_is_said(tmp_path):
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="No process listens"):
        connect(tmp_path / "s", 0.2)
    assert time.monotonic() - began >= 0.2


def test_a_wait_for_replies_ends_when_it_is_told_to(played):
    played.transport.present()

    def check():
        raise KeyboardInterrupt("enough")

    played.transport._check = check
    with pytest.raises(KeyboardInterrupt, match="enough"):
        list(played.transport.post({"clinic": b"one"}, 60))
